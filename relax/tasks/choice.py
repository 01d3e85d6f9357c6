r"""Which option of a multiple-choice question a text states.

Used by the multiple_choice reward. Statements are `\boxed{B}` and what follows `answer`, `option` or `choice` and `is`, `:` or `=`;
the last one counts. Without any, the last line counts if it is an option and nothing else. Mentions are no statements, and every
pattern reads a text once.
"""

import re
from collections.abc import Mapping, Set

from relax.tasks.statement import boxes, content

_MARKER = re.compile(r"\b(?:answer|option|choice)\b[*_]*[ \t]*(?::|=|\bis\b[ \t]*:?)", re.IGNORECASE)
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathsf|bf|rm)\b[ \t]*")
_DECORATION = re.compile(r"[*_$`{}\"']|\\[()\[\]]")
_HEAD = re.compile(
    r"""(?:(?:option|choice)[ ]+)?
        (?: \( ([A-Za-z]) \) | \[ ([A-Za-z]) \]           # (B) and [B], whatever follows
          | ([A-Za-z]) (?= [).:,;!?\]/&] | $)             # B. and B) and a lone B
          | ([A-Z]) (?= [ ]+ (?: because | since | as | and | or | which | - | – ) \b | [ ]*[-–&/] ) )""",
    re.VERBOSE,
)
_MORE = re.compile(r"[).\]]?[ ]*(?:,|/|;|&|\band\b|\bor\b)[ ]*(?:[(\[]([A-Za-z])[)\]]|([A-Z])(?![A-Za-z0-9]))")
_LISTED = re.compile(r"(?:^|[ ])[(\[]?([A-Z])[)\].:](?=[ ]|$)")
_MAX_STATEMENTS = 100
"""Statements, from the last one back, in which an option is looked for."""


def fold(text: str) -> str:
    """A text as options are compared: without case, decoration, and punctuation at its ends."""
    return " ".join(_plain(text).casefold().split()).strip(" .:;,!")


def stated(text: str, options: Mapping[str, str | None]) -> Set[str]:
    """The letters that the last statement of `text` names: one, none (empty), or several, which is ambiguous.

    `options` is letter -> text (None: only the letter is known). A letter that is no option may come out too: it is wrong.
    """
    for start in sorted(_starts(text), reverse=True)[:_MAX_STATEMENTS]:
        found = _read(content(text, start), options)
        if found:
            return found
    lines = [line for line in text.splitlines() if line.strip()]
    return _bare(lines, options) if lines else frozenset()


def _starts(text: str) -> list[int]:
    """Where what is stated begins; a box that follows a marker is found by itself."""
    return [match.end() for match in _MARKER.finditer(text)] + boxes(text)


def _plain(text: str) -> str:
    return _DECORATION.sub("", _WRAPPER.sub("", text)).strip()


def _read(content: str, options: Mapping[str, str | None]) -> Set[str]:
    """The letters that a statement begins with, or whose text it is."""
    plain = _plain(content)
    named = _by_text(plain, options)
    head = None if named else _HEAD.match(plain)
    if head is None:
        return named
    found = {_letter(head)}
    position = head.end()
    while (more := _MORE.match(plain, position)) is not None:
        found.add(_letter(more))
        position = more.end()
    # "B. Paris" where Paris is option A states both.
    return found | _by_text(plain[position:].lstrip(" ).]:-–"), options)


def _letter(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).upper()


def _by_text(plain: str, options: Mapping[str, str | None]) -> Set[str]:
    folded = fold(plain)
    return {letter for letter, text in options.items() if text is not None and folded and fold(text) == folded}


def _bare(lines: list[str], options: Mapping[str, str | None]) -> Set[str]:
    """The letters of a last line that is an option and nothing else; of a single line, that begins with one."""
    last = _plain(lines[-1])
    named = _by_text(last, options)
    head = None if named else _HEAD.match(last)
    if head is None:
        return named
    rest = last[head.end() :].strip(" ).]:,;!?")
    if rest and len(lines) > 1 and not _by_text(rest, options):
        return frozenset()
    return _read(last, options) | set(_LISTED.findall(last))
