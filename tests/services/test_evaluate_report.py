"""What `relax eval` prints of a set, and the file of an evaluation that was interrupted."""

from pathlib import Path

from relax.services.cli.evaluate import describe_set
from relax.services.ledger import EvaluationRow
from relax.services.pass_rate import set_metrics
from relax.services.unfinished import Unfinished


def row(number: int, reward: float | None) -> EvaluationRow:
    return EvaluationRow(
        f"e{number:06d}/0", 0, "held", 5, reward, None if reward is not None else "timeout", "5 \u2028"
    )


def test_a_set_is_one_line_and_each_source_of_a_mixed_one_another() -> None:
    groups = {"a": [[row(0, 1.0), row(1, 0.0)]], "b": [[row(2, None), row(3, 0.0)]]}
    metrics = set_metrics("held", groups, (1, 2), 1.0) | set_metrics("other", {"a": groups["a"]}, (), 1.0)
    assert describe_set("held", 4, metrics) == [
        "held: mean reward 0.2500 over 4 samples, 1 failed, pass@1 0.2500, pass@2 0.5000",
        "  a: mean reward 0.5000, pass@1 0.5000, pass@2 1.0000",
        "  b: mean reward 0.0000, pass@1 0.0000, pass@2 0.0000",
    ]
    assert describe_set("other", 2, metrics) == ["other: mean reward 0.5000 over 2 samples"]


def test_case_b14_samples_are_read_back_as_they_were_and_a_torn_line_is_none(tmp_path: Path) -> None:
    path, what = tmp_path / "evaluations" / "step.unfinished.jsonl", {"step": 5}
    rows = [row(0, 1.0), row(1, None), row(2, 0.1 + 0.2)]
    with Unfinished(path, what) as first:
        for item in rows:
            first.add(item)
    text = path.read_text("utf-8")
    path.write_text(text[:-30], "utf-8")
    with Unfinished(path, what) as second:
        assert list(second.rows.values()) == rows[:2]
        second.add(rows[2])
    assert path.read_text("utf-8") == text
    with Unfinished(path, {"step": 6}) as other:
        assert other.rows == {}
    with Unfinished(path, what) as gone:
        assert gone.rows == {}
        gone.remove()
    assert not path.exists()
