"""The metric table: everything that a run emits or reads is declared, and only numbers are metrics."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from relax.algorithms.measure import MEASURES
from relax.services.metric import METRICS, metric_of, split_numbers

EMITTERS = (
    "services/statistic.py",
    "services/tally.py", "services/projection.py", "services/meter.py", "services/roles/trainer.py",
    "services/pass_rate.py", "weights/updater.py", "training/torch_backend.py", "training/emulated.py", "training/encoder.py",
    "algorithms/supervised.py", "algorithms/loss.py", "algorithms/gap.py", "algorithms/distillation.py",
)  # fmt: skip
READERS = (
    "services/summary.py", "services/curve.py", "services/status.py", "services/monitors/progress.py", "services/cli/status.py",
)  # fmt: skip
NAME = re.compile(r"(?:[a-z_0-9]+|\*)(?:/(?:[a-z_0-9]+@\*|[a-z_0-9]+|\*))+")
NOT_METRICS = {"stage/*", "eval/initial", "eval/final", "train/eval"}
"""Notes of the ledger and keys of the summary."""


def names_in(path: Path) -> set[str]:
    """Text constants that look like metric names; the holes of an f-string become `*`."""
    found: set[str] = set()
    tree = ast.parse(path.read_text("utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if NAME.fullmatch(text):
            found.add(text)
    return found - NOT_METRICS


def is_declared(name: str) -> bool:
    if "*" not in name:
        return metric_of(name) is not None
    pattern = re.compile(name.replace("*", "[^/]+"))
    return any(pattern.fullmatch(declared) for declared in METRICS)


@pytest.mark.parametrize("file", [*EMITTERS, *READERS])
def test_every_metric_in_the_code_is_declared(root: Path, file: str) -> None:
    undeclared = {name for name in names_in(root / "relax" / file) if not is_declared(name)}
    assert not undeclared, f"declare these in relax/services/metric.py: {sorted(undeclared)}"


def test_the_scan_finds_names_and_misses_none_that_is_undeclared(root: Path, tmp_path: Path) -> None:
    found = {name for file in EMITTERS for name in names_in(root / "relax" / file)}
    assert {"reward/mean", "eval/*/reward", "idle/*", "weights/probe_gap", "training/padding/share"} <= found
    (tmp_path / "a.py").write_text('x = {"made/up": 1, f"idle/{x}": 2}')
    assert {name for name in names_in(tmp_path / "a.py") if not is_declared(name)} == {"made/up"}


def test_the_table_holds_what_losses_declare_and_everything_has_a_unit_and_a_meaning() -> None:
    assert MEASURES.keys() <= METRICS.keys()
    assert all(metric.unit and metric.meaning for metric in METRICS.values())


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("eval/heldout/reward", "eval/<set>/reward"),
        ("idle/engine-0", "idle/<thread>"),
        ("reward/mean", "reward/mean"),
        ("reward/x", None),
        ("eval/a/b/reward", None),
    ],
)
def test_templates_stand_for_one_part(name: str, declared: str | None) -> None:
    assert metric_of(name) == (METRICS[declared] if declared else None)


def test_only_finite_numbers_are_metrics() -> None:
    good = {"a": 1, "b": 0.5, "c": True, "d": np.float32(2), "e": np.int64(3), "f": np.bool_(False)}
    bad = {
        "list": [1.0],
        "text": "1",
        "none": None,
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "array": np.ones(1),
        "huge": 10**400,
    }
    accepted, refused = split_numbers({**good, **bad})
    assert accepted == {"a": 1.0, "b": 0.5, "c": 1.0, "d": 2.0, "e": 3.0, "f": 0.0}
    assert all(type(value) is float for value in accepted.values())
    assert refused.keys() == bad.keys()
    assert "list" in refused["list"]
    assert "nan" in refused["nan"]
