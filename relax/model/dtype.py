"""Names of tensor dtypes: the one table between configuration and manifests (text) and torch.

Called by model loading, weights, engines and training.
"""

import torch

from relax.core.error import UserError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes that a model may be loaded in."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises UserError for a name outside `DTYPES`."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32: the name that manifests carry, for any torch dtype."""
    return str(dtype).removeprefix("torch.")
