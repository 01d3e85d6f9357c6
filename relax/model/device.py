"""Which device a model lives on, by the name that a configuration gives it."""

import torch


def find_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
