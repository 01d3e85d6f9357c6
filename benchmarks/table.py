"""Runs the benchmarks and puts their figures into docs/benchmarks.md, between the markers of each.

    python -m benchmarks.table [NAME ...] [--quick] [--read FILE] [--page PAGE]

Called by `make bench`. Without names, all of them. What stands outside the markers is left as it is, so a rerun of one benchmark
replaces its figures only. `--read` takes JSON lines of earlier runs instead of running; `--quick` runs small sizes and writes nothing,
unless a page is named. Exit code 1 when a benchmark fails; a missed aim is no failure.
"""

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "trl")
MACHINE = "machine"
UNEXPLAINED = "missed, and nobody has said why yet"
MOST_ROWS = 64


def names() -> list[str]:
    """Every file of this folder that has a `main`, but this one."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if has_main and path.stem != Path(__file__).stem:
            found.append(path.stem)
    return found


def run(name: str, quick: bool) -> tuple[dict[str, Any] | None, float]:
    """Run a benchmark with its output on the terminal; its last line, None when it failed, and the seconds it took."""
    flags = ["--quick"] if quick and "--quick" in (FOLDER / f"{name}.py").read_text("utf-8") else []
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    print(f"== {' '.join(command[1:])}", flush=True)
    started, last = time.monotonic(), ""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
    seconds = time.monotonic() - started
    if process.returncode != 0:
        print(f"{name} failed with exit code {process.returncode}", flush=True)
        return None, seconds
    return parse(last), seconds


def parse(line: str) -> dict[str, Any] | None:
    """The JSON object of a benchmark's last line, None for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "benchmark" in found else None


# --- text ----------------------------------------------------------------------------------------------------------------


def render(result: Mapping[str, Any], seconds: float | None = None) -> str:
    """The figures of one benchmark as Markdown."""
    name = result["benchmark"]
    took = "" if seconds is None else f", {seconds:.0f} s"
    lines = [f"`python -m benchmarks.{name}{' --quick' if result.get('quick') else ''}`{took}", ""]
    if "skipped" in result:
        return "\n".join([*lines, f"Skipped: {result['skipped']}."])
    lines += _grid(["what", "value", "aim", "met"], [_aim_row(aim) for aim in result["aims"]])
    missed = [aim for aim in result["aims"] if not aim["met"]]
    if missed:
        lines += ["", "Missed:", "", *_reasons(missed)]
    if result.get("notes"):
        lines += ["", *(f"- {note}" for note in result["notes"])]
    if result.get("table"):
        lines += ["", *_grid(result["table"]["header"], result["table"]["rows"][:MOST_ROWS])]
    return "\n".join(lines)


def _aim_row(aim: Mapping[str, Any]) -> list[str]:
    unit = f" {aim['unit']}" if aim.get("unit") else ""
    bound = "or less" if aim.get("better", "higher") == "lower" else "or more"
    return [
        aim["name"],
        f"{aim['value']:.4g}{unit}",
        f"{aim['aim']:g}{unit} {bound}",
        "yes" if aim["met"] else "**no**",
    ]


def _reasons(missed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per reason, with the aims that it explains."""
    by_reason: dict[str, list[str]] = {}
    for aim in missed:
        by_reason.setdefault(aim.get("reason") or UNEXPLAINED, []).append(aim["name"])
    for reason, aims in by_reason.items():
        yield f"- {'; '.join(aims)}: {reason}."


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, ["---"] * len(header), *rows)]
    return [f"| {' | '.join(row)} |" for row in lines]


def machine() -> str:
    """What the figures were measured on, in a sentence."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = models[0] if models else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    cores = len(os.sched_getaffinity(0))
    return f"Measured on {cores} cores of {model}, {memory:.0f} GiB, no GPU used; Python {platform.python_version()}, {packages}."


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def put_between(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of `name`, which are added at the end when it has none."""
    start, end = f"<!-- figures of {name}, written by make bench -->", f"<!-- end of {name} -->"
    block = f"{start}\n\n{text.strip()}\n\n{end}"
    before, found, rest = page.partition(start)
    if not found:
        return f"{page.rstrip()}\n\n{block}\n"
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"the page has {start!r} without {end!r}; put it back")
    return before + block + after


# --- the command -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes: do they run?")
    parser.add_argument("--read", type=Path, help="a file with JSON lines of earlier runs, instead of running")
    parser.add_argument("--page", type=Path, help="default: docs/benchmarks.md, none with --quick")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(names())}")
    page = arguments.page or (None if arguments.quick else PAGE)
    failed: list[str] = []
    if arguments.read:
        parsed = [parse(line) for line in arguments.read.read_text("utf-8").splitlines()]
        for result in filter(None, parsed):
            write(page, result["benchmark"], render(result))
    else:
        for name in arguments.names or names():
            found, seconds = run(name, arguments.quick)
            if found is None:
                failed.append(name)
                continue
            # After each one: what was measured is kept when a later one is interrupted.
            write(page, name, render(found, seconds))
    write(page, MACHINE, machine())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def write(page: Path | None, name: str, text: str) -> None:
    if page is not None:
        page.write_text(put_between(page.read_text("utf-8"), name, text), "utf-8")


if __name__ == "__main__":
    main()
