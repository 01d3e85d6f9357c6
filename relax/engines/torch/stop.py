"""Finds stop strings in the decoded text of a completion, token by token, and changes no token (TK1).

Used by a request after each sampled token. Keeps nothing, so a request that starts again or goes on elsewhere is judged the same:
a completion ends with the first token after which its decoded text holds a stop string.
"""

from collections.abc import Sequence

from relax.core.protocol import Decode

_SLACK = 8
"""Tokens before those that a stop string can span: a decoder may treat the first ones of what it is given differently."""
_HALF = "\ufffd"
"""What stands for bytes that are no whole character."""


class StopStrings:
    """`window` is how many of the newest tokens can hold a stop string: a token of text has at least one byte."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self.window = max(len(string.encode()) for string in strings) + _SLACK

    def completed(self, earlier: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop string. `earlier` are the completion's tokens before `tokens`, sampled elsewhere."""
        missing = self.window - len(tokens)
        recent = [*earlier[-missing:], *tokens] if missing > 0 else tokens[-self.window :]
        text = self._decode(recent)
        if self._found(text):
            return self._found(self._decode([*earlier, *tokens]))
        # The window may begin within a character, which some decoders then take apart as far as the next whole token.
        return (
            _HALF in text
            and len(recent) < len(earlier) + len(tokens)
            and self._found(self._decode([*earlier, *tokens]))
        )

    def _found(self, text: str) -> bool:
        return any(string in text for string in self._strings)
