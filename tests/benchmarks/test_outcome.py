"""What a benchmark ends with, and how the collector puts it into a page."""

import json

import pytest

from benchmarks.outcome import Aim, report, skip
from benchmarks.table import UNEXPLAINED, names, parse, put_between, render

MISSED = Aim("speed", 1.5, 2.0, reason="it is slow; go faster", unit="x")
MET = Aim("cost", 0.1, 0.2, "lower", reason="never said")


def test_a_missed_aim_says_why_and_a_met_one_does_not() -> None:
    assert MISSED.to_json() == {
        "name": "speed",
        "value": 1.5,
        "aim": 2.0,
        "better": "higher",
        "met": False,
        "unit": "x",
        "reason": "it is slow; go faster",
    }
    assert "reason" not in MET.to_json()
    assert [Aim("edge", 2.0, 2.0).met, Aim("edge", 2.0, 2.0, "lower").met] == [True, True]


def test_the_last_line_is_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    report("toy", [MISSED, MET], quick=True, notes=["so it is"])
    result = parse(capsys.readouterr().out.splitlines()[-1])
    assert result is not None
    assert (result["benchmark"], result["quick"], len(result["aims"])) == ("toy", True, 2)


def test_a_skipped_benchmark_is_a_result_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    skip("toy", "the peer is not installed")
    result = parse(capsys.readouterr().out.splitlines()[-1])
    assert result == {"benchmark": "toy", "skipped": "the peer is not installed"}
    assert "Skipped: the peer is not installed." in render(result)


@pytest.mark.parametrize("line", ["", "done", "[1]", '{"other": 1}'])
def test_what_is_no_result_is_none(line: str) -> None:
    assert parse(line) is None


def test_a_missed_aim_is_shown_with_its_reason() -> None:
    result = {
        "benchmark": "toy",
        "aims": [MISSED.to_json(), MET.to_json()],
        "table": {"header": ["a"], "rows": [["x|y"]]},
    }
    lines = render(result, 12.3).splitlines()
    assert lines[0] == "`python -m benchmarks.toy`, 12 s"
    assert "| speed | 1.5 x | 2 x or more | **no** |" in lines
    assert "| cost | 0.1 | 0.2 or less | yes |" in lines
    assert "- speed: it is slow; go faster." in lines
    assert "| x\\|y |" in lines


def test_a_missed_aim_without_a_reason_is_called_out() -> None:
    aim = {"name": "speed", "value": 1, "aim": 2, "met": False}
    assert f"- speed: {UNEXPLAINED}." in render({"benchmark": "toy", "aims": [aim]})


def test_a_rerun_replaces_its_own_figures_only() -> None:
    page = put_between(put_between("# Page\n\nText.\n", "one", "old"), "two", "kept")
    again = put_between(page, "one", "new")
    assert again == page.replace("old", "new")
    assert put_between(again, "one", "new") == again


def test_a_marker_without_its_end_is_refused() -> None:
    page = put_between("", "one", "old").replace("<!-- end of one -->", "")
    with pytest.raises(ValueError, match="put it back"):
        put_between(page, "one", "new")


def test_every_benchmark_is_found_and_nothing_else() -> None:
    assert {"bus", "controller", "engine", "kill", "pipeline", "staleness_quality", "trl"} <= set(names())
    assert not {"table", "outcome", "bound", "emulation", "remains", "stopwatch"} & set(names())


def test_values_are_short_and_exact_enough() -> None:
    assert json.dumps(Aim("x", 1 / 3, 1.0).to_json()["value"]) == "0.3333"
