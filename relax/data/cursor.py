"""Where a source is in its data: (seed, pass, position), exact and JSON-ready.

Each pass visits every record of the data set exactly once. The order of a pass is a pure function of the run's seed, the source's
name and the pass, so a position in it is all that has to be saved. Used by `PromptStream`; does no I/O.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed


def seeded_order(size: int, seed: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(size)`, int64[size].

    Sorts the raw words of a Philox generator: numpy promises those for every version, `shuffle` it does not (NEP 19).
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(size), kind="stable")


Order = Callable[[int], npt.NDArray[np.int64]]
"""From a seed to a permutation of the records."""


class Cursor:
    """The next record of a data set of `size` records. `size` and `digest` identify the data set (case B5).

    `order` shuffles it, given a seed; None: any record may follow any other.
    """

    def __init__(
        self, source: str, *, seed: int, size: int, digest: str, shuffle: bool, order: Order | None = None
    ) -> None:
        if size < 1:
            raise DataError(f"source {source!r} holds no record; check its path, or the arguments of its generator")
        self._source = source
        self._seed = seed
        self._size = size
        self._digest = digest
        self._shuffle = shuffle
        self._shuffled: Order = order if order is not None else lambda seed: seeded_order(size, seed)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self.pass_number = 0
        self.position = 0

    def advance(self) -> int:
        """The index of the next record; moves on."""
        index = int(self._pass_order()[self.position])
        self.position += 1
        if self.position == self._size:
            # At once, not with the next call: a state saved after the last record names the whole next pass (case B1).
            self.pass_number, self.position = self.pass_number + 1, 0
        return index

    def state(self) -> dict[str, Json]:
        return {**self._identity(), "pass": self.pass_number, "position": self.position}

    def restore(self, state: Mapping[str, Json], *, accept_changes: bool = False) -> list[str]:
        """Go to a saved state; returns what has changed since, each change in words.

        Raises DataError when it was saved over other data, or with another order. With `accept_changes` the next pass, which
        no record has been drawn in, begins over the data as they are now.
        """
        identity = self._identity()
        missing = sorted({*identity, "pass", "position"} - set(state))
        if missing:
            raise DataError(f"the saved state of source {self._source!r} lacks {missing}; it cannot be resumed from")
        changes = [
            f"{_IDENTITY[key]} ({key}) was {state[key]!r}, now {now!r}"
            for key, now in identity.items()
            if state[key] != now
        ]
        pass_number, position = int(state["pass"]), int(state["position"])
        if changes:
            if not accept_changes or state["source"] != self._source:
                raise DataError(
                    f"source {self._source!r} is not the data set of the saved state: {'; '.join(changes)}."
                    " Bring back the data and settings the run was started with, start a new run, or go on with the"
                    " data as they are now by data.accept_changes=true"
                )
            pass_number, position = pass_number + 1, 0
        if pass_number < 0 or not 0 <= position < self._size:
            raise DataError(
                f"the saved state of source {self._source!r} has no record {position} of pass {pass_number}"
            )
        self.pass_number, self.position = pass_number, position
        return changes

    def _identity(self) -> dict[str, Json]:
        return {
            "source": self._source,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "records": self._size,
            "digest": self._digest,
        }

    def _pass_order(self) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != self.pass_number:
            pass_seed = derive_seed(self._seed, self._source, self.pass_number)
            order = self._shuffled(pass_seed) if self._shuffle else np.arange(self._size)
            self._order = (self.pass_number, order)
        return self._order[1]


_IDENTITY = {
    "source": "the name of the source",
    "seed": "the run's seed",
    "shuffle": "the order",
    "records": "the number of records",
    "digest": "the content",
}
"""What each part of a saved state that identifies a data set is called in messages."""
