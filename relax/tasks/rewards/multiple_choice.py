"""The last option that a response states is the right one.

What states an option is in `relax.tasks.choice`. A response that states two at once states none: it scores 0 and says so.
"""

from typing import Any, cast

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.choice import fold, stated
from relax.tasks.config import MultipleChoiceConfig


class MultipleChoice:
    """Core's `Reward`. A response without a stated option is wrong, not a failure: it scores 0."""

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._letters, self._field = config.letters, config.options

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0, with the letter that was read. Raises TaskError without usable options or a reference that names one."""
        options = self._options(prompt)
        expected = self._expected(prompt, options)
        letters = stated(trajectory.response, options)
        if len(letters) > 1:
            return Score(0.0, info={"answer": None, "ambiguous": sorted(letters)})
        answer = next(iter(letters), None)
        return Score(float(answer == expected), info={"answer": answer})

    def _options(self, prompt: Prompt) -> dict[str, str | None]:
        """Letter -> text, None where only letters are known."""
        if self._field is None:
            return dict.fromkeys(self._letters)
        texts = prompt.metadata.get(self._field)
        usable = isinstance(texts, list) and 2 <= len(texts) <= len(self._letters)
        if not usable or not all(isinstance(text, str) and fold(text) for text in cast(list[Any], texts)):
            raise _unusable(
                prompt, f"the options {texts!r} in {self._field!r}", f"a list of 2 to {len(self._letters)} texts"
            )
        return dict(zip(self._letters, cast(list[str], texts), strict=False))

    def _expected(self, prompt: Prompt, options: dict[str, str | None]) -> str:
        reference, letters = prompt.reference, list(options)
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(letters):
            return letters[reference]
        if isinstance(reference, str):
            named = [letter for letter in letters if letter == reference.strip(" ()[].:").upper()]
            named = named or [letter for letter, text in options.items() if text and fold(text) == fold(reference)]
            if len(named) == 1:
                return named[0]
        raise _unusable(
            prompt,
            f"the reference {reference!r}",
            f"a letter of {''.join(letters)}, the text of one option, or its position from 0",
        )


def build_multiple_choice(config: MultipleChoiceConfig, *, pool: Pool) -> MultipleChoice:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return MultipleChoice(config)


def _unusable(prompt: Prompt, what: str, needed: Json) -> TaskError:
    return TaskError(
        f"record {prompt.key.record} of source {prompt.key.source!r} has {what}; multiple_choice needs {needed}"
    )
