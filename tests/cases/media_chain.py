"""The whole way of a medium in one object, as a run joins it: record, `prepare`, `encode`, `load`, with the tiny models of the recipes.

Used by the cases of media. Nothing in it stands in for anything but the processes of the pool, unless a test asks for those too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.media import MediaSection
from relax.core.media import Medium, pack_media
from relax.core.message import MediaPart, Message, Prompt, PromptKey, TextPart
from relax.core.protocol import Encoded
from relax.data.media.access import MediaAccess
from relax.data.media.cache import FeatureCache
from relax.data.media.origin import Origins
from relax.data.media.prepare import PromptPreparer
from relax.data.media.store import MediaStore
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptReader, PromptRules
from relax.model.family import Family, find_family
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.vocabulary import Vocabulary, read_vocabulary
from tests.data.media_fake import ThreadPool
from tests.data.toy import source_config

MODELS = Path(__file__).parents[2] / "recipes" / "models"
OMNI, SIGHT = "qwen3-omni-tiny", "qwen3-vl-tiny"
KEYS = {"image": "images", "audio": "audios", "video": "videos"}


@dataclass(frozen=True)
class ModelFacts:
    """What a run reads of a model's folder before it builds the model."""

    tokenizer: Any
    vocabulary: Vocabulary
    family: Family


@cache
def facts_of(name: str = OMNI) -> ModelFacts:
    folder = MODELS / name
    config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    family = find_family(config, folder, tokenizer)
    assert family is not None
    return ModelFacts(tokenizer, read_vocabulary(tokenizer, config), family)


@cache
def model_of(name: str = OMNI) -> Any:
    return load_model(MODELS / name, "random", "float32", 0).eval()


class Given:
    """A data set in memory, which gives the same objects each time it is read."""

    digest = "given"

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> Any:
        return self.records[index]

    def location(self, index: int) -> str | None:
        return None


class NoPool:
    """A pool that must not be asked to decode."""

    async def run(self, function: Callable[..., Any], *args: Any, limits: Any) -> Any:
        names = [name for name, _ in args[0]] if function.__name__ == "run_many" else [function.__name__]
        assert "decode" not in names, "this medium was decoded before"
        return await ThreadPool().run(function, *args, limits=limits)


class Chain:
    """The data room of one run. Where media may lie is `folder`; `cache` names a folder of features from other runs."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str = OMNI,
        pool: Any = None,
        cache: Path | None = None,
        max_prompt_tokens: int = 20_000,
        template: str | None = None,
        template_args: dict[str, Any] | None = None,
        **section: Any,
    ) -> None:
        facts = facts_of(model)
        tokenizer = facts.tokenizer
        if template is not None:
            tokenizer = load_tokenizer(MODELS / model)
            tokenizer.chat_template = template
        self.tokenizer, self.vocabulary, self.family = tokenizer, facts.vocabulary, facts.family
        values = {"roots": [str(folder)], **section}
        self.section = MediaSection.model_validate({key: one for key, one in values.items() if one is not None})
        self.origins = Origins(has_roots=bool(self.section.roots))
        self.rules = PromptRules(max_prompt_tokens, media=self.origins)
        self._log = folder / "quarantine.jsonl"
        self.quarantine = Quarantine(self._log)
        self.pool = ThreadPool() if pool is None else pool
        kept = None if cache is None else FeatureCache(cache, 1 << 30)
        access = MediaAccess(self.section, self.origins)
        self.store = MediaStore(self.section, self.family, self.pool, access, kept)
        self.renderer = TextRenderer(self.tokenizer, self.vocabulary, template_args, self.family)
        self.preparer = PromptPreparer(self.store, self.renderer, self.rules, self.quarantine)

    def prompts(self, *records: Any, **config: Any) -> list[Prompt | None]:
        """The records as prompts; None for one that is in the quarantine now."""
        dataset = Given(records)
        values = {"type": "generator", "function": "a:b", "reference_key": None, "media_keys": KEYS, **config}
        source = source_config(**values)
        self.origins.register(dataset, source)
        reader = PromptReader(dataset, source, self.renderer, self.rules, self.quarantine)
        return [reader.read(index, 0) for index in range(len(records))]

    async def row(self, record: Any, **config: Any) -> tuple[Prompt, Encoded, tuple[Medium, ...]]:
        """One record: its prompt with every medium looked at, its tokens and its features."""
        (prompt,) = self.prompts(record, **config)
        assert prompt is not None, self.refused()
        prepared = await self.preparer.prepare(prompt)
        encoded = self.renderer.encode(prepared.messages)
        return prepared, encoded, await self.preparer.load(encoded.parts)

    def refused(self) -> list[str]:
        """The reasons in the quarantine, in order."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line)["reason"] for line in lines]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, special ones included."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def counts(self, token_ids: Any) -> dict[str, int]:
        """How many tokens stand for each modality."""
        return {one: int((np.asarray(token_ids) == id_).sum()) for one, id_ in self.family.placeholders.items()}


def features(media: Sequence[Medium]) -> dict[str, int]:
    """How many features the encoders give for each modality of a model that sees and hears."""
    return {
        modality: sum(medium.num_tokens for medium in media if medium.modality == modality)
        for modality in ("image", "audio", "video")
    }


def bits(media: Sequence[Medium]) -> list[bytes]:
    """Each medium as the bytes that carry it, so that equal means equal to the last bit."""
    return [pack_media([medium]) for medium in media]


def asked(*parts: str | MediaPart) -> Prompt:
    """A prompt of one user's message."""
    message = Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))
    return Prompt(PromptKey("toy", 0, 0), "task", (message,))
