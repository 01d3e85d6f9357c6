"""Media between objects and bus cells: features lie once for a group, whatever its siblings, and once more only where a turn adds some.

Used by the roles that write tokens (rollout, demonstration) and by those that train or score them. A segment keeps the keys of
its media in order; the features are found by key in its group's cell or in its trajectory's own (MM1, MM2).
"""

from collections.abc import Mapping, Sequence

from relax.bus.row import Fetched, RowPut
from relax.core.error import DataError, InvariantError
from relax.core.id import GroupId, index_of, parent_of
from relax.core.media import MediaReader, Medium, pack_media, unpack_media
from relax.core.message import Json, Prompt
from relax.core.trajectory import Trajectory

GROUP, TURN, KEYS = "media", "turn_media", "segment_media"
MAX_REASON = 200
"""Characters of a reason."""
COLUMNS = (GROUP, TURN, KEYS)
"""Present in every row of a run that reads media, also of prompts without any (MM5)."""


def group_media_put(group: GroupId, media: Sequence[Medium]) -> RowPut:
    """The put of a group's own cell: the features of its prompt, each once."""
    distinct = {medium.key: medium for medium in media}
    return RowPut(group, {GROUP: pack_media(list(distinct.values())) if distinct else None})


def group_media(fetched: Fetched, group: GroupId) -> tuple[Medium, ...] | None:
    """What a group's own cell holds; None until somebody has written it."""
    if not fetched.has(group, GROUP):
        return None
    cell: bytes | None = fetched.get(group, GROUP)
    return () if cell is None else unpack_media(cell)


def turn_media_cells(trajectory: Trajectory, shared: Sequence[Medium]) -> dict[str, Json]:
    """A trajectory's cells: the keys of what its segments hold, and the features that its group has not."""
    segments = trajectory.segments
    keys = [[medium.key for medium in segment.media] for segment in segments]
    known = {medium.key for medium in shared}
    own = {medium.key: medium for segment in segments for medium in segment.media if medium.key not in known}
    return {KEYS: keys, TURN: pack_media(list(own.values())) if own else None}


class FetchedMedia:
    """The media of fetched rows. A group's cell is read once, so that its siblings share the objects."""

    def __init__(self, fetched: Fetched) -> None:
        self._fetched = fetched
        self._cells: dict[int, Mapping[str, Medium]] = {}

    def of(self, sample: str) -> tuple[Medium, ...]:
        """What a sample's placeholders stand for, in order; () in a run that reads no media."""
        trajectory = parent_of(sample) or ""
        if KEYS not in self._fetched.cells.get(trajectory, {}):
            return ()
        keys = self._fetched.get(sample, KEYS)[index_of(sample)]
        found = {**self._read(self._fetched.get(sample, GROUP)), **self._read(self._fetched.get(sample, TURN))}
        missing = [key for key in keys if key not in found]
        if missing:
            raise InvariantError("MM1", f"{sample} stands for media {missing}, which neither its group nor it holds")
        return tuple(found[key] for key in keys)

    def _read(self, cell: bytes | None) -> Mapping[str, Medium]:
        if cell is None:
            return {}
        if id(cell) not in self._cells:
            self._cells[id(cell)] = {medium.key: medium for medium in unpack_media(cell)}
        return self._cells[id(cell)]


def refusal_reason(error: DataError) -> str:
    """Why media end a group, by kind, so that equal reasons count together; the quarantine has the particulars of each record."""
    return f"media: {getattr(error, 'reason', error)}"[:MAX_REASON]


async def read_prompt_media(reader: MediaReader, prompt: Prompt) -> tuple[Prompt, tuple[Medium, ...]]:
    """The prompt with its media looked at, and their features. Raises DataError for a bad one (MM3)."""
    prepared = await reader.prepare(prompt)
    return prepared, await reader.load([part for message in prepared.messages for part in message.media])
