"""Several sources as one, in proportion to their weights.

Smooth weighted round robin: every source earns its weight, the richest one gives the next prompt and pays the sum of all weights.
No random choice, so the mixture is exact over any window, and its state is one number for each source.
"""

from collections.abc import Iterator, Mapping, Sequence

from relax.core.error import DataError
from relax.core.message import Json, Prompt
from relax.core.protocol import Source
from relax.data.config import SourceConfig
from relax.data.quarantine import Quarantine
from relax.data.stream import CheckingRenderer, PromptRules, PromptStream, build_reader


class Mixture:
    """A core `Source` over named sources; `weights` has the same names, each weight > 0. Ties go to the first name."""

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float]) -> None:
        if not sources or set(sources) != set(weights) or min(weights.values()) <= 0:
            raise DataError(f"a mixture needs sources with positive weights, found {list(sources)} and {dict(weights)}")
        self._sources = dict(sources)
        self._weights = {name: float(weights[name]) for name in sources}
        self._credits = dict.fromkeys(sources, 0.0)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        credits = {name: credit + self._weights[name] for name, credit in self._credits.items()}
        chosen = max(credits, key=lambda name: credits[name])
        prompt = next(iter(self._sources[chosen]))
        credits[chosen] -= sum(self._weights.values())
        self._credits = credits
        return prompt

    def state(self) -> dict[str, Json]:
        """The state of every source, and the credits."""
        return {
            "sources": {name: source.state() for name, source in self._sources.items()},
            "credits": dict(self._credits),
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Raises DataError when the saved sources are not these."""
        saved = state["sources"]
        if set(saved) != set(self._sources):
            raise DataError(
                f"the saved state holds the sources {sorted(saved)}, the run now has {sorted(self._sources)};"
                " bring back data.sources as it was, or start a new run"
            )
        for name, source in self._sources.items():
            source.restore(saved[name])
        self._credits = {name: float(state["credits"][name]) for name in self._sources}


def build_streams(
    configs: Sequence[SourceConfig],
    *,
    renderer: CheckingRenderer,
    rules: PromptRules,
    quarantine: Quarantine,
    seed: int,
) -> dict[str, PromptStream]:
    """One stream for each source node, by name. Raises DataError when two have one name."""
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"data.sources: {', '.join(twice)} names more than one source; names must be unique")
    return {
        config.name: PromptStream(
            build_reader(config, renderer=renderer, rules=rules, quarantine=quarantine, seed=seed), seed=seed
        )
        for config in configs
    }
