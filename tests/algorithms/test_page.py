"""The tables of docs/algorithms.md are the code's facts: what each default node reads, when it trains, what answers for age."""

from pathlib import Path

import pytest

from relax.algorithms.config import AlgorithmConfig, CorrectionConfig
from relax.algorithms.correction import CORRECTIONS
from relax.algorithms.table import ALGORITHMS
from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS
from relax.services.plan import make_plan

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text("utf-8")


def algorithm_row(name: str) -> str:
    """The line of the first table: name, columns with scope, when it trains, staleness, source."""
    node = ALGORITHMS.config_class(name)(type=name)
    assert isinstance(node, AlgorithmConfig)
    algorithm: Algorithm = ALGORITHMS.component(name)(node)
    functions = [column for function in algorithm.step_functions for column in function.consumes]
    if algorithm.critic is not None:
        functions += [*algorithm.critic.estimate.produces, *algorithm.critic.estimate.consumes]
    columns = ", ".join(
        f"`{column}` ({COLUMNS[column].scope})" for column in dict.fromkeys([*algorithm.loss.columns, *functions])
    )
    plan = make_plan(algorithm)
    when = (
        "as groups arrive"
        if not plan.step_roles and algorithm.updates * algorithm.epochs == 1
        else f"whole step, updates: {algorithm.updates}"
        + (f", epochs: {algorithm.epochs}" if algorithm.epochs > 1 else "")
    )
    verdict = "yes" if node.corrects_staleness else "no"
    return f"| `{name}` | {columns or 'none'} | {when} | {verdict}: {node.staleness_answer} | {node.paper} |"


def correction_row(kind: str) -> str:
    """The line of the second table: type, its bounds, whether it needs the step's weights first."""
    config = CorrectionConfig.model_validate({"type": kind})
    if kind in config.BANDS:
        low, high = config.band
        bounds = f"low {low:g}, high {high:g}"
    else:
        bounds = "none" if kind == "none" else f"cap {config.cap:g}"
    scope = "step" if CORRECTIONS[kind].step_function(config) is not None else "token"
    return f"| `{kind}` | {bounds} | {scope} |"


@pytest.mark.parametrize("name", ALGORITHMS.entries)
def test_every_algorithm_has_its_line(name: str) -> None:
    assert algorithm_row(name) in PAGE.splitlines()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_every_correction_has_its_line(kind: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |")]
    assert line.startswith(correction_row(kind))


def test_no_line_is_of_something_that_is_gone() -> None:
    named = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    assert named == {*ALGORITHMS.entries, *CORRECTIONS}
