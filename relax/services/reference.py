"""The frozen policy that KL is measured against: the weights that its stage began with.

Kept as a file of the run directory, so that a resumed run has the same reference. Opened by the run when a stage's plan
holds the reference role.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from relax.core.error import UserError
from relax.core.protocol import Compute, TrainBackend
from relax.model.name import bind_tensors, published_tensors
from relax.services.file import written_aside

if TYPE_CHECKING:
    from relax.services.assembly import Assembly


async def open_reference(assembly: "Assembly", path: Path, fresh: bool) -> tuple[TrainBackend, Compute]:
    """A backend that holds the reference, on a thread of its own. With `fresh` the policy as it is now is written to `path`."""
    compute = assembly.compute("reference")
    model = await compute.run(assembly.copy_model)
    if fresh:
        await compute.run(write_reference, published_tensors(model), path)
    return await bind_reference(assembly, model, path), compute


async def bind_reference(assembly: "Assembly", model: Any, path: Path) -> TrainBackend:
    """A backend around `model`, which gets the weights in `path`. Raises UserError when they are gone."""
    await assembly.compute("reference").run(_bind, model, path)
    backend = assembly.make_backend(model)
    assembly.sharing.add("reference", backend)
    return backend


def _bind(model: Any, path: Path) -> None:
    if not path.exists():
        raise UserError(
            f"{path} is gone: a resumed run needs the policy that its stage began with; start the run again"
        )
    bind_tensors(model, load_file(path))


def write_reference(tensors: Mapping[str, Any], path: Path) -> None:
    """Make the policy with these tensors the reference at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with written_aside(path) as aside:
        save_file(kept, aside)
