"""The weight files that a server loads: each version a folder as `save_pretrained` writes it, on a disk that both sides see.

Called by the engine on its compute thread. A version's folder is written aside, flushed and renamed, so what has its name is whole;
names on disk are Hugging Face's also where a model in memory has others (fused experts).
"""

import os
import shutil
from pathlib import Path
from typing import Any

from relax.core.version import Version
from relax.core.weight import WeightSet
from relax.model.name import bind_tensors


class ServerFolder:
    """`model` gives names and config.json; the tensors of each version are bound to it. `seen_as` is what the server calls `path`."""

    def __init__(self, path: Path, model: Any, seen_as: str | None = None) -> None:
        self.path = path
        self._model = model
        self._seen_as = path.absolute().as_posix() if seen_as is None else seen_as.rstrip("/")

    def write(self, weights: WeightSet) -> str:
        """Write a version and return its folder as the server knows it. Raises OSError, TransportError when it does not fit the model."""
        version = weights.manifest.version
        device = next(self._model.parameters()).device
        bind_tensors(self._model, {name: value.to(device) for name, value in weights.tensors.items()})
        aside = self.path / f".{_name(version)}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            _save(self._model, aside)
            for file in [*aside.iterdir(), aside]:
                _flush(file)
            target = self.path / _name(version)
            shutil.rmtree(target, ignore_errors=True)  # of a load that failed
            os.rename(aside, target)
            _flush(self.path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return f"{self._seen_as}/{_name(version)}"

    def keep(self, version: Version) -> None:
        """Delete every other version, and halves of versions."""
        for folder in self.path.iterdir() if self.path.is_dir() else ():
            if folder.name != _name(version):
                shutil.rmtree(folder, ignore_errors=True)


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # how a full disk looks from there
        raise OSError(f"cannot write the weights into {folder}: {error}") from error


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _name(version: Version) -> str:
    return f"{version.incarnation:04d}-{version.number:08d}"
