"""The response is the reference, character by character."""

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import ExactConfig


class Exact:
    """Core's `Reward`."""

    def __init__(self, config: ExactConfig) -> None:
        self._strip = config.strip
        self._ignore_case = config.ignore_case

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0. Raises TaskError when the reference is missing or is neither text nor number (nor a list of those)."""
        accepted = {self._normal(text) for text in _texts(prompt)}
        return Score(float(self._normal(trajectory.response) in accepted))

    def _normal(self, text: str) -> str:
        text = text.strip() if self._strip else text
        return text.casefold() if self._ignore_case else text


def build_exact(config: ExactConfig, *, pool: Pool) -> Exact:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return Exact(config)


def _texts(prompt: Prompt) -> list[str]:
    references = prompt.reference if isinstance(prompt.reference, list) else [prompt.reference]
    return [_text(reference, prompt) for reference in references]


def _text(reference: Json, prompt: Prompt) -> str:
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise TaskError(
            f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
            "exact needs text, a number, or a list of them"
        )
    return str(reference)
