"""How much of a transcript is right: 1 minus the word error rate, and 0 from a rate of 1 on.

The rate is the fewest words to substitute, delete and insert, over the words of the reference (Levenshtein 1966). The whole response
is the transcript, so everything else that it says counts as insertions.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import WordErrorRateConfig

MAX_UNITS = 4000
"""Words (or characters) that a reference may have."""
_INSIDE = "'’-"
"""Punctuation that stays inside a word."""


def edit_distance(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Substitutions, deletions and insertions that make one of the other; one vector operation for each unit of `reference`."""
    number = {unit: index for index, unit in enumerate(dict.fromkeys((*reference, *hypothesis)))}
    target = np.array([number[unit] for unit in hypothesis], dtype=np.int64)
    offsets = np.arange(len(hypothesis) + 1)
    row = offsets.copy()
    for unit in reference:
        following = np.empty_like(row)
        following[0] = row[0] + 1
        following[1:] = np.minimum(row[1:] + 1, row[:-1] + (target != number[unit]))
        # An insertion costs one more than the cell to its left: a running minimum, once the cost of the way is taken off.
        row = np.minimum.accumulate(following - offsets) + offsets
    return int(row[-1])


class WordErrorRate:
    """Core's `Reward`. An empty response scores 0, unless the reference is empty too: silence, rightly heard, scores 1."""

    def __init__(self, config: WordErrorRateConfig) -> None:
        self._config = config

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """0 to 1, with the rate against the nearest reference. Raises TaskError when there is no text to compare with."""
        references = [self._units(text) for text in _texts(prompt)]
        hypothesis = self._units(trajectory.response)
        rate = min(_rate(reference, hypothesis) for reference in references)
        return Score(max(0.0, 1.0 - rate), info={"rate": rate})

    def _units(self, text: str) -> list[str]:
        text = unicodedata.normalize("NFKC", text)
        if self._config.ignore_case:
            text = text.casefold()
        words = text.split()
        if self._config.ignore_punctuation:
            words = [word for word in map(_bare, words) if word]
        return list("".join(words)) if self._config.unit == "character" else words


def build_word_error_rate(config: WordErrorRateConfig, *, pool: Pool) -> WordErrorRate:
    """Bounded by MAX_UNITS to a fraction of a second, so it runs where it is called and needs no pool."""
    del pool
    return WordErrorRate(config)


def _rate(reference: list[str], hypothesis: list[str]) -> float:
    if not reference:
        return float(bool(hypothesis))
    surplus = len(hypothesis) - len(reference)
    if surplus >= len(reference):
        return surplus / len(reference)  # so many insertions at least: no reward is left to find out more exactly
    return edit_distance(reference, hypothesis) / len(reference)


def _bare(word: str) -> str:
    """A word without punctuation; apostrophes, hyphens and points stay inside it, as in don't, well-known and 3.5."""
    kept = [
        character
        for index, character in enumerate(word)
        if not unicodedata.category(character).startswith("P")
        or (character in _INSIDE and word[index - 1 : index].isalnum() and word[index + 1 : index + 2].isalnum())
        or (character in ".," and word[index - 1 : index].isdigit() and word[index + 1 : index + 2].isdigit())
    ]
    return "".join(kept).replace("’", "'")


def _texts(prompt: Prompt) -> list[str]:
    references: list[Json] = prompt.reference if isinstance(prompt.reference, list) else [prompt.reference]
    if references and all(isinstance(text, str) and len(text.split()) <= MAX_UNITS for text in references):
        return references
    raise TaskError(
        f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {repr(prompt.reference)[:80]}; "
        f"word_error_rate needs text of at most {MAX_UNITS} words, or a list of such"
    )
