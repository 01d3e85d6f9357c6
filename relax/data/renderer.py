"""The renderer: the only place where conversations become tokens, and tokens text (TK1-TK4).

Called by data (to measure prompts), by tasks (every turn) and by evaluation. Markup and media placeholders become special tokens
exactly where the chat template wrote them; whatever users, tools or earlier turns say is tokenised as text. Sampled ids are never
re-encoded: `extend` only ever adds to them.
"""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from relax.core.completion import Ints, frozen
from relax.core.error import DataError, InvariantError
from relax.core.media import Modality
from relax.core.message import Json, MediaPart, Message
from relax.core.protocol import Encoded
from relax.data.control import ControlText, Guard
from relax.data.media.reference import shown_uri
from relax.data.slot import Content, MediaText, Pairs, Slot, in_order, protect, slots_of, texts_of
from relax.data.template import ChatTemplate
from relax.data.text_encoder import TextEncoder
from relax.model.family import Family
from relax.model.vocabulary import Vocabulary

Count = Literal["extended", "branched", "unstable", "merged", "guarded", "rewritten"]
"""extended: suffixes given; branched: histories no suffix continues (TK2); unstable: extended histories whose ids differ from a
full render's (case E3); merged: of those, the ones whose boundary lies inside a merged token of the full render (case E5);
guarded: renders in which data spelled a control token (TK4); rewritten: of those, the ones whose template acts on that text."""


_RECENT = 256
"""Conversations, and short texts, whose tokens are remembered."""
_SHORT = 256
"""Characters of a short text."""


class TextRenderer:
    """A core `Renderer`. `counts` is what happened so far, for metrics. Without a `family` it takes text only.

    One renderer serves one thread: a tokenizer changes its own settings while it encodes.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: Vocabulary,
        template_args: Mapping[str, Json] | None = None,
        family: Family | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._media = None if family is None else MediaText(family, tokenizer)
        self._vocabulary = vocabulary
        self._template = ChatTemplate(tokenizer, template_args or {})
        self._control = ControlText(tokenizer, vocabulary)
        # The unknown token stands for a lost character, in data too; it opens nothing.
        self._control_ids = frozenset(self._control.ids.values()) - {tokenizer.unk_token_id}
        self._stops = self._find_stops()
        self.counts: Counter[Count] = Counter()
        # The siblings of a group ask for the same conversation, one after another.
        self._encode_pairs = lru_cache(maxsize=_RECENT)(self._encode_pairs_anew)
        self._known_ids = lru_cache(maxsize=_RECENT)(self._ids_anew)
        # Whoever decodes a completion asks next whether its text is stable.
        self._last_text = lru_cache(maxsize=1)(self._text_anew)

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an assistant turn: every eos, and the template's own end of turn."""
        return self._stops

    def encode(self, messages: Sequence[Message], generate: bool = True) -> Encoded:
        """The conversation's tokens and media. Raises DataError for media that the model or its template does not take, and for
        what the template refuses."""
        pairs = self._pairs(messages)
        token_ids, order = self._encode_pairs(pairs, generate)
        return Encoded(token_ids, in_order(messages, order))

    def _encode_pairs_anew(self, pairs: Pairs, generate: bool) -> tuple[Ints, tuple[Modality, ...]]:
        guard = self._control.guard(texts_of(pairs))
        rendered, slots = self._render(guard, pairs, generate)
        ids = self._leading_bos() + self._tokenise(guard, rendered)
        self._check_placeholders(ids, slots)
        return _ints(ids), tuple(slot.modality for slot in slots)

    def extend(self, history: Sequence[Message], token_ids: Ints, messages: Sequence[Message]) -> Encoded | None:
        """The tokens after a sampled turn, int32[S]: `token_ids` + them is a full render of `history` + `messages` (TK2).

        `history` ends with the reply that `token_ids` (int32[T], the whole context) ends with. A turn that was cut short gets its
        missing end from here, as tokens that nobody sampled. None when the template changes what was shown or sampled, or ends a
        turn in another way than the sampled stop token: then the history branches (case E4).
        """
        if not history or history[-1].role != "assistant" or history[-1].media:
            raise InvariantError("TK2", "extend needs a history that ends with the assistant's reply, which is text")
        conversation = [*history, *messages]
        pairs = self._pairs(conversation)
        guard = self._control.guard(texts_of(pairs))
        before, shown = self._render(guard, pairs[: len(history) - 1], True)
        before += guard.protect(history[-1].text)
        whole, slots = self._render(guard, pairs, True)
        suffix = None
        if whole.startswith(before) and self._ends_with(token_ids, history[-1].text):
            suffix = self._suffix(guard, whole, whole[len(before) :], token_ids)
        if suffix is None:
            self.counts["branched"] += 1
            return None
        self._check_placeholders(suffix, slots[len(shown) :])
        self.counts["extended"] += 1
        parts = in_order(conversation, [slot.modality for slot in slots])
        return Encoded(_ints(suffix), parts[len(shown) :])

    def encode_reply(self, text: str) -> Ints:
        """The tokens, stop token included, that a policy would sample to say `text`; for supervised stages."""
        return frozen(np.array([*self._text_ids(text), self._stops[0]], dtype=np.int32))

    def decode(self, token_ids: Ints) -> str:
        """A completion's text, its stop token removed; other special tokens stay visible."""
        return self._text(self._said(token_ids))

    def is_stable(self, token_ids: Ints) -> bool:
        """Whether a completion's text encodes to the ids that were sampled; they are trained as sampled either way (TK1)."""
        ids = self._said(token_ids)
        return self._text_ids(self._text(ids)) == ids

    def _said(self, token_ids: Ints) -> list[int]:
        """The ids of a completion without its stop token."""
        ids: list[int] = token_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self._stops else ids

    def lost_characters(self, messages: Sequence[Message]) -> str:
        """The characters that vanish in the tokenizer (it has no tokens for them), sorted; "" when none does.

        Normalising tokenizers (case, compatibility forms) lose nothing here.
        """
        lost: set[str] = set()
        for text in (message.text for message in messages):
            decoded = self._text(self._text_ids(text))
            if decoded != text:
                lost |= _characters(text) - _characters(decoded)
        return "".join(sorted(lost))

    def _suffix(self, guard: Guard, whole: str, rest: str, token_ids: Ints) -> list[int] | None:
        """The ids of `rest`, what the full render `whole` holds after the reply, without the stop that was sampled."""
        ids = self._tokenise(guard, rest)
        stopped = int(token_ids[-1]) in self._stops
        if stopped and ids[:1] != [int(token_ids[-1])]:
            return None
        full = self._leading_bos() + self._tokenise(guard, whole)
        separated = not ids or full[-len(ids) :] == ids
        if not separated and self._text(ids) != guard.restore(rest):
            return None  # on its own the rest means other tokens than within the conversation
        suffix = ids[1:] if stopped else ids
        extended = [*map(int, token_ids), *suffix]
        if full != extended:
            if self._text(full) != self._text(extended):
                return None  # an earlier message is not what was shown: somebody edited the history (case E11)
            self.counts["unstable"] += 1
            self.counts["merged"] += not separated
        return suffix

    def _ends_with(self, token_ids: Ints, reply: str) -> bool:
        return len(token_ids) > 0 and self.decode(token_ids).endswith(reply)

    def _pairs(self, messages: Sequence[Message]) -> tuple[tuple[str, Content], ...]:
        return tuple((message.role, self._content(message)) for message in messages)

    def _content(self, message: Message) -> Content:
        """The text of a message, or where it holds media its parts, texts that follow each other as one."""
        if not message.media:
            return message.text
        content: list[str | Slot] = []
        for part in message.parts:
            if isinstance(part, MediaPart):
                if self._media is None:
                    raise DataError(
                        f"a {message.role} message holds {part.type} {shown_uri(part.uri)!r}, but the model reads text only,"
                        " or data.media is not set"
                    )
                content.append(self._media.slot(part))
            elif content and isinstance(content[-1], str):
                content[-1] += part.text
            else:
                content.append(part.text)
        return tuple(content)

    def _render(self, guard: Guard, pairs: Pairs, generate: bool) -> tuple[str, list[Slot]]:
        """The conversation as text, with `guard`'s markers for control strings of data, and its slots in their order there."""
        rendered = self._template.render([(role, protect(guard, content)) for role, content in pairs], generate)
        if guard.marks(rendered):
            self.counts["guarded"] += 1
            # A template that looks for such text would have rendered it another way; the safe form is kept.
            self.counts["rewritten"] += guard.restore(rendered) != self._template.render(pairs, generate)
        return (rendered, []) if self._media is None else self._media.fill(rendered, slots_of(pairs))

    def _check_placeholders(self, ids: list[int], slots: Sequence[Slot]) -> None:
        """Raises InvariantError unless the placeholders among `ids` are those of the slots (MM1)."""
        if self._media is not None:
            self._media.check(ids, slots)

    def _tokenise(self, guard: Guard, rendered: str) -> list[int]:
        if not guard.marks(rendered):
            ids = self._ids(rendered)
            if sum(token_id in self._control_ids for token_id in ids) == self._control.count(rendered):
                return ids
        found: list[int] = []
        for control_id, text in self._control.split(rendered):
            found += [control_id] if control_id is not None else self._text_ids(guard.restore(text))
        return found

    def _text_ids(self, text: str) -> list[int]:
        """The ids of text from data: never a control token. Raises DataError when the tokenizer insists on one."""
        ids = self._ids(text, True)
        if self._control_ids.isdisjoint(ids):
            return ids
        # Added tokens that are not marked special are found all the same: cut them in two.
        ids = [token_id for part in self._control.cut(text) for token_id in self._ids(part, True)]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise DataError(f"the tokenizer makes special tokens of plain text: {text[:80]!r}")

    def _ids(self, text: str, split_special: bool = False) -> list[int]:
        known = self._known_ids if len(text) <= _SHORT else self._ids_anew
        return list(known(text, split_special))

    def _ids_anew(self, text: str, split_special: bool) -> tuple[int, ...]:
        return tuple(self._encoder.ids(text, split_special))

    def _text(self, ids: list[int]) -> str:
        return self._last_text(tuple(ids))

    def _text_anew(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _leading_bos(self) -> list[int]:
        """A chat template writes its own BOS, so one is added only where there is no template and the tokenizer would."""
        bos_id = self._vocabulary.bos_id
        return [bos_id] if not self._template.present and self._vocabulary.adds_bos and bos_id is not None else []

    def _find_stops(self) -> tuple[int, ...]:
        stops = list(self._vocabulary.stop_ids)
        tail = self._template.turn_end() if self._template.present else ""
        ends = [token_id for token_id, text in self._control.split(tail) if token_id is not None or text.strip()]
        if ends and ends[0] is not None and self._vocabulary.allowed[ends[0]]:
            stops.append(ends[0])
        return tuple(dict.fromkeys(stops))


def _ints(ids: list[int]) -> Ints:
    return frozen(np.asarray(ids, dtype=np.int32))


def _characters(text: str) -> set[str]:
    return set(unicodedata.normalize("NFKC", text).casefold())
