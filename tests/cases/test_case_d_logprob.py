"""Cases D1 and D2 of real trackers, where they concern the logprob function."""

from pathlib import Path

import pytest
import torch

from relax.core.error import InvariantError, UserError
from relax.model.load import load_model, load_tokenizer
from relax.model.logprob import scaled_logits, token_logprobs
from relax.model.vocabulary import read_vocabulary

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"


def test_case_d1_rollout_at_temperature_07_and_trainer_agree() -> None:
    """Engine side samples from `scaled_logits`; trainer side asks `token_logprobs` with the same temperature."""
    model = load_model(QWEN3, "random", "float32", 1)
    allowed = torch.from_numpy(read_vocabulary(load_tokenizer(QWEN3), model.config).allowed.copy())
    with torch.no_grad():
        logits = model(input_ids=torch.arange(20)[None]).logits[0] * 30
    sampled = scaled_logits(logits, 0.7, allowed)
    ids = torch.multinomial(sampled.softmax(-1), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    rollout = sampled.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert torch.equal(token_logprobs(logits, ids, 0.7, allowed), rollout)
    assert (token_logprobs(logits, ids, 1.0, allowed) - rollout).abs().max() > 0.1


def test_case_d1_temperature_zero_and_below_is_refused() -> None:
    for temperature in (0.0, -0.5):
        with pytest.raises(UserError, match="above 0"):
            token_logprobs(torch.zeros(1, 4), torch.tensor([0]), temperature)


def test_case_d2_the_sampled_token_not_the_best_one_is_recorded() -> None:
    logits = torch.tensor([[4.0, 1.0, 0.0, -2.0]])
    recorded = token_logprobs(logits, torch.tensor([3])).item()
    assert recorded == pytest.approx(-2.0 - torch.logsumexp(logits, -1).item(), abs=1e-6)
    assert recorded < token_logprobs(logits, torch.tensor([0])).item()


def test_case_d2_a_logprob_of_a_banned_token_is_an_error_not_a_sentinel() -> None:
    allowed = torch.tensor([True, True, True, False])
    with pytest.raises(InvariantError, match=r"\[3\]"):
        token_logprobs(torch.zeros(1, 4), torch.tensor([3]), 1.0, allowed)
