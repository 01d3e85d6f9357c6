"""Toy tokenizers, templates and sources for the tests of the data room."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.base import ComponentConfig
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptReader, PromptRules, PromptStream, build_reader
from relax.data.table import SOURCES
from relax.model.vocabulary import Vocabulary

CHAR_MODEL = Path(__file__).parents[2] / "recipes/models/qwen3-char"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
THINK_STRIPPING = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
)
LISTS_ONLY = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
MERGING = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
"""No special token between contents: a reply's end and the template's newline can be one token."""

_CORPUS = [
    "<|im_start|>user\nWhat is the sum of seven and five?<|im_end|>\n",
    "assistant\nThe sum is twelve.\n\nab ab ab abab abab\n\nthe end of the sum\n\n",
]


@cache
def _char() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(CHAR_MODEL))


@cache
def _bpe(unmarked: bool) -> str:
    """A trained byte-level BPE; `unmarked` adds the chat markers as tokens that are not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    tokenizer.add_tokens([AddedToken(marker, special=not unmarked, normalized=False) for marker in markers])
    tokenizer.add_tokens(["<think>", "</think>"])
    return str(tokenizer.to_str())


def char_tokenizer() -> Any:
    return _char()


def bpe_tokenizer(template: str | None = CHATML, *, unmarked: bool = False) -> Any:
    """A fresh tokenizer, so that a test may change it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bpe(unmarked)))
    if not unmarked:  # naming a token as pad or eos would mark it as special
        fast.pad_token, fast.eos_token = "<|endoftext|>", "<|endoftext|>"
    fast.chat_template = template
    return fast


def vocabulary(tokenizer: Any, *, stops: tuple[str, ...] = (), bos: str | None = None) -> Vocabulary:
    """Facts of a toy tokenizer: `<|image_pad|>` is a placeholder, `stops` are the eos tokens."""
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    allowed = np.ones(len(tokenizer), dtype=np.bool_)
    allowed[placeholder] = False
    return Vocabulary(
        size=len(tokenizer),
        allowed=allowed,
        pad_id=0,
        stop_ids=tuple(tokenizer.convert_tokens_to_ids(stop) for stop in stops),
        bos_id=None if bos is None else tokenizer.convert_tokens_to_ids(bos),
        adds_bos=bos is not None,
        doubles_bos=False,
        placeholder_ids=(placeholder,),
    )


def renderer_of(tokenizer: Any, template_args: dict[str, Any] | None = None, **facts: Any) -> TextRenderer:
    return TextRenderer(tokenizer, vocabulary(tokenizer, **facts), template_args)


def char_renderer(**template_args: Any) -> TextRenderer:
    return renderer_of(char_tokenizer(), template_args, stops=("<|im_end|>",))


def sampled(tokenizer: Any, text: str) -> list[int]:
    """Ids an engine could have sampled for a text (special tokens included)."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def source_config(**values: Any) -> ComponentConfig:
    values = {"name": "toy", "task": "sum", "type": "jsonl", **values}
    return SOURCES.config_class(values["type"]).model_validate(values)


def write_lines(path: Path, *records: Any) -> Path:
    """A JSON Lines file; text is written as it is, so a line may be broken."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return path


def problems(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{number}+0=", "reference": str(number)} for number in range(count)]


def reader_of(
    config: Any, *, quarantine: Quarantine | None = None, seed: int = 0, renderer: Any = None, **rules: Any
) -> PromptReader:
    return build_reader(
        config,
        renderer=renderer or char_renderer(),
        rules=PromptRules(**{"max_prompt_tokens": 64, **rules}),
        quarantine=quarantine or Quarantine(),
        seed=seed,
    )


def stream_of(config: Any, *, seed: int = 0, **options: Any) -> PromptStream:
    return PromptStream(reader_of(config, seed=seed, **options), seed=seed)


def numbered(seed: int, count: int, start: int = 0) -> Iterator[dict[str, str]]:
    """A generator function for tests."""
    for number in range(start, start + count):
        yield {"prompt": f"{number}+0=", "reference": str(number)}


def write_parquet(path: Path, records: list[Any], *, row_group_size: int = 4) -> Path:
    """Records as one Parquet file; each gets the keys of all, as columns do."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = list(dict.fromkeys(key for record in records for key in record))
    table = pa.Table.from_pylist([{key: record.get(key) for key in keys} for record in records])
    pq.write_table(table, path, row_group_size=row_group_size)
    return path
