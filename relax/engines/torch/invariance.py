"""The self-test of deterministic mode (DE2): a request's bits must not depend on who shares its batch, its slot or padding.

Called by the engine at the first load. Models whose kernels depend on the batch (experts grouped by token, several intra-op
threads) fail here, at start, and not as an unexplained difference between two runs.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from relax.core.error import EngineError
from relax.engines.torch.forward import Forward

_ROWS, _COLUMNS, _LENGTHS = 40, 192, (5, 1, 17, 40, 90)


def check_invariance(model: Any, min_rows: int, vocabulary_size: int) -> None:
    """Raises EngineError naming what changed the logits of one request."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, vocabulary_size, 24).tolist()
    others = [random.integers(0, vocabulary_size, 24).tolist() for _ in range(_ROWS)]
    alone = _logits(model, min_rows, [prompt], 0)
    for change, prompts, row in (
        ("requests in the same decode batch", [prompt, *others[:6]], 0),
        ("a large decode batch", [prompt, *others[: _ROWS - 1]], 0),
        ("the slot it was in", [*others[:9], prompt], 9),
    ):
        _compare(alone, _logits(model, min_rows, prompts, row), change)
    for length in _LENGTHS:
        # Longer neighbours make attention read more padded columns.
        neighbour = random.integers(0, vocabulary_size, 24 + length).tolist()
        _compare(alone, _logits(model, min_rows, [prompt, neighbour], 0), f"a neighbour {length} tokens longer")
    together = _logits(model, min_rows, [prompt, *others[:8]], 0, together=True)
    _compare(alone, together, "prompts of the same prefill batch")


def _logits(
    model: Any, min_rows: int, prompts: list[list[int]], row: int, together: bool = False
) -> npt.NDArray[np.float32]:
    """Logits of two decode steps for the prompt in `row`, prefilled by length, one by one unless `together`."""
    forward = Forward(model, min_rows)
    forward.cache.reshape(_ROWS, _COLUMNS, 0)
    placements = [(prompt[:-1], [index]) for index, prompt in enumerate(prompts)]
    for batch in [placements] if together else [[placement] for placement in placements]:
        forward.prefill(batch, [False] * len(batch))
    last = np.array([prompt[-1] for prompt in prompts])
    lengths = np.array([len(prompt) - 1 for prompt in prompts])
    steps = [forward.decode(last, lengths)[row], forward.decode(last, lengths + 1)[row]]
    return torch.stack(steps).float().cpu().numpy()


def _compare(alone: npt.NDArray[np.float32], changed: npt.NDArray[np.float32], what: str) -> None:
    if not np.array_equal(alone, changed):
        worst = float(np.abs(alone - changed).max())
        raise EngineError(
            f"deterministic mode: logits of a request differ by {worst:.1e} depending on {what}; use one intra-op thread"
            " (OMP_NUM_THREADS=1) and a dense fp32 model, or set run.deterministic to false"
        )
