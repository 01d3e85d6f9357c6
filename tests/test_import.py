"""What loads without torch, and in which direction rooms import one another."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "ray")


def light_modules() -> list[str]:
    """Every module of core and config, and every room's own config.py and table.py."""
    package = ROOT / "relax"
    paths = [path for room in ("core", "config") for path in (package / room).rglob("*.py")]
    paths += [path for name in ("config.py", "table.py") for path in package.rglob(name)]
    return sorted(
        {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in set(paths)}
    )


def loaded_after(modules: list[str]) -> list[str]:
    """Which heavy packages are loaded after importing `modules`, in an interpreter of their own."""
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_configuration_loads_without_torch() -> None:
    modules = light_modules()
    assert {"relax.core.protocol", "relax.config.table", "relax.training.config", "relax.training.table"} <= {*modules}
    if loaded_after(modules):
        guilty = {module: heavy for module in modules if (heavy := loaded_after([module]))}
        pytest.fail(f"these modules must load without {HEAVY}: {guilty}")


def test_the_check_sees_torch() -> None:
    assert "torch" in loaded_after(["relax.training.optimizer"])


def test_rooms_import_downwards_only() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
