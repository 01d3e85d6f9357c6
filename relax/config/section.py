"""The plain sections of the configuration tree: one frozen class for each, with the rules that one section can check alone.

Read by every room through the node it is given. Names, defaults and meanings are declared here once: the reference page
is generated from these docstrings. `tree` holds the root and the rules between sections.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ByteSize, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from relax.config.autoscale import AutoscaleSection
from relax.config.base import ComponentConfig, Config, KeyPath, Violation, rule
from relax.config.component import component
from relax.config.control import ControlSection
from relax.config.media import MediaSection

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
"""Letters, digits, `_` and `-`: a name is a part of ids, metrics, file names and override paths."""
StopString: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]

Source: TypeAlias = Annotated[ComponentConfig, component("relax.data.table:SOURCES", common=("name", "task", "weight"))]
Optimizer: TypeAlias = Annotated[ComponentConfig, component("relax.training.table:OPTIMIZERS", default="adamw")]
Schedule: TypeAlias = Annotated[ComponentConfig, component("relax.training.table:SCHEDULES", default="constant")]


class SamplesSection(Config):
    """Trajectories kept whole, with their tokens, as Parquet files in the run's `samples` folder."""

    every: NonNegativeInt = 50
    """Steps between files: each holds every trajectory that ended at such a step; 0 writes none."""
    keep: PositiveInt = 20
    """Newest files that are kept."""


class TimelineSection(Config):
    """What each role did when, as `timeline.json` for Perfetto or Chrome."""

    every: NonNegativeInt = 20
    """Steps between writings of the file; 0 writes none and measures nothing."""
    steps: PositiveInt = 200
    """Newest steps that it covers."""


class RunSection(Config):
    """The run itself."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run; it lives in `<directory>/<name>`."""
    directory: str = "runs"
    """Folder that holds runs."""
    seed: NonNegativeInt = 0
    """Every random choice of the run derives from it."""
    deterministic: bool = False
    """Bit-identical runs: on-policy, one thread per role, padded engine batches (DE2)."""
    grace_s: NonNegativeFloat = 30.0
    """Seconds that SIGTERM leaves for a checkpoint before the run ends."""
    stall_s: PositiveFloat = 900.0
    """Seconds without a single event before the run stops as stalled, saying what everything waits for (RR7)."""
    samples: SamplesSection = Field(default_factory=SamplesSection)
    """Trajectories kept whole for looking at."""
    timeline: TimelineSection = Field(default_factory=TimelineSection)
    """What each role did when."""
    control: ControlSection = Field(default_factory=ControlSection)
    """Where the run can be controlled over HTTP while it is under way."""


class ModelSection(Config):
    """The policy that is trained."""

    path: str
    """The model: a Hugging Face folder or a `.gguf` file (relative to the working directory), a hub name (`org/name` or
    `org/name@revision`), or `package:name/file` for a file that an installed Python package carries."""
    source: Literal["auto", "directory", "hub", "gguf"] = "auto"
    """What `path` is; `auto` tells by what is there."""
    cache: str | None = None
    """Folder that keeps converted GGUF models; null: what RELAX_CACHE names, else `relax` in the user's cache folder."""
    tokenizer: str | None = None
    """Where the tokenizer comes from, in the forms of `path`; null: the model's own."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` starts from fresh weights, seeded by the run; only the model's configuration is read."""


class DataSection(Config):
    """What the policy is asked."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Data sources, each with a name, the task that judges it, and its weight in the mixture."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt goes to quarantine."""
    system_prompt: str | None = None
    """A system message before every prompt that has none."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template."""
    media: MediaSection | None = None
    """How images, sounds and videos are read; null: text only, and a record that holds one is refused."""
    curriculum: Annotated[ComponentConfig, component("relax.data.table:CURRICULA")] | None = None
    """How the weights of the sources change with the rewards; null: they do not."""
    accept_changes: bool = False
    """On resume, go on although the sources, their data or their weights are not those the run was started with: a changed
    source begins its next pass over the data as they are now. False refuses, and says what changed."""

    @rule
    def sources_have_different_names(self) -> Iterator[Violation]:
        yield from repeated_names("sources", self.sources)

    @rule
    def media_are_read_where_sources_have_them(self) -> Iterator[Violation]:
        for index, source in enumerate(self.sources):
            if self.media is None and getattr(source, "media_keys", None):
                yield (
                    ("sources", index, "media_keys"),
                    "names media, but data.media is not set, so none is read; set data.media: {}, or leave media_keys out",
                )


class TaskConfig(Config):
    """How trajectories of one task are made and judged."""

    env: Annotated[ComponentConfig, component("relax.tasks.table:ENVIRONMENTS", default="single_turn")] = (
        ComponentConfig(type="single_turn")
    )
    """The environment that answers the policy."""
    rewards: tuple[Annotated[ComponentConfig, component("relax.tasks.table:REWARDS")], ...] = ()
    """Judges of a trajectory; its reward is their weighted sum."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one attempt at a trajectory may take."""
    max_attempts: PositiveInt = 2
    """Attempts at a trajectory before it counts as failed."""
    on_failure: Literal["survivors", "drop"] = "survivors"
    """A failed trajectory leaves its group to the survivors, or ends the whole group."""
    min_survivors: PositiveInt = 2
    """Fewest survivors that are still trained; a group with fewer ends as failed."""


class FilterSection(Config):
    """How many groups one step may lose: filtered by the algorithm, or failed (LO5)."""

    max_per_step: PositiveInt | None = None
    """Groups that may end untrained while one step fills; null: sixteen times `groups_per_step`."""
    then: Literal["close", "stop"] = "close"
    """`close`: the step trains on what it has, as soon as nothing is due (ST4); three steps in a row without any group stop the
    run. `stop`: the run stops at once, with a checkpoint and the reasons."""


class StageConfig(Config):
    """One stage of training: an algorithm for a number of steps."""

    name: Name
    """Name of the stage."""
    steps: PositiveInt
    """Weight versions to publish in this stage."""
    groups_per_step: PositiveInt
    """Groups (prompts) that one step trains on."""
    algorithm: Annotated[ComponentConfig, component("relax.algorithms.table:ALGORITHMS", common=("group_size",))]
    """The loss, its advantages, and the number of siblings in a group."""
    sources: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Names of the data sources to use; null: all."""
    optimizer: Optimizer | None = None
    """Replaces `training.optimizer` in this stage."""
    schedule: Schedule | None = None
    """Replaces `training.schedule` in this stage."""
    max_staleness: NonNegativeInt | None = None
    """Replaces `rollout.max_staleness` in this stage; 0 is on-policy, null is unset."""
    filter: FilterSection = Field(default_factory=FilterSection)
    """How many groups a step may lose to the algorithm's filter and to failures."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the stage: what schedules count."""
        return int(getattr(self.algorithm, "count_updates", int)(self.steps))

    @rule
    def updates_fit_groups(self) -> Iterator[Violation]:
        updates = getattr(self.algorithm, "updates", 1)
        if updates > self.groups_per_step:
            yield (
                ("algorithm", "updates"),
                f"is {updates}, but a step has only {self.groups_per_step} groups to split; lower it, or raise groups_per_step",
            )


class SamplingSection(Config):
    """How the policy samples."""

    temperature: PositiveFloat = 1.0
    """Divides the logits; logprobs are of the tempered distribution (TK5)."""
    max_tokens: PositiveInt = 256
    """Most tokens of one completion."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegativeInt = 0
    """Samples from the k likeliest tokens; 0 is off."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=16)] = ()
    """Strings that end a completion, beside the tokenizer's own end. The token that completes one is kept and trained; the text that
    environments and rewards see ends before it."""

    @rule
    def stop_strings_are_whole_text(self) -> Iterator[Violation]:
        for index, text in enumerate(self.stop):
            if "\ufffd" in text:
                yield (
                    ("stop", index),
                    f"is {text!r}, which holds the sign that stands for half of a character; write whole characters",
                )


class RolloutSection(Config):
    """How samples are made, and how old they may be."""

    max_staleness: NonNegativeInt = 1
    """Most steps between the weights that sampled a token and the step that trains on it (ST1); 0 is synchronous."""
    over_age: Literal["wait", "mask", "requeue"] = "wait"
    """What happens to a group that is late: it is due, still runs, and the step could be filled without it (ST5). `wait`: the step
    waits. `mask`: it gets one step more, and its tokens over `max_staleness` are not trained. `requeue`: it is dropped and its
    prompt sampled again with other seeds."""
    max_requeues: NonNegativeInt = 2
    """Times that `over_age: requeue` may drop the same prompt; then the step waits for it."""
    oversample: NonNegativeInt = 0
    """Groups in flight beyond what steps can train: a step takes those that are ready first, and what comes too late for its
    last step ends as surplus."""
    on_load: Literal["recompute", "keep", "drain", "abort"] = "recompute"
    """What happens to running requests when an engine loads new weights (WS6)."""
    replicas: PositiveInt = 1
    """Engines that sample."""
    autoscale: AutoscaleSection | None = None
    """Adds and takes away engines by itself; null: `replicas` changes by hand only."""
    engine: Annotated[ComponentConfig, component("relax.engines.table:ENGINES", default="torch")] = ComponentConfig(
        type="torch"
    )
    """The inference engine."""
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    """Sampling settings of training."""
    max_context_tokens: PositiveInt | None = None
    """Most tokens of one history, prompt included; null: the prompt's and the completion's limits alone."""
    max_trajectory_tokens: PositiveInt | None = None
    """Most tokens that all turns of a trajectory may sample together; null: no such limit."""

    @rule
    def replicas_lie_within_autoscale(self) -> Iterator[Violation]:
        scale = self.autoscale
        if scale is not None and not scale.min <= self.replicas <= scale.max:
            yield (
                ("replicas",),
                f"is {self.replicas}, outside autoscale.min ({scale.min}) and autoscale.max ({scale.max}); begin within them",
            )


class BestSection(Config):
    """Which checkpoint is the best one."""

    metric: str
    """A metric of the run, such as `eval/heldout/reward`; a checkpoint has the last value known at or before its step."""
    mode: Literal["max", "min"] = "max"
    """Whether the highest or the lowest value is the best; the newest checkpoint wins a tie."""


class CheckpointSection(Config):
    """Checkpoints for people and for resuming."""

    every: PositiveInt = 100
    """Steps between checkpoints; one is always written at the end of a stage."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this are kept too; null: no such ones."""
    keep_best: BestSection | None = None
    """The best checkpoint by a metric is kept too; null: none is."""


class TrainingSection(Config):
    """How gradients are made and applied."""

    backend: Annotated[ComponentConfig, component("relax.training.table:BACKENDS", default="torch")] = ComponentConfig(
        type="torch"
    )
    """What computes gradients."""
    optimizer: Optimizer = ComponentConfig(type="adamw")
    """The optimizer, and its learning rate."""
    schedule: Schedule = ComponentConfig(type="constant")
    """The learning rate over the steps of a stage."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: not clipped."""
    microbatch_tokens: PositiveInt = 4096
    """Most tokens in one forward and backward pass."""
    microbatch_encoder_tokens: PositiveInt | None = None
    """Most tokens (patches, frames of sound) that encoders work through in one pass, each medium once; null: four times
    microbatch_tokens."""
    snapshot_every: NonNegativeInt = 1
    """Steps between snapshots, from which an interrupted run goes on: with 1 no published version is ever lost (WS1). 0: only
    where checkpoints are written. The steps since the last one are trained again."""
    max_nonfinite_steps: PositiveInt = 3
    """Steps with a non-finite loss or gradient before the run stops (LO6)."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """When checkpoints are written and how many are kept."""


class WeightsSection(Config):
    """How weight versions travel from the trainer to the engines."""

    transport: Literal["auto", "memory", "shared", "broadcast", "disk"] = "auto"
    """`memory`: trainer and engines in one process. `shared`: shared memory of one node. `disk`: safetensors files in the run directory,
    which every node must see. `auto`: the first of these that reaches an engine. `broadcast`: torch.distributed, in buckets, by ports
    that ask for no secret."""
    bucket_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(64 << 20)
    """Bytes of one bucket of a broadcast: a number, or a text such as `64MiB`."""
    keep: PositiveInt = 2
    """Newest versions that are kept; one that somebody holds is never deleted (WS7)."""
    probe_tolerance: PositiveFloat = 1e-4
    """Largest accepted difference of logprobs between trainer and engine after a load (WS4)."""


class BusSection(Config):
    """The TransferQueue: admission waits when it is full (TQ5)."""

    max_rows: Literal["auto"] | PositiveInt = "auto"
    """Most rows of admitted groups; `auto` is what the staleness bound needs."""
    max_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(2 << 30)
    """Most bytes of admitted groups: a number, or a text such as `512MiB` or `2GiB`."""
    journal: bool = True
    """Keep every event and row on the disk, in the run's `journal` folder, so that an interrupted run loses nothing (TQ8)."""


class EvalSet(Config):
    """One set of prompts to evaluate on."""

    name: Name
    """Name of the set in metrics."""
    source: Source | None = None
    """Where its prompts come from; null: `sources` says."""
    sources: tuple[Source, ...] = ()
    """Several sources whose prompts make one set; metrics then have a value for each of them too."""
    samples: PositiveInt = 1
    """Completions for each prompt."""
    k: tuple[PositiveInt, ...] = ()
    """Report pass@k for these k: the share of prompts that one of k completions would solve, estimated without bias from `samples`."""
    threshold: float = 1.0
    """Lowest reward that solves a prompt, for pass@k."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    max_records: PositiveInt | None = None
    """Prompts to use of each source; null: all."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one completion; null: as in training."""

    @property
    def source_nodes(self) -> tuple[tuple[KeyPath, ComponentConfig], ...]:
        """Its sources, each with its place in this node."""
        single = () if self.source is None else ((("source",), self.source),)
        return (*single, *((("sources", index), node) for index, node in enumerate(self.sources)))

    @rule
    def has_a_source(self) -> Iterator[Violation]:
        if self.source is None and not self.sources:
            yield ("source",), "is missing; name one data source here, or several under `sources`"
        if self.source is not None and self.sources:
            yield ("sources",), "is given beside `source`; move that one into the list"

    @rule
    def sources_have_different_names(self) -> Iterator[Violation]:
        yield from repeated_names("sources", self.sources)

    @rule
    def k_fits_the_samples(self) -> Iterator[Violation]:
        for index, k in enumerate(self.k):
            if k > self.samples:
                yield (
                    ("k", index),
                    f"is {k}, more than the {self.samples} samples of a prompt; raise `samples` to it, or leave it out",
                )


class EvalSection(Config):
    """Evaluation while training."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the start and the end of each stage that samples."""
    engine: Literal["own"] = "own"
    """`own` is a second engine that holds the evaluated version."""
    sets: tuple[EvalSet, ...] = ()
    """What to evaluate on."""

    @rule
    def sets_have_different_names(self) -> Iterator[Violation]:
        yield from repeated_names("sets", self.sets)


def repeated_names(key: str, nodes: Any) -> Iterator[Violation]:
    """One violation for each node of the list at `key` that repeats the `name` of an earlier one."""
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.name in first:
            yield (
                (key, index, "name"),
                f"{node.name!r} is also the name of item {first[node.name]} of this list; rename one",
            )
        first.setdefault(node.name, index)
