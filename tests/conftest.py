"""Shared fixtures, and what every test promises: no network, quiet OpenMP threads, no leaked thread or child process."""

import os

# Before torch is imported anywhere.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import sys
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAK_GRACE_S = 5.0
"""How long a test's threads and processes may take to end after the test did."""

_baseline = pytest.StashKey[tuple[set[threading.Thread], set[int]]]()


@pytest.fixture(autouse=True)
def _leak_baseline(request: pytest.FixtureRequest) -> None:
    """What runs once fixtures of wider scope are up; compared in `pytest_runtest_teardown`, after the test's own are down."""
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.set_num_threads(1)
    request.node.stash[_baseline] = (set(threading.enumerate()), _children())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if _baseline not in item.stash:
        return
    threads, children = item.stash[_baseline]
    deadline = time.monotonic() + LEAK_GRACE_S
    while (leaked := _leaked(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a thread or process that is ending says so nowhere
    if leaked:
        pytest.fail(f"the test leaked {', '.join(leaked)}", pytrace=False)


def _leaked(threads: set[threading.Thread], children: set[int]) -> list[str]:
    left = [f"thread {one.name!r}" for one in set(threading.enumerate()) - threads if not _is_ours_to_keep(one)]
    return left + [f"process {child} ({_command(child)})" for child in _children() - children]


def _is_ours_to_keep(thread: threading.Thread) -> bool:
    """tqdm's monitor lives as long as the interpreter."""
    return type(thread).__name__ == "TMonitor"


def _children() -> set[int]:
    """Process ids of living children; multiprocessing's own two servers live as long as the interpreter."""
    servers = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),  # type: ignore[attr-defined]
    }
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found |= {int(pid) for pid in task.read_text().split()}
        except OSError:  # the thread ended while we looked
            continue
    return found - servers


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "a zombie: nobody waited for it"
    except OSError:
        return "just ended"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """A folder with the configuration and tokenizer of a 0.4 M-parameter Qwen3, without weights."""
    return ROOT / "recipes" / "models" / "qwen3-char"


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> Any:
    from relax.model.load import load_tokenizer

    return load_tokenizer(tiny_model_path)


@pytest.fixture(scope="session")
def tiny_model_factory(tiny_model_path: Path) -> Callable[..., Any]:
    """Call it for a fresh tiny model: equal seeds give equal weights."""
    from relax.model.load import load_model

    def make(seed: int = 0) -> Any:
        return load_model(tiny_model_path, "random", "float32", seed)

    return make
