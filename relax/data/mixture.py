"""Several sources as one, in proportion to their weights.

Smooth weighted round robin: every source earns its weight, the richest one gives the next prompt and pays the sum of all weights.
No random choice, so the mixture is exact over any window. A curriculum may change the weights as rewards come in. The state is
a few numbers for each source.
"""

from collections.abc import Iterator, Mapping, Sequence

from relax.config.base import ComponentConfig
from relax.core.error import DataError
from relax.core.message import Json, Prompt, PromptKey
from relax.core.protocol import Source
from relax.data.config import SourceConfig
from relax.data.curriculum import Curriculum, curriculum_settings
from relax.data.quarantine import Quarantine
from relax.data.stream import CheckingRenderer, PromptRules, PromptStream, build_reader
from relax.data.table import CURRICULA

_STATE_KEYS = {"sources", "retired", "weights", "credits", "curriculum", "learned"}


class Mixture:
    """A core `Source` over named sources; `weights` has the same names, each weight > 0. Ties go to the first name.

    With `accept_changes`, a state that was saved over other sources, weights or another curriculum is gone on from.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        *,
        curriculum: ComponentConfig | None = None,
        accept_changes: bool = False,
    ) -> None:
        if (
            not sources
            or set(sources) != set(weights)
            or not all(0 < weight < float("inf") for weight in weights.values())
        ):
            raise DataError(f"a mixture needs sources with positive weights, found {list(sources)} and {dict(weights)}")
        self._sources = dict(sources)
        self._weights = {name: float(weights[name]) for name in sources}
        self._accept_changes = accept_changes
        self._settings = None if curriculum is None else curriculum_settings(curriculum)
        self._curriculum: Curriculum | None = None
        if curriculum is not None:
            self._curriculum = CURRICULA.component(curriculum.type)(curriculum, list(sources))
        self._credits = dict.fromkeys(sources, 0.0)
        self._retired: dict[str, Json] = {}
        self.accepted: tuple[str, ...] = ()
        """What `restore` found changed and went on with, in words."""

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        weights = self.weights()
        credits = {name: credit + weights[name] for name, credit in self._credits.items()}
        chosen = max(credits, key=lambda name: credits[name])
        prompt = next(iter(self._sources[chosen]))
        credits[chosen] -= sum(weights.values())
        self._credits = credits
        return prompt

    def weights(self) -> dict[str, float]:
        """The weight of each source now."""
        if self._curriculum is None:
            return self._weights
        return {name: weight * self._curriculum.factor(name) for name, weight in self._weights.items()}

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        """The rewards of one group that ended. What comes next depends on the calls of this and of `next` alone, in their order."""
        if key.source in self._sources:  # else it was taken out of the mixture while the group was under way
            self._sources[key.source].observe(key, rewards)
            if self._curriculum is not None:
                self._curriculum.observe(key.source, rewards)

    def state(self) -> dict[str, Json]:
        """The state of every source, what the mixture is, and where it stands. Its size does not grow with the run."""
        return {
            "sources": {name: source.state() for name, source in self._sources.items()},
            "retired": dict(self._retired),
            "weights": dict(self._weights),
            "credits": dict(self._credits),
            "curriculum": self._settings,
            "learned": None if self._curriculum is None else self._curriculum.state(),
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Raises DataError when the saved mixture is another one and `accept_changes` is off.

        Gone on from, a new source begins at its first record, one that is gone is kept for its return, new weights hold from
        here on, and a new curriculum begins anew.
        """
        missing = sorted(_STATE_KEYS - set(state))
        if missing:
            raise DataError(f"the saved state of the data lacks {', '.join(missing)}; it cannot be resumed from")
        changes = self._changes(state)
        if changes and not self._accept_changes:
            raise DataError(
                f"data.sources are not those of the saved state: {'; '.join(changes)}. Bring back data.sources as it was,"
                " start a new run, or go on with what there is now by data.accept_changes=true"
            )
        saved = {**state["retired"], **state["sources"]}
        for name in self._sources.keys() & saved.keys():
            self._sources[name].restore(saved[name])
        self._retired = {name: kept for name, kept in saved.items() if name not in self._sources}
        is_same = state["weights"] == self._weights
        self._credits = {name: float(state["credits"][name]) if is_same else 0.0 for name in self._sources}
        if self._curriculum is not None:
            self._curriculum.restore(state["learned"] if state["curriculum"] == self._settings else None)
        self.accepted = tuple(changes)

    def _changes(self, state: Mapping[str, Json]) -> list[str]:
        """What differs from the saved mixture, in words."""
        saved, changes = set(state["sources"]), []
        if saved != set(self._sources):
            changes.append(f"there were the sources {sorted(saved)}, now {sorted(self._sources)}")
        changes += [
            f"the weight of source {name!r} was {state['weights'][name]!r}, now {weight!r}"
            for name, weight in self._weights.items()
            if name in state["weights"] and state["weights"][name] != weight
        ]
        if state["curriculum"] != self._settings:
            changes.append(f"the curriculum was {state['curriculum']!r}, now {self._settings!r}")
        return changes


def build_streams(
    configs: Sequence[SourceConfig],
    *,
    renderer: CheckingRenderer,
    rules: PromptRules,
    quarantine: Quarantine,
    seed: int,
    accept_changes: bool = False,
) -> dict[str, PromptStream]:
    """One stream for each source node, by name. Raises DataError when two have one name."""
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"data.sources: {', '.join(twice)} names more than one source; names must be unique")
    return {
        config.name: PromptStream(
            build_reader(config, renderer=renderer, rules=rules, quarantine=quarantine, seed=seed),
            seed=seed,
            accept_changes=accept_changes,
        )
        for config in configs
    }
