"""The self-test of deterministic mode (DE2): a request's bits must not depend on who shares its batch, its slot or padding.

Called by the engine at the first load. Models whose kernels depend on the batch (experts grouped by token, several intra-op
threads) fail here, at start, and not as an unexplained difference between two runs.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from relax.core.error import EngineError
from relax.engines.torch.forward import Forward, Placement
from relax.model.family import Family

_ROWS, _COLUMNS, _LENGTHS = 40, 192, (5, 1, 17, 40, 90)


def check_invariance(model: Any, min_rows: int, vocabulary_size: int, family: Family | None = None) -> None:
    """Raises EngineError naming what changed the logits of one request.

    Prompts are text: media are encoded one by one in deterministic mode, so that no neighbour can touch what they add.
    """
    random = np.random.default_rng(0)
    text = np.setdiff1d(np.arange(vocabulary_size), [] if family is None else list(family.placeholders.values()))
    prompt = random.choice(text, 24).tolist()
    others = [random.choice(text, 24).tolist() for _ in range(_ROWS)]

    def logits(prompts: list[list[int]], row: int, together: bool = False) -> npt.NDArray[np.float32]:
        return _logits(Forward(model, min_rows, family), prompts, row, together)

    alone = logits([prompt], 0)
    for change, prompts, row in (
        ("requests in the same decode batch", [prompt, *others[:6]], 0),
        ("a large decode batch", [prompt, *others[: _ROWS - 1]], 0),
        ("the slot it was in", [*others[:9], prompt], 9),
    ):
        _compare(alone, logits(prompts, row), change)
    for length in _LENGTHS:
        # Longer neighbours make attention read more padded columns.
        neighbour = random.choice(text, 24 + length).tolist()
        _compare(alone, logits([prompt, neighbour], 0), f"a neighbour {length} tokens longer")
    together = logits([prompt, *others[:8]], 0, together=True)
    _compare(alone, together, "prompts of the same prefill batch")


def _logits(forward: Forward, prompts: list[list[int]], row: int, together: bool) -> npt.NDArray[np.float32]:
    """Logits of two decode steps for the prompt in `row`, prefilled by length, one by one unless `together`."""
    forward.cache.reshape(_ROWS, _COLUMNS, 0)
    placements = [Placement(prompt[:-1], [index]) for index, prompt in enumerate(prompts)]
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
