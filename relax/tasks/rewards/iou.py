"""How far the boxes that a response states cover those in the reference: intersection over union (IoU).

How a box may be written is in `relax.tasks.box`. The boxes are those of the last statement (`relax.tasks.statement`), or of the
last line that holds any. Each box of the reference is matched at most once, and the sum is shared among all boxes on the side that
has more: a response that prints several candidates for one box earns a part of the best at most.
"""

from collections.abc import Sequence
from math import isfinite

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.box import MAX_BOXES, Box, corners, find_boxes, read_box
from relax.tasks.config import IoUConfig
from relax.tasks.statement import marked


def overlap(first: Box, second: Box) -> float:
    """IoU of two boxes (left, top, right, bottom), 0 to 1; boxes without area cover nothing."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (_area(first) + _area(second) - shared)


def matched(answer: Sequence[Box], reference: Sequence[Box]) -> list[float]:
    """The IoU of each pair, best pairs first, no box in two of them."""
    pairs = [(overlap(a, r), i, j) for i, a in enumerate(answer) for j, r in enumerate(reference)]
    found, used_answers, used_references = [], set(), set()
    for value, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if value > 0 and i not in used_answers and j not in used_references:
            found.append(value)
            used_answers.add(i)
            used_references.add(j)
    return found


class IoU:
    """Core's `Reward`. A response without a box is wrong, not a failure: it scores 0."""

    def __init__(self, config: IoUConfig) -> None:
        self._config = config

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """0 to 1, with the boxes that were read, in the units of the reference. Raises TaskError when the reference holds no boxes, or
        the picture's size is needed and unknown."""
        config = self._config
        reference = [corners(box, config.form) for box in self._reference(prompt)]
        if any(_area(box) <= 0 for box in reference):
            raise _unusable(prompt, f"boxes of {config.form!r} with an area")
        written = _answer(trajectory.response)
        if not written:
            return Score(0.0, info={"boxes": []})
        answer = [corners(self._in_reference_units(box, prompt), config.form) for box in written]
        values = matched(answer, reference)
        if config.threshold is not None:
            values = [float(value >= config.threshold) for value in values]
        info = {"boxes": [list(box) for box in answer[:MAX_BOXES]]}
        return Score(sum(values) / max(len(answer), len(reference)), info=info)

    def _reference(self, prompt: Prompt) -> list[Box]:
        value = prompt.reference
        found: list[Box | None] = list(find_boxes(value)) if isinstance(value, str) else [read_box(value)]
        if isinstance(value, list) and found == [None]:
            found = [read_box(item) for item in value]
        boxes = [box for box in found if box is not None]
        if len(boxes) < len(found) or not 1 <= len(boxes) <= MAX_BOXES:
            raise _unusable(prompt, f"a box of four numbers, or a list of 1 to {MAX_BOXES} of them")
        return boxes

    def _in_reference_units(self, box: Box, prompt: Prompt) -> Box:
        config = self._config
        units = config.answer
        if units == "auto":
            # Without the picture's size nothing can be converted; what a response says must not make that a failure.
            fits = all(0 <= value <= 1 for value in box) and box[2] > 0
            units = "unit" if fits and self._size(prompt) is not None else config.reference
        if units == config.reference:
            return box
        across, down = (
            to / of for of, to in zip(self._scale(units, prompt), self._scale(config.reference, prompt), strict=True)
        )
        return (box[0] * across, box[1] * down, box[2] * across, box[3] * down)

    def _scale(self, units: str, prompt: Prompt) -> tuple[float, float]:
        """What the picture's whole width and height are in these units."""
        if units != "pixels":
            return (1.0, 1.0) if units == "unit" else (1000.0, 1000.0)
        size = self._size(prompt)
        if size is None:
            where = f"{self._config.size!r} of its metadata" if self._config.size else f"its image {self._config.image}"
            raise TaskError(
                f"record {prompt.key.record} of source {prompt.key.source!r}: iou needs [width, height] of the picture to compare "
                f"{self._config.answer!r} with {self._config.reference!r}, but {where} does not say them"
            )
        return size

    def _size(self, prompt: Prompt) -> tuple[float, float] | None:
        config = self._config
        found: Json = prompt.metadata.get(config.size) if config.size else None
        if config.size is None:
            pictures = [part.facts for message in prompt.messages for part in message.media if part.type == "image"]
            facts = pictures[config.image] if config.image < len(pictures) else {}
            found = [facts.get("width"), facts.get("height")]
        if isinstance(found, list) and len(found) == 2 and all(_is_number(value) and value > 0 for value in found):
            return float(found[0]), float(found[1])
        return None


def build_iou(config: IoUConfig, *, pool: Pool) -> IoU:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return IoU(config)


def _answer(response: str) -> list[Box]:
    stated = marked(response)
    if stated is not None and (found := find_boxes(stated)):
        return found
    # A list that goes over several lines, as JSON does, is one statement; prose states its boxes in the last line that has any.
    fenced = response.rsplit("```", 2)
    if len(fenced) == 3 and (found := find_boxes(fenced[1])):
        return found
    whole = find_boxes(response)
    if response.lstrip().startswith(("[", "{")):
        return whole
    return next((found for line in reversed(response.splitlines()) if (found := find_boxes(line))), whole)


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _unusable(prompt: Prompt, needed: str) -> TaskError:
    return TaskError(
        f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {repr(prompt.reference)[:80]}; "
        f"iou needs {needed}"
    )
