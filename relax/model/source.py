"""Where a model comes from: a folder, a name on the hub, a GGUF file, a file that a Python package carries.

Called by whoever loads a model, before `load`: every kind ends as one local Hugging Face folder. Only the hub kind may reach the
network, and only for files that are not in its cache; nothing that is fetched or found here is executed or unpickled (SE2).
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

from relax.core.error import UserError
from relax.model.gguf import convert_gguf, is_gguf

Kind: TypeAlias = Literal["auto", "directory", "hub", "gguf"]

PACKAGE = "package:"
"""`package:name/file` is a file or folder inside an installed Python package, which is found but not imported."""
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""What is fetched of a hub model: no pickled weights, no code."""


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """What it takes to build a model again: `path`, `source` and `cache` as the recipe has them, and the seed of random weights."""

    path: str
    source: Kind = "auto"
    cache: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    seed: int = 0


def model_folder(path: str, source: Kind = "auto", cache: str | None = None) -> Path:
    """The local folder of model `path`; a GGUF file is converted once, into the folder `cache`.

    Raises UserError when it is not there, is not of the kind that `source` names, or cannot be fetched or converted.
    """
    local = _in_package(path) if path.startswith(PACKAGE) else Path(path).expanduser()
    kind = _kind(path, local) if source == "auto" else source
    return _FINDERS[kind](path, local, cache)


def _kind(path: str, local: Path) -> Literal["directory", "hub", "gguf"]:
    if local.is_dir():
        return "directory"
    if local.is_file() or local.suffix == ".gguf":
        return "gguf"
    return "hub" if _HUB_NAME.fullmatch(path) else "directory"


def _directory(path: str, local: Path, cache: str | None) -> Path:
    if local.is_file():
        raise UserError(f"model {path!r} is a file, expected a Hugging Face folder; for a GGUF file say source: gguf")
    if not local.is_dir():
        raise UserError(
            f"model folder {path!r} does not exist; give a Hugging Face folder (relative to the working directory), a hub name "
            "such as 'org/name', a .gguf file, or 'package:name/file'"
        )
    return local


def _gguf(path: str, local: Path, cache: str | None) -> Path:
    if local.is_dir():
        found = ", ".join(sorted(file.name for file in local.glob("*.gguf"))) or "none"
        raise UserError(f"model {path!r} is a folder, expected a GGUF file; GGUF files in it: {found}")
    if not local.is_file():
        raise UserError(f"GGUF file {path!r} does not exist; download it, or correct model.path")
    if not is_gguf(local):
        raise UserError(f"{path!r} is no GGUF file (its first bytes are not 'GGUF'); give a folder or a GGUF file")
    return convert_gguf(local, cache)


def _hub(path: str, local: Path, cache: str | None) -> Path:
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise UserError(f"{path!r} is no name of a hub model; expected 'org/name', or 'org/name@revision'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(match["name"], revision=match["revision"], allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub's client raises errors of its own, its HTTP library's and the system's
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model {path!r} is no folder here, and could not be had from the hub ({type(error).__name__}: {reason}); correct "
            "the name, log in for a gated model, or with no network put the model into a folder and give its path"
        ) from error


_FINDERS: dict[str, Callable[[str, Path, str | None], Path]] = {"directory": _directory, "hub": _hub, "gguf": _gguf}


def _in_package(path: str) -> Path:
    """The file or folder that `package:name/file` means."""
    name, _, rest = path.removeprefix(PACKAGE).partition("/")
    parts = PurePosixPath(rest).parts
    if not name.isidentifier() or ".." in parts or rest.startswith("/"):
        raise UserError(f"{path!r} names no file of a package; expected 'package:name/file', name without dots")
    home = _package_home(name, path)
    found = home.joinpath(*parts)
    if not found.exists():
        held = ", ".join(sorted(file.name for file in home.glob("*.gguf"))) or "none"
        raise UserError(f"{path!r} does not exist: package {name!r} has no {rest!r}; GGUF files in it: {held}")
    return found


def _package_home(name: str, path: str) -> Path:
    # Finding a package runs none of its code: it may need packages that are not installed, and only its files are wanted.
    spec: Any = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{path!r} needs the package {name!r}, which is not installed; run: pip install --no-deps {name.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))
