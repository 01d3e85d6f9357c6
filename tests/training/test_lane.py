"""Lanes: siblings share the forward pass of their prompt, and nothing else changes (LO1)."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from relax.algorithms.supervised import SupervisedLoss
from relax.core.batch import TrainRow
from relax.core.id import group_id, sample_id, trajectory_id
from relax.training.config import AdamWConfig, ConstantConfig, TorchConfig
from relax.training.lane import Lane, find_lanes, lane_tokens, lay_out
from relax.training.packing import pack
from relax.training.torch_backend import TorchBackend


def row(group: int, sibling: int, prompt: Sequence[int], answer: Sequence[int], gap: Sequence[int] = ()) -> TrainRow:
    """A prompt, an answer, and optionally what an environment said with one more answer behind it."""
    tokens = np.array([*prompt, *answer, *gap, *(answer if gap else ())], np.int32)
    mask = np.zeros(len(tokens), bool)
    mask[len(prompt) : len(prompt) + len(answer)] = True
    if gap:
        mask[len(prompt) + len(answer) + len(gap) :] = True
    weights = np.where(mask, 1.0 + 0.1 * sibling, 0.0).astype(np.float32)
    return TrainRow(sample_id(trajectory_id(group_id(group), sibling), 0), tokens, mask, weights)


PROMPT = [5, 6, 7, 8, 9, 10]
GROUP = [row(0, 0, PROMPT, [20, 21]), row(0, 1, PROMPT, [22]), row(0, 2, PROMPT, [23, 24, 25], gap=[30, 31])]


def test_siblings_share_a_lane_and_others_do_not() -> None:
    rows = [*GROUP, row(1, 0, PROMPT, [20, 21]), row(0, 3, [*PROMPT, 11], [20])]
    lanes = find_lanes(rows)
    assert lanes == [Lane((0, 1, 2), 6, 6 + 2 + 1 + 8), Lane((3,), 0, 8), Lane((4,), 0, 8)]


def test_other_media_under_the_same_tokens_are_another_prompt() -> None:
    from relax.core.media import Medium

    first, second = (Medium(key, "image", 1, 4, {}) for key in "ab")
    rows = [
        TrainRow(r.id, r.token_ids, r.mask, r.weights, media=(m,))
        for r, m in zip(GROUP[:2], (first, second), strict=True)
    ]
    assert [lane.rows for lane in find_lanes(rows)] == [(0,), (1,)]
    same = [TrainRow(r.id, r.token_ids, r.mask, r.weights, media=(first,)) for r in GROUP[:2]]
    assert [lane.rows for lane in find_lanes(same)] == [(0, 1)]
    assert [lane.rows for lane in find_lanes(same, media_ids=(21,))] == [(0,), (1,)], "media behind the prompt"


def test_a_row_without_anything_masked_in_stands_alone() -> None:
    empty = TrainRow(GROUP[0].id, GROUP[0].token_ids, np.zeros(8, bool), np.zeros(8, np.float32))
    assert [lane.rows for lane in find_lanes([empty, GROUP[1], GROUP[2]])] == [(0,), (1, 2)]


def test_long_answers_to_a_short_prompt_are_not_put_together() -> None:
    long = [row(0, sibling, [5, 6], [20] * 1500) for sibling in range(4)]
    assert len(find_lanes(long)) == 4


def test_the_layout_by_hand() -> None:
    layout = lay_out(GROUP[:2], find_lanes(GROUP[:2]), pad_id=99)
    assert layout.token_ids_BT.tolist() == [[*PROMPT, 20, 21, 22]]
    assert layout.segment_BT.tolist() == [[0] * 6 + [1, 1, 2]]
    assert layout.source_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 6]]
    assert layout.before_N.tolist() == [5, 6, 5], "the prompt's last token predicts the first of both answers"
    seen = layout.visible()[0]
    assert seen[8].tolist() == [True] * 6 + [False, False, True], "the second answer sees the prompt and itself"
    assert seen[7].tolist() == [True] * 8 + [False]


def test_padding_sees_something() -> None:
    rows = [*GROUP, row(1, 0, PROMPT, [20])]
    layout = lay_out(rows, find_lanes(rows), pad_id=99)
    assert layout.visible().any(axis=-1).all()
    assert not layout.visible()[:, :, 1:][layout.segment_BT < 0].any()


def test_packing_puts_siblings_side_by_side_where_that_is_cheaper() -> None:
    rows = [row(group, sibling, [group + 5] * 20, [20] * (1 + sibling)) for group in range(6) for sibling in range(4)]
    batches = pack(rows, 200)
    assert sum(map(lane_tokens, batches)) < sum(map(lane_tokens, [tuple(rows[i::3]) for i in range(3)]))
    assert sorted(r.id for batch in batches for r in batch) == sorted(r.id for r in rows)
    for batch in batches:
        assert len(batch) * max(map(len, batch)) <= 200, "the budget holds for rows one by one"


def backend(share: bool, seed: int = 0, **config: object) -> TorchBackend:
    from relax.model.load import load_model, load_tokenizer
    from relax.model.vocabulary import read_vocabulary

    folder = "recipes/models/qwen3-char"
    model = load_model(folder, "random", "float32", seed)
    vocabulary = read_vocabulary(load_tokenizer(folder), model.config)
    made = TorchBackend(TorchConfig(share_prompts=share, **config), model, vocabulary)
    made.begin(AdamWConfig(lr=1e-3), ConstantConfig(), 10)
    return made


def gradients(made: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in made._parameters.items() if one.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rule_lo1_gradients_and_logprobs_are_those_of_the_rows_one_by_one(checkpointing: bool) -> None:
    rows = (*GROUP, row(1, 0, [40, 41], [42]), row(1, 1, [40, 41], [43, 44]), row(2, 0, PROMPT, [20]))
    alone, shared = (backend(share, activation_checkpointing=checkpointing) for share in (False, True))
    results = [made.forward_backward([[rows]], SupervisedLoss()) for made in (alone, shared)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[1].measures["training/tokens/forward"].value < results[0].measures["training/tokens/forward"].value
    expected, found = gradients(alone), gradients(shared)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert float((gradient - found[name]).abs().max()) <= 1e-5 * float(gradient.abs().max()) + 1e-7, name
    for one, other in zip(alone.logprobs([[rows]])[0][0], shared.logprobs([[rows]])[0][0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
