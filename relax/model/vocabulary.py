"""Facts of a tokenizer and a model's vocabulary, checked once at start (TK5).

Called by engines, training and data. `allowed` is the support of every distribution in the system: the engine samples from
it and the trainer normalises over it, so media placeholders and ids without a token are outside it on both sides (MM4).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax.core.completion import Bools, frozen
from relax.core.error import UserError
from relax.model.load import ModelConfig, Tokenizer

PLACEHOLDER_NAMES = frozenset(
    f"{left}{word}{right}"
    for word in ("image", "video", "audio", "IMAGE", "VIDEO", "AUDIO")
    for left, right in (("<", ">"), ("<|", "|>"), ("<|", "_pad|>"), ("<", "_soft_token>"))
) | {"<|vision_pad|>", "[IMG]", "<IMG_CONTEXT>"}
"""Names under which known tokenizers keep the token that stands for one media feature."""

_PLACEHOLDER_KEYS = tuple(
    f"{medium}_token_{suffix}" for medium in ("image", "video", "audio", "vision") for suffix in ("id", "index")
)
"""Configuration keys that hold such a token's id."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` is the number of logit columns; `allowed` bool[size] is read-only; `stop_ids` starts with the tokenizer's eos.

    `adds_bos`: encoding with special tokens begins with BOS. `doubles_bos`: the chat template writes BOS as well, so rendered
    text must be encoded without special tokens. `notes` are sentences for the start-up report.
    """

    size: int
    allowed: Bools
    pad_id: int
    stop_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    doubles_bos: bool
    placeholder_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_vocabulary(tokenizer: Tokenizer, model_config: ModelConfig) -> Vocabulary:
    """The facts of this tokenizer with this model.

    Raises UserError when the tokenizer has more ids than the model has logit columns, or a stop or pad id is outside them.
    """
    size = int(model_config.get_text_config().vocab_size)
    known = set(tokenizer.get_vocab().values()) | set(tokenizer.added_tokens_decoder)
    if max(known) >= size:
        raise UserError(
            f"the tokenizer has ids up to {max(known)}, but the model has only {size} logit columns;"
            " model.tokenizer and model.path do not belong together"
        )
    placeholders = _placeholder_ids(tokenizer, model_config)
    allowed = np.zeros(size, dtype=np.bool_)
    allowed[sorted(known - set(placeholders))] = True
    stop_ids = _stop_ids(tokenizer, model_config, allowed)
    pad_id, notes = _pad_id(tokenizer, model_config, stop_ids, size)
    if len(stop_ids) > 1:
        notes.append(f"several stop tokens: {', '.join(map(repr, tokenizer.convert_ids_to_tokens(stop_ids)))}")
    if not stop_ids:
        notes.append("no stop token: completions end only at sampling.max_tokens")
    if size > len(known):
        notes.append(f"{size - len(known)} of {size} logit columns have no token and are never sampled")
    bos_id = tokenizer.bos_token_id
    adds_bos = bos_id is not None and list(tokenizer("a").input_ids[:1]) == [bos_id]
    doubles_bos = adds_bos and _template_writes_bos(tokenizer)
    if doubles_bos:
        notes.append(
            "the chat template writes BOS and so does the tokenizer: rendered text is encoded without special tokens"
        )
    return Vocabulary(
        size, frozen(allowed), pad_id, stop_ids, bos_id, adds_bos, doubles_bos, placeholders, tuple(notes)
    )


def _placeholder_ids(tokenizer: Tokenizer, model_config: ModelConfig) -> tuple[int, ...]:
    """Ids of media placeholders. Only added tokens count: the words `<image>` in plain text are ordinary text."""
    added = tokenizer.added_tokens_decoder
    named = set(PLACEHOLDER_NAMES)
    for medium in ("image", "video", "audio"):
        name = getattr(tokenizer, f"{medium}_token", None)
        if isinstance(name, str):
            named.add(name)
    found = {token_id for token_id, token in added.items() if token.special and token.content in named}
    for config in (model_config, getattr(model_config, "thinker_config", None)):
        ids = (getattr(config, key, None) for key in _PLACEHOLDER_KEYS)
        found |= {token_id for token_id in ids if isinstance(token_id, int) and token_id in added}
    return tuple(sorted(found))


def _stop_ids(tokenizer: Tokenizer, model_config: ModelConfig, allowed: Bools) -> tuple[int, ...]:
    stop_ids = tuple(dict.fromkeys(_named_stop_ids(tokenizer, model_config)))
    for stop_id in stop_ids:
        if not 0 <= stop_id < len(allowed) or not allowed[stop_id]:
            raise UserError(
                f"stop id {stop_id} (eos_token_id) is not a token that this model can sample;"
                " mend eos_token_id in config.json, generation_config.json or the tokenizer"
            )
    return stop_ids


def _named_stop_ids(tokenizer: Tokenizer, model_config: ModelConfig) -> Iterator[int]:
    """Every id that tokenizer, config.json or generation_config.json calls an end of sequence."""
    named = [tokenizer.eos_token_id, model_config.get_text_config().eos_token_id]
    folder = Path(getattr(model_config, "name_or_path", "") or "")
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        named.append(GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id)
    for value in named:
        yield from [] if value is None else [value] if isinstance(value, int) else value


def _pad_id(
    tokenizer: Tokenizer, model_config: ModelConfig, stop_ids: tuple[int, ...], size: int
) -> tuple[int, list[str]]:
    """The id that fills up short rows; the loss mask goes by position, so any id is correct (TK3)."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id), []
    configured = getattr(model_config.get_text_config(), "pad_token_id", None)
    if isinstance(configured, int) and 0 <= configured < size:
        return configured, [f"the tokenizer has no pad token: id {configured} of config.json pads"]
    pad_id = stop_ids[0] if stop_ids else 0
    return pad_id, [f"the tokenizer has no pad token: {tokenizer.convert_ids_to_tokens(pad_id)!r} (id {pad_id}) pads"]


def _template_writes_bos(tokenizer: Tokenizer) -> bool:
    if not tokenizer.chat_template:
        return False
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:  # the template refuses this conversation; the renderer reports it with the real one
        return False
    return bool(text.startswith(tokenizer.bos_token))
