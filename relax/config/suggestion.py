"""Did-you-mean: turns a wrong name and the known ones into the tail of an error message."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely stands for, if any is close."""
    by_lower = {item.lower(): item for item in known}
    matches = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? known: x, y, z`, without the question when nothing is close."""
    names = list(known)
    match = closest(name, names)
    question = f"did you mean {match!r}? " if match else ""
    return f"{question}known: {', '.join(names) or 'none'}"
