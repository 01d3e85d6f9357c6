"""Errors, grouped by whose fault they are.

A message names the thing, the value, what was expected and the next action; an `InvariantError` names the rule of the contract.
"""


class RelaxError(Exception):
    """Root of every error that relax raises on purpose."""


class UserError(RelaxError):
    """The configuration, the data or the command line is wrong; the message says what to change."""


class ConfigError(UserError):
    """One or more violated configuration rules; `problems` lists them all."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UserError):
    """A record, or a whole source, cannot be used."""


class TaskError(RelaxError):
    """An environment, tool or reward failed; the trajectory fails with this reason and the run goes on."""


class LimitError(TaskError):
    """Work in the process pool exceeded its time or memory and was killed."""


class EngineError(RelaxError):
    """An engine failed, or refused what it was asked."""


class TransportError(RelaxError):
    """Weights or rows did not arrive, or arrived damaged."""


class LateError(RelaxError):
    """A put, renewal or ack under a lease that is no longer held (TQ4); the writer drops its result."""


class InvariantError(RelaxError):
    """A rule of the contract is broken: our bug."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {message}")
