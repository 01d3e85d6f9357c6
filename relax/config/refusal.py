"""Takes wrong values out of raw values, so that the next round of validation reaches what they hid.

Called by `load.validate` with the lines of a pydantic error. A refused value is replaced by `REFUSED`; an unknown key goes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relax.config.base import REFUSED, RULE_ERROR, KeyPath
from relax.config.secret import MASK


def refuse(values: Any, lines: Iterable[Any]) -> bool:
    """Take out the values that the lines of one error are about. False when there is nothing to take out."""
    targets = [target for line in lines if line["type"] != RULE_ERROR for target in _target(values, line)]
    for holder, key, is_unknown in targets:
        if is_unknown:
            holder.pop(key, None)
        else:
            holder[key] = REFUSED
    return bool(targets)


def refuse_masks(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Take out every masked secret of raw values; returns where they were."""
    found: list[KeyPath] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        if isinstance(item, str) and item == MASK:
            value[key] = REFUSED
            found.append((*path, key))
        else:
            found += refuse_masks(item, (*path, key))
    return found


def _target(values: Any, line: Mapping[str, Any]) -> Iterator[tuple[Any, str | int, bool]]:
    """What to take out for one line: at most one (mapping or list, key, whether the key itself is unknown).

    The line of a value that was refused before speaks of what holds it (a list of nodes, say), so that is the target.
    """
    holders: list[tuple[Any, str | int]] = []
    here = values
    for key in line["loc"]:
        if isinstance(here, dict) and key not in here:
            yield here, key, False
            return
        if not _has(here, key):
            break
        holders.append((here, key))
        here = here[key]
    if line["type"] == "extra_forbidden" and holders:
        yield (*holders[-1], True)
        return
    yield from [(holder, key, False) for holder, key in reversed(holders) if holder[key] is not REFUSED][:1]


def _has(value: Any, key: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(key, int) and 0 <= key < len(value)
    return isinstance(value, dict)
