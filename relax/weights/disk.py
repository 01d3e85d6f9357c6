"""Versions as safetensors files in a folder that trainer and engines all see: for engines anywhere, relax's own or not.

Called by the roles of a run whose nodes share a disk and nothing else. Each reader copies a version into its own memory and verifies that
copy, so that nothing of the disk is needed while the engine runs.
"""

import os

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from relax.core.error import TransportError
from relax.weights.digest import verify
from relax.weights.layout import plan_safetensors
from relax.weights.manifest import Stored
from relax.weights.reader import FolderReader
from relax.weights.writer import FolderWriter


class DiskWriter(FolderWriter):
    """WeightWriter of one safetensors file per version, its manifest beside it."""

    suffix = ".safetensors"
    plan = staticmethod(plan_safetensors)


class DiskReader(FolderReader):
    """WeightReader of safetensors files."""

    suffix = ".safetensors"

    async def _open(self, stored: Stored) -> dict[str, Tensor]:
        return await self._run(self._read, stored)

    def _read(self, stored: Stored) -> dict[str, Tensor]:
        version, path = stored.manifest.version, self._folder.tensors(stored.entry.source)
        os.close(self._folder.open(stored))  # its size is right
        try:
            with self.counters.phase("copy", stored.num_bytes), torch.no_grad():
                tensors = {name: tensor.clone() for name, tensor in sorted(load_file(path).items())}
        except (SafetensorError, OSError) as error:
            raise TransportError(f"weight version {version} is refused: {path.name} cannot be read: {error}") from error
        with self.counters.phase("verify", stored.num_bytes):
            verify(stored.manifest, tensors)
        return tensors
