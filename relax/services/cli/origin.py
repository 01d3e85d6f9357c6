"""What made a run: versions of the packages that matter, and the git commit; the comment above its `config.yaml`."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax import __version__
from relax.config.load import dump_config
from relax.config.tree import RunConfig

PACKAGES = ("torch", "transformers", "numpy", "pydantic")


def config_text(config: RunConfig) -> str:
    """The resolved tree as YAML under a comment that says what wrote it."""
    installed = " ".join(f"{name} {found}" for name in PACKAGES if (found := _installed(name)))
    lines = [
        f"# Written by `relax train` at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC.",
        f"# relax {__version__}, python {platform.python_version()}, {installed}",
        f"# git commit {_commits()}",
    ]
    return "\n".join([*lines, dump_config(config)])


def _commits() -> str:
    """The working directory's, which holds the user's own code, and that of relax where it is another."""
    here, ours = commit(Path.cwd()), commit(Path(__file__).parent)
    return here if here == ours else f"{here} in the working directory, {ours} of relax"


def commit(folder: Path) -> str:
    """The commit that a folder is at, with `+changes` when tracked files differ from it; `unknown` outside a repository."""
    found = _git(folder, "rev-parse", "HEAD")
    if not found:
        return "unknown"
    return f"{found}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else found


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
