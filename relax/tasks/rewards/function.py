"""A reward that is the user's own function, named by import path.

It may be a function, an async function, a `functools.partial` or any callable object. It asks for what it needs by the names of its
parameters. Functions run in the killable pool, since they read what a model wrote (SE3); in process only when the configuration says so.
"""

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from relax.config.table import load_object
from relax.core.error import LimitError, RelaxError, TaskError, UserError
from relax.core.message import Json, Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import FunctionConfig
from relax.tasks.foreign import describe, must_pass, plain_info

_OFFERED: Mapping[str, Callable[[Prompt, Trajectory], Any]] = {
    "prompt": lambda prompt, trajectory: prompt,
    "trajectory": lambda prompt, trajectory: trajectory,
    "response": lambda prompt, trajectory: trajectory.response,
    "reference": lambda prompt, trajectory: prompt.reference,
    "metadata": lambda prompt, trajectory: dict(prompt.metadata),
}
"""What a function may ask for: the last reply's text is `response`, the record's answer is `reference`."""


class ByPath:
    """`load_object(path)` that a worker repeats for itself, so that nothing of the object need be picklable."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return load_object, (self.path,)


def evaluate(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Json]:
    """Call the function and make its answer plain. Runs in a pool worker."""
    return plain_score(function(**arguments))


def plain_score(answer: Any) -> dict[str, Json]:
    """Value, failure and info of a bool, a real number, a Score or None.

    Raises TypeError for anything else, ValueError for NaN, TaskError for info that is no mapping of JSON values.
    """
    if answer is None:
        return {"value": None, "failure": "the function returned None: no score", "info": {}}
    if isinstance(answer, Score):
        value = None if answer.value is None else _number(answer.value)
        failure = answer.failure or (None if value is not None else "the function returned a score without a value")
        return {
            "value": None if failure else value,
            "failure": failure,
            "info": plain_info(answer.info, "it gave info"),
        }
    return {"value": _number(answer), "failure": None, "info": {}}


def _number(answer: Any) -> float:
    value = answer.item() if type(answer).__module__ == "numpy" and hasattr(answer, "item") else answer
    if not isinstance(value, bool | numbers.Real):
        raise TypeError(
            f"it returned {answer!r} of type {type(answer).__name__}; a reward is a bool, a number, a Score or None"
        )
    if not math.isfinite(value):
        raise ValueError(f"it returned {value}; a reward is finite")
    return float(value)


class FunctionReward:
    """Core's `Reward`. `wanted` are the names the function asks for."""

    def __init__(
        self, config: FunctionConfig, function: Callable[..., Any], wanted: tuple[str, ...], pool: Pool
    ) -> None:
        self._config = config
        self._function = function
        self._wanted = wanted
        self._pool = pool
        self._limits = Limits(config.timeout_s, config.memory_bytes, config.network)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Raises TaskError when the function raised, gave no finite number, or took too long."""
        arguments = {name: _OFFERED[name](prompt, trajectory) for name in self._wanted} | self._config.arguments
        if self._config.in_process:
            return await self._call_here(arguments)
        answer = await self._pool.run(evaluate, ByPath(self._config.type), arguments, limits=self._limits)
        try:
            return Score(answer["value"], answer["failure"], answer["info"])
        except (TypeError, KeyError) as error:  # only a function that meddles with its own process gets here
            raise TaskError(f"{self._config.type} sent a malformed score") from error

    async def _call_here(self, arguments: Mapping[str, Any]) -> Score:
        try:
            async with asyncio.timeout(self._config.timeout_s) as timeout:
                answer = self._function(**arguments)
                if inspect.isawaitable(answer):
                    answer = await answer
            return Score(**plain_score(answer))
        except BaseException as error:
            if must_pass(error) or isinstance(error, RelaxError):
                raise
            if timeout.expired():
                raise LimitError(f"{self._config.type} took longer than {self._config.timeout_s:g} s") from error
            raise TaskError(f"{self._config.type} failed: {describe(error)}") from error


def build_function(config: FunctionConfig, *, pool: Pool) -> FunctionReward:
    """Raises UserError, before the run, for what could never work."""
    function = load_object(config.type)
    if not callable(function):
        raise UserError(f"reward {config.type!r} is a {type(function).__name__}; name a function or a callable object")
    if isinstance(function, type):
        raise UserError(f"reward {config.type!r} is a class; name a function, or give the class a nested Config")
    if _is_async(function) and not config.in_process:
        raise UserError(
            f"reward {config.type!r} is async, so it runs in relax's own process: say so with in_process: true"
        )
    if config.in_process and config.network:
        raise UserError(
            f"reward {config.type!r}: network is a setting of the pool; in_process code always has it, so leave it out"
        )
    return FunctionReward(config, function, _wanted(config, function), pool)


def _wanted(config: FunctionConfig, function: Callable[..., Any]) -> tuple[str, ...]:
    """The offered names among the function's parameters. Raises UserError when it needs anything else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {config.type!r} has no readable signature: {error}; wrap it in a function") from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    by_position = {f"{name} by position" for name in needed - set(named)}
    unknown = (needed & set(named)) - set(_OFFERED) - set(config.arguments) | by_position
    surplus = set() if takes_any else set(config.arguments) - set(named)
    if unknown or surplus:
        words = [f"needs {', '.join(sorted(unknown))}"] * bool(unknown) + [
            f"takes no {', '.join(sorted(surplus))}"
        ] * bool(surplus)
        raise UserError(
            f"reward {config.type!r} {' and '.join(words)}; it can ask for {', '.join(_OFFERED)}, and for what `arguments` gives"
        )
    return tuple(name for name in _OFFERED if (name in named or takes_any) and name not in config.arguments)


def _is_async(function: Any) -> bool:
    while hasattr(function, "func"):  # functools.partial, maybe of another
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
