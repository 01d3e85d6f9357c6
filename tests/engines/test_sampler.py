"""Counter-based random numbers and the draw itself (DE1, TK5)."""

import numpy as np
import pytest
import torch

from relax.engines.random import hashes, uniforms
from relax.engines.torch.batcher import _ROW
from relax.engines.torch.sampler import Sampler


def rows(count: int, **fields: object) -> np.ndarray:
    table = np.zeros(count, dtype=_ROW)
    table["temperature"], table["top_p"] = 1.0, 1.0
    for name, value in fields.items():
        table[name] = value
    return table


def sampler(size: int, forbidden: tuple[int, ...] = ()) -> Sampler:
    allowed = np.ones(size, dtype=np.bool_)
    allowed[list(forbidden)] = False
    return Sampler(allowed, torch.device("cpu"))


def test_hash_is_splitmix64() -> None:
    # With seed 0 the state of counter i is (i + 1) * gamma: the published first outputs of splitmix64 seeded with 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hashes(0, np.arange(3)).tolist() == expected


def test_numbers_depend_on_seed_and_counter_only() -> None:
    together = uniforms([5, 5, 9, 2**62], [0, 7, 0, 3])
    alone = [uniforms(seed, counter)[0] for seed, counter in ((5, 0), (5, 7), (9, 0), (2**62, 3))]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_uniform_over_counters_and_over_neighbouring_seeds() -> None:
    for numbers in (uniforms(3, np.arange(20_000)), uniforms(np.arange(20_000), 0)):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert np.abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.8, "top_k": 3}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution_and_logprobs_are_before_top_p_and_top_k(
    fields: dict[str, float], expected: list[float]
) -> None:
    count = 20_000
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probabilities.log().expand(count, 4)
    tokens, logprobs = sampler(4).sample(logits, rows(count, **fields), uniforms(1, np.arange(count)))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / count, expected, atol=0.012)
    assert all(share > 0 or token not in tokens for token, share in enumerate(expected))
    temperature = fields.get("temperature", 1.0) or 1.0
    full = torch.log_softmax(probabilities.log() / temperature, -1)[tokens]
    np.testing.assert_allclose(logprobs, full.numpy(), atol=1e-6)


def test_rows_of_one_batch_keep_their_own_settings_and_bits() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=random)
    table = rows(6, temperature=[1.0, 0.0, 0.7, 1.3, 1.0, 0.7], top_k=[0, 0, 5, 0, 1, 0], top_p=[1, 1, 1, 0.5, 1, 0.9])
    numbers = uniforms(np.arange(6), 0)
    tokens, logprobs = sampler(50).sample(logits, table, numbers)
    for row in range(6):
        one = slice(row, row + 1)
        token, logprob = sampler(50).sample(logits[one], table[one], numbers[one])
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])
    assert tokens[1] == logits[1].argmax()
    assert tokens[4] == logits[4].argmax()


def test_rule_tk5_a_token_outside_the_allowed_vocabulary_is_never_sampled() -> None:
    count = 5_000
    logits = torch.zeros(count, 4)
    logits[:, 2] = 50.0  # by far the likeliest, if it were allowed
    for fields in ({}, {"temperature": 0.0}, {"top_k": 1}):
        tokens, logprobs = sampler(4, (2,)).sample(logits, rows(count, **fields), uniforms(1, np.arange(count)))
        assert 2 not in tokens
        np.testing.assert_allclose(logprobs, np.log(1 / 3), atol=1e-6)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_extreme_numbers_give_tokens_that_have_probability(number: float) -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 2:4] = 0.0
    tokens, _ = sampler(6).sample(logits, rows(1), np.array([number]))
    assert tokens[0] == (2 if number == 0 else 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported_as_nan_for_their_row_only(value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 0] = value
    _, logprobs = sampler(4).sample(logits, rows(3), np.array([0.5, 0.5, 0.5]))
    assert np.isnan(logprobs).tolist() == [False, True, False]
