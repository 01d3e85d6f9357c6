"""Control text: the strings that a tokenizer turns into special tokens, and how data are kept from becoming them (TK4).

Used by the renderer around the chat template. Before the template sees a message, every control string in it is replaced by a
marker of private-use characters; after rendering, what matches a control string was written by the template, and what carries
a marker came from data. So templates may strip, split and test contents as they like.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from relax.core.error import DataError
from relax.model.vocabulary import Vocabulary

_LOOKS_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Chat markers that some tokenizers forget to mark as special."""
_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xE400)]


class ControlText:
    """The control strings of one tokenizer: special added tokens, stop tokens, tokens no policy may sample, chat markers."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self.ids: dict[str, int] = {}
        shapes = []
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content)):
            barred = token_id in vocabulary.stop_ids or token_id >= vocabulary.size or not vocabulary.allowed[token_id]
            if token.content and (token.special or barred or _LOOKS_CONTROL.fullmatch(token.content)):
                self.ids[token.content] = token_id
                shapes.append(_shape(token))
        self._strings = tuple(self.ids)
        self._pattern = re.compile("|".join(map(re.escape, self._strings)) or r"(?!)")
        # As the tokenizer finds them: some take the white space around them along (AddedToken.lstrip, rstrip).
        self._written = re.compile("|".join(shapes) or r"(?!)")

    def split(self, rendered: str) -> Iterator[tuple[int | None, str]]:
        """The pieces of a rendered text in order: (id, "") for a control token, (None, text) for what lies between."""
        end = 0
        for match in self._written.finditer(rendered):
            if match.start() > end:
                yield None, rendered[end : match.start()]
            yield self.ids[match[0] if match[0] in self.ids else match[0].strip()], ""
            end = match.end()
        if end < len(rendered):
            yield None, rendered[end:]

    def count(self, rendered: str) -> int:
        """How many control tokens a text holds."""
        return sum(1 for _ in self._written.finditer(rendered))

    def cut(self, text: str) -> list[str]:
        """The text in parts none of which holds a whole control string."""
        parts, start = [], 0
        for match in self._pattern.finditer(text):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [part for part in [*parts, text[start:]] if part]

    def guard(self, texts: Iterable[str]) -> "Guard":
        """A guard whose markers occur in none of the texts."""
        used = {character for text in texts if not text.isascii() for character in text}
        free = [character for character in _PRIVATE_USE if character not in used]
        if len(free) < 2:
            raise DataError("a conversation uses every private-use character of U+E000 to U+E3FF; remove them")
        return Guard(self._strings, self._pattern, free[0], free[1])


@dataclass(frozen=True, slots=True)
class Guard:
    """Replaces control strings by markers `first number second`; a marker without number only keeps two texts apart."""

    strings: tuple[str, ...]
    pattern: re.Pattern[str]
    first: str
    second: str

    def protect(self, text: str) -> str:
        """The text with markers. Equal texts give equal results, so renders with one guard can be compared."""
        guarded = self.pattern.sub(lambda match: f"{self.first}{self.strings.index(match[0])}{self.second}", text)
        if any(guarded.endswith(start) for string in self.strings for start in _proper_starts(string)):
            # The next text could complete it: templates may put contents side by side.
            guarded += self.first + self.second
        return guarded

    def marks(self, rendered: str) -> bool:
        return self.first in rendered

    def restore(self, rendered: str) -> str:
        """The text without markers. Raises DataError when the template broke one."""
        restored: str = re.sub(
            f"{self.first}([0-9]*){self.second}",
            lambda match: self.strings[int(match[1])] if match[1] else "",
            rendered,
        )
        if self.first in restored or self.second in restored:
            raise DataError("the chat template cuts through text that looks like one of its own control tokens")
        return restored


def _shape(token: Any) -> str:
    return (r"\s*" if token.lstrip else "") + re.escape(str(token.content)) + (r"\s*" if token.rstrip else "")


def _proper_starts(string: str) -> Iterator[str]:
    return (string[:length] for length in range(1, len(string)))
