"""Lets PyPI's torchvision, which is linked against CUDA, import beside a CPU torch: the two operators that its Python code describes
are defined first. Only processes that compare with transformers' video processors use it; the product never imports torchvision."""

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "torchvision"
"""Where `make` installs it, aside from everything else: inside the environment it would change what transformers does."""

_KEPT: list[Any] = []


def install() -> None:
    """Put torchvision on the path of this process."""
    import torch

    if not torch.version.cuda:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    sys.path.append(str(FOLDER))
