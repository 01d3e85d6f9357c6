"""The learning curve, as data, picture and text."""

from pathlib import Path

import pytest

from relax.services.curve import Curve, draw_curve, read_curve, smooth, text_curve
from relax.services.ledger import Ledger
from relax.services.outline import outline_of
from tests.services.story import STEPS, WARM_UP, heldout_at, story_config, write_story

RISING = Curve("run", [(s, s / 100) for s in range(40, 100)], {"heldout": [(0, 0.0), (50, 0.5), (100, 1.0)]}, 40, 100)


@pytest.mark.parametrize(("steps", "begins"), [(0, None), (10, None), (20, WARM_UP), (60, WARM_UP)])
def test_it_is_read_from_the_ledger(tmp_path: Path, steps: int, begins: int | None) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_story(ledger, steps)
    curve = read_curve(ledger, outline_of(story_config(tmp_path)), ["heldout", "unseen"])
    ledger.close()
    assert curve.rl_begins == begins
    assert curve.total == STEPS
    assert list(curve.evaluations) == ["heldout"]
    assert curve.evaluations["heldout"][-1] == (steps, heldout_at(steps))
    assert [step for step, _ in curve.reward] == list(range(WARM_UP, steps))


def test_smoothing_is_a_mean_of_what_came_before() -> None:
    assert smooth([1, 2, 3, 4, 5], 3) == pytest.approx([1, 1.5, 2, 3, 4])
    assert smooth([], 3) == []


def test_the_picture_shows_both_and_where_rl_begins(tmp_path: Path) -> None:
    import numpy as np
    from matplotlib.image import imread

    plain = Curve("run", RISING.reward, RISING.evaluations, None, 100)
    pictures = []
    for number, curve in enumerate((RISING, plain)):
        draw_curve(curve, tmp_path / f"{number}.png")
        pictures.append(imread(tmp_path / f"{number}.png"))
    assert pictures[0].shape[:2] == (600, 1080)
    assert np.std(pictures[0]) > 0.05
    assert not np.array_equal(*pictures)


def test_an_empty_curve_is_a_picture_and_no_text(tmp_path: Path) -> None:
    empty = Curve("run", [], {}, None, 10)
    draw_curve(empty, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert text_curve(empty) == ""


@pytest.mark.parametrize(("width", "height"), [(79, 13), (40, 5), (119, 20)])
def test_the_text_fits_rises_and_marks_where_rl_begins(width: int, height: int) -> None:
    lines = text_curve(RISING, width, height).splitlines()
    assert len(lines) >= height + 4
    assert max(map(len, lines)) <= width
    assert all(line.isascii() for line in lines)
    plot = [line[8:] for line in lines[:height]]
    begin = round(0.4 * (width - 8 - 1))
    assert sum(row[begin : begin + 1] in ("|", ".", "o") for row in plot) == height
    assert plot[0].rstrip().endswith("o")
    assert plot[-1].startswith("o")
    assert lines[height + 1].index("^") == begin + 8
    assert "RL begins" in lines[height + 1]
    dots = sorted((row.index("."), number) for number, row in enumerate(plot) if "." in row)
    assert [number for _, number in dots] == sorted(
        (number for _, number in dots), reverse=True
    )  # further right is higher
    assert len(dots) >= 2
    assert lines[0].strip().startswith("1.00")
    assert lines[height - 1].strip().startswith("0.00")


def test_the_label_stays_inside_when_rl_begins_late() -> None:
    lines = text_curve(Curve("run", [(98, 0.5)], {}, 95, 100), 60, 6).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[7].endswith("RL begins (step 95) ^")


def test_equal_values_and_two_sets_are_drawn() -> None:
    text = text_curve(Curve("run", [], {"a": [(0, 0.5), (10, 0.5)], "b": [(5, 0.5)]}, None, 10), 60, 5)
    assert "o a (evaluation)   x b (evaluation)" in text
    assert text.count("o") - 1 - text.count("(evaluation)") * 1 == 2
