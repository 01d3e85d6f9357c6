"""Boxes as models and data sets write them: four numbers, in the usual spellings.

Used by the `iou` reward. Read are `[1, 2, 3, 4]`, `(1,2),(3,4)`, `[[1, 2], [3, 4]]`, `1 2 3 4`, with `<box>` or `<|box_start|>` around
them, `{"bbox_2d": [1, 2, 3, 4]}` and `x1=1, y1=2, x2=3, y2=4`, each alone or in a list. Numbers that are not a multiple of four in one
place are no boxes. Every pattern reads a text once.
"""

import re
from math import isfinite
from typing import Literal, TypeAlias

from relax.core.message import Json

Box: TypeAlias = tuple[float, float, float, float]
Form: TypeAlias = Literal["corners", "corner_size", "centre_size"]
MAX_BOXES = 64
"""Boxes that are read of one text; the rest of a longer list counts as one more, which matches nothing."""
_NOTHING: Box = (0.0, 0.0, 0.0, 0.0)
_MARKUP = re.compile(r"</?\|?(?:box|box_start|box_end|bbox|quad)\|?>", re.IGNORECASE)
_LABEL = re.compile(
    r"""["']?\b(?:bbox(?:_2d)?|bounding_box|box(?:_2d)?|coordinates|x_?(?:1|2|min|max)|y_?(?:1|2|min|max)|
        left|top|right|bottom|x|y|w|h|width|height|cx|cy)\b["']?[ \t]*[:=]""",
    re.IGNORECASE | re.VERBOSE,
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:px\b|(?![\w.]|%))", re.ASCII)
_BETWEEN = re.compile(r"(?:[\s,;\[\](){}]){1,20}")
_NAMES = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"),
          ("x", "y", "w", "h"), ("x", "y", "width", "height"), ("cx", "cy", "w", "h"))  # fmt: skip


def find_boxes(text: str) -> list[Box]:
    """The boxes of a text, in order, at most MAX_BOXES + 1."""
    bare = _LABEL.sub(" ", _MARKUP.sub(" , ", text))
    found: list[Box] = []
    run: list[float] = []
    end = -1
    for match in _NUMBER.finditer(bare):
        if run and not _BETWEEN.fullmatch(bare, end, match.start()):
            found += _cut(run)
            run = []
        run.append(float(match.group().rstrip("px")))
        end = match.end()
    found += _cut(run)
    return found if len(found) <= MAX_BOXES else [*found[:MAX_BOXES], _NOTHING]


def read_box(value: Json) -> Box | None:
    """A box of a record: four numbers, a mapping that names them, or a mapping with such a list under one of its keys."""
    if isinstance(value, dict):
        folded = {str(key).lower().replace("_", ""): item for key, item in value.items()}
        named = [[folded[name] for name in names] for names in _NAMES if set(names) <= set(folded)]
        lists = [item for item in value.values() if isinstance(item, list)]
        value = named[0] if named else lists[0] if len(lists) == 1 else None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, list) for item in value):
        value = [*value[0], *value[1]]
    if not isinstance(value, list) or len(value) != 4:
        return None
    numbers = [float(item) for item in value if isinstance(item, int | float) and not isinstance(item, bool)]
    return _four(numbers) if len(numbers) == 4 and all(map(isfinite, numbers)) else None


def corners(box: Box, form: Form) -> Box:
    """(left, top, right, bottom) of a box that is written as `form`."""
    first, second, third, fourth = box
    if form == "corner_size":
        return (first, second, first + third, second + fourth)
    if form == "centre_size":
        return (first - third / 2, second - fourth / 2, first + third / 2, second + fourth / 2)
    return box


def _cut(run: list[float]) -> list[Box]:
    return [] if len(run) % 4 else [_four(run[start : start + 4]) for start in range(0, len(run), 4)]


def _four(numbers: list[float]) -> Box:
    return (numbers[0], numbers[1], numbers[2], numbers[3])
