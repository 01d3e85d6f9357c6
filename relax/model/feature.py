"""Features between numpy and torch: the dtype in which a medium is kept and carried, and the tensors that an encoder takes.

`narrow` is called where features are made, `feature_tensor` by the families. bfloat16, which numpy has not, travels as 16-bit
words whose type `Medium.dtypes` names (TQ6). Only what was computed in float32 is narrowed: grids and times stay exact.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.core.completion import frozen
from relax.core.media import Medium
from relax.model.dtype import torch_dtype


def narrow(medium: Medium, dtype: str) -> Medium:
    """The medium with its float32 arrays in `dtype` (float32, bfloat16 or float16), under a key of its own."""
    if dtype == "float32":
        return medium
    arrays, dtypes = dict(medium.arrays), dict(medium.dtypes)
    for name, array in medium.arrays.items():
        if array.dtype != np.float32:
            continue
        narrowed = _writable(array).to(torch_dtype(dtype))
        if dtype == "bfloat16":
            arrays[name], dtypes[name] = frozen(narrowed.view(torch.uint16).numpy()), dtype
        else:
            arrays[name] = frozen(narrowed.numpy())
    return replace(medium, key=f"{medium.key}/{dtype}", arrays=arrays, dtypes=dtypes)


def feature_tensor(medium: Medium, name: str, model: Any) -> Tensor:
    """One array of a medium on the device of `model`; numbers with a fraction in its dtype."""
    tensor = _writable(medium.arrays[name])
    if name in medium.dtypes:
        tensor = tensor.view(torch_dtype(medium.dtypes[name]))
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)


def feature_tensors(media: Sequence[Medium], name: str, model: Any) -> Tensor:
    """The arrays of several media, one behind the other."""
    return torch.cat([feature_tensor(medium, name, model) for medium in media])


def _writable(array: Any) -> Tensor:
    """A copy: `torch.from_numpy` warns on the read-only arrays of media, which all who hold them share."""
    return torch.from_numpy(np.array(array))
