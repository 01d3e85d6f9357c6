"""A tokenizer's chat template as a function from messages to text.

Used by the renderer, which owns what surrounds it (TK2, TK4). Finds out once, by rendering probes, whether each role's content
has to be text or a list of parts (cases E7, F12), and which token ends an assistant turn (case E10). A message with media is
always given as a list of parts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from relax.core.error import DataError
from relax.core.message import Json
from relax.data.slot import Content

_PROBE = "relaxprobe"
_PROBES: dict[str, tuple[str, ...]] = {
    "user": ("user",),
    "system": ("system", "user"),
    "assistant": ("user", "assistant", "user"),
    "tool": ("user", "assistant", "tool"),
}


class ChatTemplate:
    """`render` with `args` on every call. Without a template, a conversation of one message is its text."""

    def __init__(self, tokenizer: Any, args: Mapping[str, Json]) -> None:
        self._tokenizer = tokenizer
        self._args = dict(args)
        self.present = bool(tokenizer.chat_template)
        self._listed: set[str] = set()
        if self.present:
            for role in _PROBES:
                if not self._shows(role) and not self._shows(role, listed=True):
                    self._listed.discard(role)  # neither form works: the error of the real conversation is told

    def render(self, messages: Sequence[tuple[str, Content]], generate: bool) -> str:
        """The conversation of (role, content) pairs, opened for an assistant turn with `generate`. Raises DataError.

        A slot becomes whatever the template writes for a medium of its modality.
        """
        if not self.present:
            if any(not isinstance(content, str) for _, content in messages):
                raise DataError(
                    "the tokenizer has no chat template, so media have no place in a prompt; use a tokenizer with a"
                    " template that takes media"
                )
            if len(messages) != 1:
                raise DataError(
                    f"the tokenizer has no chat template, so {len(messages)} messages cannot be rendered;"
                    " use prompts of one message, or a tokenizer with a template"
                )
            return str(messages[0][1])
        try:
            return self._apply(messages, generate)
        except Exception as error:  # a template is code of the model's author; it may raise anything
            roles = ", ".join(role for role, _ in messages) or "no message"
            raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def turn_end(self) -> str:
        """What the template writes after an assistant's text that ends a conversation; "" when it is not known."""
        try:
            _, found, tail = self._apply([("user", "a"), ("assistant", _PROBE)], False).rpartition(_PROBE)
        except Exception:  # see render: such a template has no turn of its own to end
            return ""
        return tail if found else ""

    def _shows(self, role: str, *, listed: bool = False) -> bool:
        """Whether a message of that role appears in a render; `listed` tries a list of parts and keeps that form."""
        if listed:
            self._listed.add(role)
        messages = [(other, _PROBE if other == role else "a") for other in _PROBES[role]]
        try:
            rendered = self._apply(messages, False)
        except Exception:  # see render: for a probe, any error means that this form does not work
            return False
        printed = listed and re.search("""["']type["']""", rendered)  # a template for text prints the list itself
        return _PROBE in rendered and not printed

    def _apply(self, messages: Sequence[tuple[str, Content]], generate: bool) -> str:
        conversation = [{"role": role, "content": self._form(role, content)} for role, content in messages]
        return str(
            self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generate, **self._args
            )
        )

    def _form(self, role: str, content: Content) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if role in self._listed else content
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality} for part in content
        ]
