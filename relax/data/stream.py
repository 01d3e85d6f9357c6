"""From records to prompts: an endless resumable stream for training, and one pass over an evaluation set.

Built by the data service from a source's configuration node. A record becomes a prompt here and nowhere else: read, given
the system prompt, rendered once to measure it; or it is refused into the quarantine and the run goes on.
"""

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

from relax.core.error import DataError
from relax.core.message import Json, Message, Prompt, PromptKey, text_message
from relax.core.protocol import Record, Renderer
from relax.data.config import SourceConfig
from relax.data.cursor import Cursor
from relax.data.dataset import DataSet, OrderedDataSet, Refusal
from relax.data.media.origin import Origins
from relax.data.quarantine import EXCERPT_CHARACTERS, Quarantine
from relax.data.record import MAX_DEPTH, read_record
from relax.data.table import SOURCES


class CheckingRenderer(Renderer, Protocol):
    """A renderer that can say which characters of a conversation its tokenizer has no tokens for."""

    def lost_characters(self, messages: Sequence[Message]) -> str: ...


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What holds for the prompts of every source: a limit in tokens, the rendered markup included; the system prompt.

    `media` is where their media come from; None: text only, and a record that holds one is refused.
    """

    max_prompt_tokens: int
    system_prompt: str | None = None
    media: Origins | None = None


@dataclass(frozen=True)
class PromptReader:
    """Turns the records of one data set into prompts."""

    dataset: DataSet
    config: SourceConfig
    renderer: CheckingRenderer
    rules: PromptRules
    quarantine: Quarantine

    def read(self, index: int, pass_number: int) -> Prompt | None:
        """The prompt of a record, or None when it was refused (and is now in the quarantine)."""
        value: Json = None
        try:
            value = self.dataset.read(index)
            messages, record = self._read(value, index)
        except Refusal as refusal:
            excerpt = refusal.excerpt if refusal.excerpt is not None else _excerpt(value)
            self.quarantine.add(self.config.name, index, self.dataset.location(index), refusal, excerpt)
            return None
        key = PromptKey(self.config.name, index, pass_number)
        return Prompt(key, record.task, messages, record.reference, record.metadata or {})

    def _read(self, value: Json, index: int) -> tuple[tuple[Message, ...], Record]:
        origins = self.rules.media
        media = None if origins is None else origins.reader(self.dataset, self.config, index)
        record = read_record(value, self.config, index, media)
        messages = self._checked(record.messages)
        if origins is not None and media is not None:
            origins.keep(media)
        return messages, record

    def nothing_usable(self) -> DataError:
        """The error for a data set in which every record was refused."""
        name, reasons = self.config.name, self.quarantine.summary(self.config.name)
        if len(self.dataset) == 0:
            return DataError(f"source {name!r} holds no record; check its path, or the arguments of its generator")
        return DataError(
            f"source {name!r}: none of its {len(self.dataset)} records can be used: {reasons};"
            " mend the data, or the keys and limits of the source"
        )

    def _checked(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages as the policy will see them. Raises Refusal when it cannot."""
        system_prompt = self.rules.system_prompt
        if system_prompt is not None and messages[0].role != "system":
            messages = (text_message("system", system_prompt), *messages)
        media = [part for message in messages for part in message.media]
        if media and self.rules.media is None:
            raise Refusal("text only", f"the record holds {media[0].type}, which is read only with data.media set")
        try:
            lost = self.renderer.lost_characters([text_message(message.role, message.text) for message in messages])
            if lost:
                raise Refusal("unencodable text", f"the tokenizer has no tokens for {lost[:20]!r}")
            if not media:  # how many tokens a medium takes is not known before somebody looks at it: see media.prepare
                check_length(len(self.renderer.encode(messages).token_ids), self.rules)
        except Refusal:
            raise
        except DataError as error:
            raise Refusal("cannot be rendered", str(error)) from error
        return messages


def check_length(num_tokens: int, rules: PromptRules) -> None:
    """Raises Refusal for a rendered prompt without tokens, or with too many."""
    if num_tokens > rules.max_prompt_tokens:
        raise Refusal("over-long prompt", f"{num_tokens} tokens, data.max_prompt_tokens is {rules.max_prompt_tokens}")
    if num_tokens == 0:
        raise Refusal("empty prompt", "the rendered prompt has no token")


def _excerpt(value: Json) -> str:
    """A refused record for people to recognise; it may be what JSON, or even `repr`, has no form for."""
    forms: tuple[Callable[[], str], ...] = (
        lambda: json.dumps(_shortened(value), default=repr),
        lambda: reprlib.repr(value),
    )
    for form in forms:
        try:
            return form()
        except Exception:  # a value of any class may raise anything here, and the record is refused already
            continue
    return f"a {type(value).__name__} that cannot be printed"


def _shortened(value: Json, depth: int = 0) -> Json:
    """The value with what is long in it cut: a record may hold whole films."""
    if isinstance(value, str):
        return value[:EXCERPT_CHARACTERS]
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if depth > MAX_DEPTH or not isinstance(value, dict | list | tuple):
        return reprlib.repr(value) if hasattr(value, "__array__") else value
    if isinstance(value, dict):
        return {key: _shortened(item, depth + 1) for key, item in islice(value.items(), EXCERPT_CHARACTERS)}
    return [_shortened(item, depth + 1) for item in value[:EXCERPT_CHARACTERS]]


class PromptStream:
    """A core `Source`: endless passes over one data set. Iterating, saving and restoring all speak of one position."""

    def __init__(self, reader: PromptReader, *, seed: int, accept_changes: bool = False) -> None:
        self._reader = reader
        self._seed = seed
        self._accept_changes = accept_changes
        self.accepted: tuple[str, ...] = ()
        """What `restore` found changed and went on with, in words."""

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """The next prompt; never ends. Raises DataError when every record of the data set was refused."""
        self._reader.quarantine.open()
        refused: set[int] = set()
        while len(refused) < len(self._reader.dataset):
            pass_number = self._cursor.pass_number
            index = self._cursor.advance()
            prompt = self._reader.read(index, pass_number)
            if prompt is not None:
                return prompt
            refused.add(index)
        raise self._reader.nothing_usable()

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        """Changes nothing: within a source every record comes once in a pass, whatever it earned."""

    def state(self) -> dict[str, Json]:
        """A few numbers and the digest, which is taken once: cheap enough for every step."""
        return self._cursor.state()

    def restore(self, state: Mapping[str, Json]) -> None:
        """Go on from a saved state, before or after iteration began.

        Raises DataError when the data set is another one; with `accept_changes` its next pass begins instead.
        """
        changes = self._cursor.restore(state, accept_changes=self._accept_changes)
        self.accepted = tuple(f"source {self._reader.config.name!r}: {change}" for change in changes)

    @cached_property
    def _cursor(self) -> Cursor:
        dataset, config = self._reader.dataset, self._reader.config
        return Cursor(
            config.name,
            seed=self._seed,
            size=len(dataset),
            digest=dataset.digest,
            shuffle=config.shuffle,
            order=dataset.order if isinstance(dataset, OrderedDataSet) else None,
        )


def build_reader(
    config: SourceConfig, *, renderer: CheckingRenderer, rules: PromptRules, quarantine: Quarantine, seed: int
) -> PromptReader:
    """The reader of one source node; `seed` is the run's. Opens nothing."""
    dataset = SOURCES.component(config.type)(config, seed=seed)
    if rules.media is not None:
        rules.media.register(dataset, config)
    return PromptReader(dataset, config, renderer, rules, quarantine)


def read_prompts(
    config: SourceConfig,
    *,
    renderer: CheckingRenderer,
    rules: PromptRules,
    quarantine: Quarantine,
    seed: int = 0,
    max_records: int | None = None,
) -> list[Prompt]:
    """One pass over a source in the data set's own order: its usable records as prompts, the first `max_records` of them.

    Raises DataError when there is none.
    """
    reader = build_reader(config, renderer=renderer, rules=rules, quarantine=quarantine, seed=seed)
    quarantine.open()
    prompts: list[Prompt] = []
    for index in range(len(reader.dataset)):
        if max_records is not None and len(prompts) == max_records:
            break
        prompt = reader.read(index, pass_number=0)
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise reader.nothing_usable()
    return prompts
