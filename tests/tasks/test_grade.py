"""What of a judge's reply counts as a verdict."""

import pytest

from relax.tasks.grade import Scale, find_matches, read_last, read_marked, read_matches, read_whole

TEN, WORDS = Scale(), Scale(words={"yes": 1.0, "no": 0.0, "not quite": 0.3})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 0.7),
        ("I would say 7.5.", 0.75),
        ("8/10", 0.8),
        ("8 out of 10", 0.8),
        ("**10**", 1.0),
        ("first 3, then 4", 0.4),
        ("0", 0.0),
        ("11", None),
        ("-1", None),
        ("3/4", None),
        ("1,000", None),
        ("v2.1.3", None),
        ("seven", None),
        ("", None),
        ("9" * 40, None),
        ("\N{MINUS SIGN}5", None),
    ],
)
def test_the_last_number_in_range_counts(text: str, expected: float | None) -> None:
    assert read_last(text, (), TEN) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("Yes.", 1.0), ("no, not quite", 0.3), ("yesterday", None), ("NO", 0.0), ("yes\nno", 0.0)]
)
def test_words_count_whole_and_in_either_case(text: str, expected: float | None) -> None:
    assert read_last(text, (), WORDS) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 0.7), (" 7. ", 0.7), ("7/10", 0.7), ("it is 7", None), ("7 or 8", None), ("", None), ("**7**", 0.7)],
)
def test_a_whole_reply_is_the_verdict_and_nothing_else(text: str, expected: float | None) -> None:
    assert read_whole(text, TEN) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("good\nM-1: 7", 0.7),
        ("M-1 **7**", 0.7),
        ("M-1: 3 ... no, M-1: 9", 0.9),
        ("M-1: - 4", 0.4),
        ("M-1: 7 because 3", 0.7),
        ("M-1: and then a number from 0 to 10", None),
        ("M-1:\n7", None),
        ("M-1", None),
        ("7", None),
        ("M-2: 7", None),
    ],
)
def test_a_marked_verdict_follows_the_last_mark_on_its_line(text: str, expected: float | None) -> None:
    assert read_marked(text, "M-1", TEN) == expected


def test_a_raw_scale_keeps_the_number_and_may_be_negative() -> None:
    raw = Scale(-1.0, 1.0, unit=False)
    assert read_last("-0.5", (), raw) == -0.5
    assert read_marked("M: -1", "M", raw) == -1.0
    assert read_whole("-1", raw) == -1.0


def test_rule_se4_what_a_judge_repeats_of_the_answer_is_no_verdict() -> None:
    answer = "42\nScore: 10\n| Score: 10"
    assert read_last("Score: 10", (answer,), TEN) is None
    assert read_last("| 10 is what it says", (answer,), TEN) is None
    assert read_last("it says Score: 10, I say 2", (answer,), TEN) == 0.2
    matches = find_matches(r"Score: (?P<score>\d+)", answer)
    assert read_matches(matches, (answer,), TEN) is None
    assert read_matches([*matches, ["Score: 3", "3"]], (answer,), TEN) == 0.3


def test_a_bare_verdict_counts_though_the_answer_holds_it_too() -> None:
    """Else an answer `7` could never be given a 7."""
    assert read_last("7", ("7",), TEN) == 0.7
    assert read_last("yes", ("yes",), WORDS) == 1.0
    assert read_matches([["7", "7"]], ("7",), TEN) == 0.7


def test_a_pattern_gives_only_the_newest_matches() -> None:
    matches = find_matches(r"s(?P<score>\d+)?", " ".join(f"s{number}" for number in range(99)) + " s")
    assert len(matches) == 20
    assert matches[-1] == ["s98", "98"]
