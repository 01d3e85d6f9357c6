"""The `reasoning_gym` data set: problems that a task of the reasoning-gym package makes, each with what its verifier needs.

A problem is made when it is read, from the seed and its index alone. Its record is {prompt, reference, reasoning_gym}: the
question, the task's own answer (null where only the verifier knows one), and {dataset, entry} for the `reasoning_gym` reward.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from importlib import metadata, util
from typing import Any

from relax.config.suggestion import closest
from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.config import ReasoningGymConfig
from relax.data.dataset import Refusal

_DIGEST_RECORDS = 8
"""The first so many problems are part of the digest; the others follow from the arguments and the package's version."""
_HASH_ORDERED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks that walk sets of strings: their problems depend on Python's hash seed (seen in reasoning-gym 0.1.25)."""
_UNSUITED = {
    "codeio": "it makes another problem each time it is asked for the same one, so a run with it could not be resumed",
    "list_functions": "it makes another problem each time it is asked for the same one, so a run with it could not be resumed",
    "composite": "give each of its tasks a source of its own instead, with a weight",
}


class ReasoningGymDataSet:
    """Built as `ReasoningGymDataSet(config, seed=...)`, `seed` being the run's."""

    def __init__(self, config: ReasoningGymConfig, *, seed: int = 0) -> None:
        self._config = config
        # The package's problem `index` of seed `s` is problem `index - 1` of `s + 1`: seeds side by side would share problems.
        given = seed if config.seed is None else config.seed
        identity = (config.name,) if config.seed is None else ()
        self._seed = derive_seed(given, "reasoning_gym", config.dataset, *identity) % 2**31

    @cached_property
    def _task(self) -> Any:
        """The package's task. Raises DataError for a name, configuration or machine it cannot be made with."""
        config, known = self._config, _known_tasks()
        if config.dataset not in known:
            near = closest(config.dataset, known)
            hint = f"did you mean {near!r}?" if near else "its README lists them"
            raise self._error(f"reasoning-gym has no task {config.dataset!r} among its {len(known)}; {hint}")
        if config.dataset in _UNSUITED:
            raise self._error(f"the task {config.dataset!r} cannot be used: {_UNSUITED[config.dataset]}")
        if config.dataset in _HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise self._error(
                f"the problems of {config.dataset!r} depend on Python's hash seed, so a resumed run would see others;"
                " set the environment variable PYTHONHASHSEED to a number, the same for every start of this run"
            )
        task_class, config_class = known[config.dataset]
        fields = sorted({field.name for field in dataclasses.fields(config_class)} - {"seed", "size"})
        unknown = sorted(set(config.config) - set(fields))
        if unknown:
            raise self._error(
                f"{config.dataset!r} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(fields)}"
            )
        try:
            made = config_class(seed=self._seed, size=config.size, **config.config)
            return task_class(config=made)
        except Exception as error:  # each task checks its settings in its own way
            raise self._error(f"{config.dataset!r} refuses its settings: {type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        _ = self._task
        return self._config.size

    @cached_property
    def digest(self) -> str:
        config = self._config
        parts = [config.dataset, config.config, config.size, self._seed, metadata.version("reasoning-gym")]
        hasher = blake2b(digest_size=16)
        for part in (*parts, *(self._made(index) for index in range(min(_DIGEST_RECORDS, len(self))))):
            hasher.update(json.dumps(part, default=repr).encode() + b"\n")
        return hasher.hexdigest()

    def read(self, index: int) -> Json:
        made = self._made(index)
        if not isinstance(made, Mapping):
            raise Refusal("cannot be made", made)
        entry = {key: made.get(key) for key in ("question", "answer", "metadata")}
        return {
            self._config.prompt_key: entry["question"],
            "reference": entry["answer"],
            "reasoning_gym": {"dataset": self._config.dataset, "entry": entry},
        }

    def location(self, index: int) -> str | None:
        return None

    def _made(self, index: int) -> Mapping[str, Any] | str:
        """A problem as the package makes it, or why it could not."""
        try:
            made: Mapping[str, Any] = self._task[index]
        except DataError:
            raise
        except Exception as error:  # the package's own code: one problem that fails is one refused record
            return f"{type(error).__name__}: {error}"
        return made

    def _error(self, problem: str) -> DataError:
        return DataError(f"source {self._config.name!r}: {problem}")


def _known_tasks() -> Mapping[str, tuple[Any, Any]]:
    """Classes of task and configuration by name. Raises DataError where the package is not installed."""
    if util.find_spec("reasoning_gym") is None:
        raise DataError("a reasoning_gym source needs the package reasoning-gym: pip install 'relax[reasoning-gym]'")
    from reasoning_gym.factory import DATASETS

    found: Mapping[str, tuple[Any, Any]] = DATASETS
    return found
