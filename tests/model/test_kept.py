"""Outputs of encoders are kept within their bound, those used longest ago go first."""

import numpy as np

from relax.core.media import Medium
from relax.model.family import Encoding
from relax.model.kept import KeptEncodings


def medium(key: str, encoder_tokens: int) -> Medium:
    return Medium(key, "image", 1, encoder_tokens, {})


def encoding() -> Encoding:
    return Encoding("image", np.zeros((1, 2), np.float32))


def test_the_medium_used_longest_ago_goes_first() -> None:
    kept, (a, b, c) = KeptEncodings(10), (medium(key, 4) for key in "abc")
    first = encoding()
    kept.put(a, first)
    kept.put(b, encoding())
    assert kept.get(a) is first
    kept.put(c, encoding())
    assert [one in kept for one in (a, b, c)] == [True, False, True]
    assert kept.get(b) is None
    assert kept.tokens == 8


def test_what_is_larger_than_the_bound_is_not_kept_and_takes_nobodys_place() -> None:
    kept, small, large = KeptEncodings(10), medium("a", 10), medium("b", 11)
    kept.put(small, encoding())
    kept.put(large, encoding())
    assert (small in kept, large in kept, kept.tokens) == (True, False, 10)
    nothing = KeptEncodings(0)
    nothing.put(medium("c", 1), encoding())
    assert nothing.tokens == 0


def test_what_is_kept_again_or_dropped_counts_once() -> None:
    kept, one, other = KeptEncodings(10), medium("a", 4), medium("b", 3)
    second = encoding()
    kept.put(one, encoding())
    kept.put(one, second)
    assert (kept.get(one), kept.tokens) == (second, 4)
    kept.put(other, encoding())
    kept.drop([one, medium("never", 5)])
    assert (one in kept, kept.tokens) == (False, 3)
    kept.clear()
    assert (other in kept, kept.tokens) == (False, 0)
