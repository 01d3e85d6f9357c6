"""What was used last is kept, within a number of bytes."""

from relax.data.media.recent import Recent


def test_what_was_used_longest_ago_goes_first() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "A", 4)
    recent.put("b", "B", 4)
    assert recent.get("a") == "A"
    recent.put("c", "C", 4)
    assert [key in recent for key in "abc"] == [True, False, True]
    assert (recent.get("b"), recent.num_bytes) == (None, 8)


def test_the_newest_stays_whatever_it_weighs_and_ten_of_ten_fit() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "A", 4)
    recent.put("b", "B", 6)
    assert recent.num_bytes == 10
    recent.put("c", "C", 30)
    assert ([key in recent for key in "abc"], recent.num_bytes) == ([False, False, True], 30)
    recent.put("d", "D", 1)
    assert ([key in recent for key in "cd"], recent.num_bytes) == ([False, True], 1)


def test_what_is_put_again_counts_once_and_is_the_newest() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "A", 4)
    recent.put("b", "B", 4)
    recent.put("a", "AA", 5)
    assert (recent.get("a"), recent.num_bytes) == ("AA", 9)
    recent.put("c", "C", 3)
    assert [key in recent for key in "abc"] == [True, False, True]
