r"""What a text states as its answer: `\boxed{...}`, `<answer>...</answer>`, and what follows `answer` and `is`, `:` or `=`.

Used by the rewards of media tasks and, with markers of its own, by `relax.tasks.choice`. The last statement counts, so printing
several candidates states one of them. Every pattern reads a text once.
"""

import re
from collections.abc import Iterator

_MARKER = re.compile(r"\banswer\b[*_]*[ \t]*(?::|=|\bis\b[ \t]*:?)", re.IGNORECASE)
_BOX = re.compile(r"\\boxed[ \t]*\{")
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_END_TAG = re.compile(r"</answer>", re.IGNORECASE)
_DECORATION = re.compile(r"[*`$]|\\[()\[\]]|(?<!\w)_+|_+(?!\w)")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathsf|bf|rm)\b[ \t]*(?:\{([^{}]{0,300})\})?")
BOX_LIMIT = 300
"""Characters in which a box must close."""
STATEMENT_LIMIT = 1200
"""Characters that a statement may have."""
_MAX_STATEMENTS = 100
"""Statements, from the last one back, in which text is looked for."""


def statement(text: str) -> str:
    """The last statement of an answer; without any, the last line that is not empty. "" when there is none."""
    for start in sorted(_starts(text), reverse=True)[:_MAX_STATEMENTS]:
        found = plain(_stated(text, start))
        if found:
            return found
    return next((line for line in map(plain, reversed(text.splitlines())) if line), "")


def marked(text: str) -> str | None:
    """The last statement of an answer that something marks as one, or None."""
    return statement(text) if next(_starts(text), None) is not None else None


def plain(text: str) -> str:
    """A statement without the decoration of Markdown and LaTeX around it."""
    return _DECORATION.sub("", _WRAPPER.sub(lambda match: match.group(1) or "", text)).strip()


def boxes(text: str) -> list[int]:
    r"""Where the inside of every `\boxed{` begins."""
    return [match.end() for match in _BOX.finditer(text)]


def content(text: str, start: int) -> str:
    """What is stated from `start` on: the inside of a box, or the rest of the line (of the next one, if nothing is left)."""
    if text[start - 1] == "{":
        depth = 1
        for index in range(start, min(len(text), start + BOX_LIMIT)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start:index]
        return ""
    for line in text[start : start + STATEMENT_LIMIT].splitlines():
        if line.strip(" \t*_"):
            return line
    return ""


def _starts(text: str) -> Iterator[int]:
    yield from boxes(text)
    for pattern in (_MARKER, _TAG):
        yield from (match.end() for match in pattern.finditer(text))


def _stated(text: str, start: int) -> str:
    if text[start - 1] != ">":
        return _END_TAG.split(content(text, start))[0]
    end = _END_TAG.search(text, start, start + STATEMENT_LIMIT)
    return text[start : end.start()] if end else ""
