"""The frozen policy that KL is measured against: the weights that its stage began with.

Kept as a file of the run directory, so that a resumed run has the same reference. Opened by the run when a stage's plan
holds the reference role.
"""

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
    await compute.run(_bind, model, path, fresh)
    return assembly.make_backend(model), compute


def _bind(model: Any, path: Path, fresh: bool) -> None:
    if not fresh and not path.exists():
        raise UserError(
            f"{path} is gone: a resumed run needs the policy that its stage began with; start the run again"
        )
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in published_tensors(model).items()}
        with written_aside(path) as aside:
            save_file(tensors, aside)
    bind_tensors(model, load_file(path))
