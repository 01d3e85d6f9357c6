"""Configuration of data sources.

A source node says where the records lie, which task they belong to, and which of a record's keys hold what. Read by the config
loader through `relax.data.table`; loads without torch.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints

from relax.config.base import ComponentConfig, Config, Violation, rule
from relax.core.media import Modality

ReferenceType = Literal["text", "number", "json"]
Key = Annotated[str, StringConstraints(min_length=1)]
MAX_WEIGHT = 1e9
"""Keeps sums of weights finite and exact enough."""


class FieldsConfig(Config):
    """Keys of a preference record. Both make its reference {chosen, rejected}; one alone means nothing."""

    chosen: Key | None = None
    """Holds the better answer as text, or as the prompt's messages and the assistant's answer."""
    rejected: Key | None = None
    """Holds the worse answer, in the same form."""

    @rule
    def both_or_neither(self) -> Iterator[Violation]:
        for given, missing in (("chosen", "rejected"), ("rejected", "chosen")):
            if getattr(self, given) is not None and getattr(self, missing) is None:
                yield (missing,), f"is not set, but fields.{given} is; a preference needs both answers"


class SourceConfig(ComponentConfig):
    """What every source has. A record's other keys go to the prompt's metadata."""

    reference_optional: ClassVar[bool] = False
    """Whether records may have no reference although the source has a key for it."""

    name: str = Field(min_length=1)
    """Names the source in prompt keys, stages and quarantine; it is part of every seed."""
    task: str
    """Which of `tasks` its prompts belong to."""
    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT, allow_inf_nan=False)
    """Its share of the mixture, relative to the other sources; to leave a source out, name the others in a stage's `sources`."""
    shuffle: bool = True
    """A new seeded order in each pass; false keeps the order of the data set."""
    prompt_key: str = "prompt"
    """Holds the question as text, or a list of messages."""
    messages_key: str = "messages"
    """Holds a list of messages {role, content}; a record has either this or `prompt_key`."""
    reference_key: str | None = "reference"
    """Holds what rewards compare with; null when the task has no reference."""
    reference_type: ReferenceType = "text"
    """`text`: text, numbers become text; `number`: numbers, or text that is a number; `json`: anything but null."""
    media_keys: dict[Modality, Key] = Field(default_factory=dict)
    """Keys that hold lists of media for the placeholders `<image>`, `<audio>` and `<video>` in the text of a record, such as
    `{image: images}`. Without one, such words are text."""
    metadata_key: str = "extra_info"
    """Holds a mapping for the prompt's metadata; absent, null and NaN are an empty one."""
    fields: FieldsConfig = Field(default_factory=FieldsConfig)
    """Keys of preference records: with `chosen` and `rejected` the pair is the reference, in place of `reference_key`."""

    @property
    def preference(self) -> tuple[str, str] | None:
        """The keys of the chosen and the rejected answer, when the source holds preferences."""
        fields = self.fields
        return None if fields.chosen is None or fields.rejected is None else (fields.chosen, fields.rejected)

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """The keys that the reference is made of."""
        if self.preference is not None:
            return self.preference
        return () if self.reference_key is None else (self.reference_key,)

    @rule
    def every_modality_has_a_key_of_its_own(self) -> Iterator[Violation]:
        for modality, key in self.media_keys.items():
            others = [other for other, same in self.media_keys.items() if same == key and other < modality]
            if others:
                yield (
                    ("media_keys", modality),
                    f"is {key!r}, which holds {others[0]} too; a list holds media of one modality",
                )

    @rule
    def one_reference(self) -> Iterator[Violation]:
        usual = type(self).model_fields["reference_key"].default  # a run's own configuration names every key
        if self.preference and self.reference_key not in (None, usual):
            yield ("reference_key",), "is set, and so are fields.chosen and fields.rejected; a record has one reference"


class JsonlConfig(SourceConfig):
    """Records in JSON Lines files, or in `.json` files that hold one array."""

    type: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """A `.jsonl` or `.json` file, a folder of them, or a glob pattern; files are read in sorted order."""


class ColumnarConfig(SourceConfig):
    """What every source with columns has."""

    columns: tuple[Key, ...] | None = None
    """Columns to read for the metadata, beside those that the keys above name; null: all. Others are not read at all."""


class ParquetConfig(ColumnarConfig):
    """Records in Parquet files, read one row group at a time. A null in a row, or in a struct of it, is an absent key."""

    type: Literal["parquet"] = "parquet"
    path: str = Field(min_length=1)
    """A `.parquet` file, a folder of them, or a glob pattern; files are read in sorted order."""


class DatasetsConfig(ColumnarConfig):
    """Records of a Hugging Face data set, read by the `datasets` library without decoding media."""

    type: Literal["datasets"] = "datasets"
    path: str = Field(min_length=1)
    """A folder that `save_to_disk` wrote, a folder or file that `datasets.load_dataset` reads, or the name of one on the hub."""
    split: str | None = None
    """Which split; null when there is only one."""
    subset: str | None = None
    """Which configuration of a data set that has several (the `name` of `load_dataset`)."""
    data_files: tuple[Key, ...] | None = None
    """File names or patterns inside a folder; null: the library finds them."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub."""


class ReasoningGymConfig(SourceConfig):
    """Problems of one task of the reasoning-gym package, to be judged by the reward of that name."""

    reference_optional: ClassVar[bool] = True

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(min_length=1)
    """Name of the task, such as `leg_counting`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, beside its seed and size."""
    size: PositiveInt = 1000
    """How many problems; a pass visits each once."""
    seed: NonNegativeInt | None = None
    """Chooses the problems; null: the run's seed and the source's name. Other seeds give other problems."""
    reference_key: Literal["reference"] | None = "reference"
    """Fixed: the task's own answer."""
    metadata_key: Literal["extra_info"] = "extra_info"
    """Fixed: what the verifier needs is in the metadata under `reasoning_gym`."""


class GeneratorConfig(SourceConfig):
    """Records made by a Python generator function `f(seed, **args)`: a finite data set that depends on its arguments only."""

    type: Literal["generator"] = "generator"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function beside its seed."""


class ImportedSourceConfig(SourceConfig):
    """A data set class of the user's own, named by import path: called as `Thing(config, seed=...)`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Whatever that class needs."""


class LearnabilityConfig(ComponentConfig):
    """Draw more from sources whose prompts the policy answers sometimes, less from those it always or never answers."""

    type: Literal["learnability"] = "learnability"
    rate: float = Field(default=0.05, gt=0, le=1, allow_inf_nan=False)
    """Weight of the newest group in a source's running mean of learnability."""
    floor: float = Field(default=0.1, gt=0, le=1, allow_inf_nan=False)
    """Least share of its weight that a source keeps, so that it is seen again when the policy has changed."""
    low: float = Field(default=0.0, allow_inf_nan=False)
    """The reward of a failure; lower ones count as this."""
    high: float = Field(default=1.0, allow_inf_nan=False)
    """The reward of a success; higher ones count as this."""

    @rule
    def low_is_lower(self) -> Iterator[Violation]:
        if self.low >= self.high:
            yield ("low",), f"is {self.low}, but must be less than high, which is {self.high}"
