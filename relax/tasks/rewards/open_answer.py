"""A short answer in words is the reference (or one of a list), once both are written in one way.

What an answer states is in `relax.tasks.statement`; it is compared as a whole, so a response that lists candidates is wrong.
"""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import OpenAnswerConfig
from relax.tasks.rewards.count import WORDS
from relax.tasks.statement import plain, statement

_ARTICLES = {"a", "an", "the"}
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_DASH = re.compile(r"[-‐‑–—/]+")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?", re.ASCII)
_SENTENCE_END = re.compile(r"[.!?]+$")
MAX_CHARACTERS = 2000
"""Longer statements are no short answers."""


def normalise(text: str) -> str:
    """One way to write an answer: compatibility forms folded (NFKC), lower case, no articles, no punctuation (but the point and the
    sign of numbers), numbers in digits without grouping and trailing zeros, one space between words.

    Accents stay: they tell words apart. `The  Eiffel-Tower!` is `eiffel tower`, `Three` is `3`, `1,200.50 m` is `1200.5 m`.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    grouped = _GROUPED.sub(lambda match: match.group().replace(",", ""), folded)
    words = [_word(word) for raw in grouped.split() for word in _parts(raw)]
    kept = [word for word in words if word and word not in _ARTICLES]
    # "A" alone is an answer, not an article.
    return " ".join(kept or [word for word in words if word])


class OpenAnswer:
    """Core's `Reward`. A response that states nothing is wrong, not a failure: it scores 0."""

    def __init__(self, config: OpenAnswerConfig) -> None:
        self._whole = config.answer == "whole"

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0, with the answer that was read. Raises TaskError when the reference is no text or number (or list of those), or
        nothing is left of it."""
        accepted = {_accepted(reference, prompt) for reference in _references(prompt)}
        response = trajectory.response
        stated = plain(response) if self._whole else statement(response)
        answer = normalise(stated) if len(stated) <= MAX_CHARACTERS else ""
        return Score(float(answer in accepted), info={"answer": answer or None})


def build_open_answer(config: OpenAnswerConfig, *, pool: Pool) -> OpenAnswer:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return OpenAnswer(config)


def _parts(raw: str) -> list[str]:
    """A word cut at dashes; a number keeps its sign."""
    bare = raw.strip("()[]{}\"'“”‘’,;:!?")
    if _NUMBER.fullmatch(_SENTENCE_END.sub("", bare)):
        return [_SENTENCE_END.sub("", bare)]
    return _DASH.split(raw)


def _word(word: str) -> str:
    if _NUMBER.fullmatch(word):
        return _number(word)
    bare = "".join(
        character
        for character in word
        if not unicodedata.category(character).startswith(("P", "S")) or character in "%°"
    )
    return str(WORDS[bare]) if bare in WORDS else bare


def _number(text: str) -> str:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return text
    plain_form = f"{value:f}"
    return (plain_form.rstrip("0").rstrip(".") if "." in plain_form else plain_form).lstrip("+") or "0"


def _references(prompt: Prompt) -> list[Json]:
    return prompt.reference if isinstance(prompt.reference, list) and prompt.reference else [prompt.reference]


def _accepted(reference: Json, prompt: Prompt) -> str:
    usable = isinstance(reference, str | int | float) and not isinstance(reference, bool)
    answer = normalise(str(reference)) if usable else ""
    if not answer:
        raise TaskError(
            f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
            "open_answer needs text, a number, or a list of them, in which a letter or a digit is left"
        )
    return answer
