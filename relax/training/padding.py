"""From frozen rows to padded tensors, and back: the one place of this room where numpy becomes torch.

Called by torch backends. Rows are copied, never modified; whatever stands off the mask (NaN included) is replaced by 0, so it
cannot reach a loss (LO4).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.core.batch import MicroBatch, TrainRow
from relax.core.completion import frozen
from relax.core.error import InvariantError
from relax.training.lane import LaneLayout, find_lanes, lay_out


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B >= 1 rows of T >= 1 positions, padded on the right.

    `attention_BT` is 1 on the rows' tokens; weights and columns are 0 off the mask. `rows` are those that were padded, with their
    media; none where the micro-batch was empty. `lanes` is how the model sees them, where that is not row by row.
    """

    token_ids_BT: Tensor
    attention_BT: Tensor
    positions_BT: Tensor
    mask_BT: Tensor
    weights_BT: Tensor
    columns: Mapping[str, Tensor]
    rows: MicroBatch = ()
    lanes: LaneLayout | None = None


def pad_batch(
    batch: MicroBatch,
    columns: Sequence[str],
    pad_id: int,
    device: torch.device,
    shares_prompts: bool = False,
    media_ids: Collection[int] = (),
) -> PaddedBatch:
    """Pad a micro-batch to its longest row. An empty one becomes a single padding token with nothing masked in (LO4).

    With `shares_prompts` siblings get lanes; `media_ids` are the placeholders of media.
    Raises InvariantError for a row whose arrays disagree, that lacks a column, or that masks in its first position.
    """
    for row in batch:
        _check_row(row, columns)
    shape = (max(1, len(batch)), max((1, *(len(row) for row in batch))))
    mask = _padded(shape, [row.mask for row in batch], np.bool_)
    attention = np.zeros(shape, np.int64)
    for index, row in enumerate(batch):
        attention[index, : len(row)] = 1
    # A row without any visible token has an undefined softmax, whose NaN gradient would spread: it sees its first padding.
    attention[:, 0] = 1
    return PaddedBatch(
        _tensor(_padded(shape, [row.token_ids for row in batch], np.int64, pad_id), device),
        _tensor(attention, device),
        torch.arange(shape[1], device=device).expand(shape),
        _tensor(mask, device),
        _tensor(_masked(shape, [row.weights for row in batch], mask, np.float32), device),
        {name: _tensor(_column(shape, name, batch, mask), device) for name in columns},
        batch,
        _lanes(batch, pad_id, media_ids) if shares_prompts else None,
    )


def _lanes(batch: MicroBatch, pad_id: int, media_ids: Collection[int]) -> LaneLayout | None:
    """None where no row shares anything: rows as they are need no mask of their own."""
    lanes = find_lanes(batch, media_ids)
    return lay_out(batch, lanes, pad_id) if len(lanes) < len(batch) else None


def unpad(values_BT: Tensor, batch: MicroBatch) -> list[npt.NDArray[Any]]:
    """One read-only float32[T, ...] (int32 for integers) per row of the micro-batch; none for an empty one."""
    dtype = torch.float32 if values_BT.is_floating_point() else torch.int32
    values = values_BT.detach().to("cpu", dtype).numpy()
    return [frozen(values[index, : len(row)].copy()) for index, row in enumerate(batch)]


def _column(shape: tuple[int, int], name: str, batch: MicroBatch, mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
    parts = [row.columns[name] for row in batch]
    dtype = parts[0].dtype if parts else np.dtype(np.float32)
    # Every real number is float32 here; integers and booleans (versions, mixed) stay what they are.
    return _masked(shape, parts, mask, np.dtype(np.float32) if dtype.kind == "f" else dtype)


def _masked(
    shape: tuple[int, int], parts: Sequence[npt.NDArray[Any]], mask: npt.NDArray[Any], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    padded = _padded(shape, parts, dtype)
    padded[~mask] = 0
    return padded


def _padded(
    shape: tuple[int, int], parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, fill: int = 0
) -> npt.NDArray[Any]:
    inner = parts[0].shape[1:] if parts else ()
    padded = np.full((*shape, *inner), fill, dtype)
    for index, part in enumerate(parts):
        padded[index, : len(part)] = part
    return padded


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Shares memory with an array made here: `torch.from_numpy` warns on the read-only arrays of rows, so those are copied first."""
    return torch.from_numpy(array).to(device)


def _check_row(row: TrainRow, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in row.columns]
    if missing:
        raise InvariantError(
            "TQ3", f"{row.id} lacks the columns {missing} that the loss reads; have {sorted(row.columns)}"
        )
    arrays = {"mask": row.mask, "weights": row.weights, **{name: row.columns[name] for name in columns}}
    for name, array in arrays.items():
        inner = array.shape[1:] if name in columns else ()
        if array.shape != (len(row), *inner) or len(inner) > 1:
            raise InvariantError("TQ1", f"{name} of {row.id} has shape {array.shape}, expected ({len(row)},)")
    if len(row) and row.mask[0]:
        raise InvariantError("TK3", f"the mask of {row.id} holds position 0, which nothing predicts")
