"""The protocols between rooms: small, structural, one contract-test suite each.

Rooms of floor 3 never import one another; they meet here. Everything `async` may be called through a handle and so across
processes: arguments and results are frozen dataclasses, ids, numbers, strings and read-only arrays.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from relax.core.batch import ForwardBackward, Measure, Shards, StepReport
from relax.core.completion import Completion, Floats, GenerateInput, Ints, Sampling, Session
from relax.core.message import Json, MediaPart, Message, Prompt, PromptKey
from relax.core.trajectory import EndReason, Score, Trajectory
from relax.core.version import Version
from relax.core.weight import LoadReport, Manifest, Probe, Tensor, WeightSet

T = TypeVar("T")

LoadMode: TypeAlias = Literal["recompute", "keep", "drain", "abort"]
"""What happens to running requests when new weights are loaded (WS6)."""

# --- engines ---------------------------------------------------------------------------------------------------------

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included; an engine calls it on its own thread to find stop strings."""


class Generate(Protocol):
    """What a task sees of inference."""

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion: ...


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`version` is what it serves now; `accepting` is false while paused or failed; the counts are requests."""

    name: str
    version: Version | None
    accepting: bool
    running: int
    waiting: int
    capacity: int
    failed: str | None = None
    sampled_tokens: int = 0
    busy_s: float = 0.0


class RolloutEngine(Generate, Protocol):
    """An inference engine. Only one `load` runs at a time; `generate` may be called at any moment."""

    async def pause(self, mode: LoadMode) -> None:
        """Stop decoding at a token boundary; `drain` waits for running requests, `abort` returns them as they are."""
        ...

    async def load(self, version: Version, reader: "WeightReader") -> LoadReport:
        """Swap to `version` while paused. On any error the old version stays (WS3, WS5)."""
        ...

    async def resume(self) -> None: ...

    async def status(self) -> EngineStatus: ...


# --- weights ---------------------------------------------------------------------------------------------------------


class WeightReader(Protocol):
    async def fetch(self, version: Version) -> WeightSet:
        """The tensors of a version, verified. Raises TransportError when it is gone or damaged."""
        ...


class WeightWriter(Protocol):
    async def publish(
        self, version: Version, tensors: Mapping[str, Tensor], probe: Probe | None = None
    ) -> Manifest: ...


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LossInput:
    """One padded micro-batch of B rows and T positions, as torch tensors on the backend's device.

    `logprobs_BT` carries gradients and is 0 off the mask; `entropy_BT` is present when the loss asked for it;
    `columns` holds the per-token columns the loss named, with 0 at padding. `choices_BTK` are the logprobs, with gradients, of the
    token ids that the column `choices` of a `ChoiceLoss` names; None where no row is there.
    """

    logprobs_BT: Tensor
    mask_BT: Tensor
    weights_BT: Tensor
    columns: Mapping[str, Tensor]
    entropy_BT: Tensor | None = None
    choices_BTK: Tensor | None = None


@dataclass(slots=True)
class LossOutput:
    """`loss` is the unnormalised weighted sum over masked tokens (a scalar with a graph, also when nothing is masked in)."""

    loss: Tensor
    measures: Mapping[str, Measure]


class LossFn(Protocol):
    """A pure function. `columns` are the sample columns it reads beside the logprobs; `needs_entropy` asks for entropies."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, batch: LossInput) -> LossOutput: ...


class ChoiceLoss(LossFn, Protocol):
    """A loss over more than the sampled token: the column int[T, K] that names other tokens at each position; None: none."""

    @property
    def choices(self) -> str | None: ...


class Captured(Protocol):
    """A backend's state between two steps, in CPU memory; training may go on while it is written."""

    def write(self, path: str) -> None:
        """Into folder `path`, on any thread. Raises OSError when the disk does not take it."""
        ...


class TrainBackend(Protocol):
    """Gradients. Synchronous: it is called on the compute thread of the role that owns it. Knows no algorithm."""

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: the number of lists that `shards` must hold."""
        ...

    def forward_backward(self, shards: Shards, loss: LossFn) -> ForwardBackward:
        """Accumulate unnormalised gradients of every micro-batch (LO2)."""
        ...

    def optim_step(self, normalizer: float) -> StepReport:
        """Scale the accumulated gradients by 1/normalizer, clip, step, advance the schedule, clear. 0 is a no-op (LO4)."""
        ...

    def logprobs(self, shards: Shards) -> list[list[list[Floats]]]:
        """Per replica, micro-batch and row: float32[T] under the current weights, 0 off the mask (TK5)."""
        ...

    def begin(self, optimizer: Any, schedule: Any, total_steps: int) -> None:
        """Start a stage: a fresh optimizer and learning-rate schedule from their configuration nodes."""
        ...

    def export(self) -> Mapping[str, Tensor]:
        """The live tensors under their published names; the caller copies before the next step."""
        ...

    def capture(self) -> Captured:
        """A copy of everything that `load` needs to go on bit for bit: model, optimizer, schedule, counters, random state."""
        ...

    def load(self, path: str) -> None:
        """Go on from what a capture wrote into folder `path`. Raises UserError when it does not fit."""
        ...


# --- algorithms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What a group-scope function sees: one entry per surviving sibling, in sibling order.

    `rewards` float64[G], `lengths` int64[G] sampled tokens, `truncated` bool[G].
    """

    rewards: Any
    lengths: Any
    truncated: Any


class AdvantageFn(Protocol):
    """Group-scope advantages: one float64 per survivor."""

    def __call__(self, outcome: GroupOutcome) -> Any: ...


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a completion: messages to append (none when it ended)."""

    messages: tuple[Message, ...] = ()
    done: EndReason | None = None
    info: Mapping[str, Json] | None = None


class Environment(Protocol):
    """One run of one sibling; single use."""

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        """The messages to show first (usually the prompt's own)."""
        ...

    async def step(self, reply: Message) -> Step: ...

    async def close(self) -> None: ...


class Reward(Protocol):
    """Judges one trajectory. Raises TaskError, or returns a Score with a failure, when it cannot."""

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score: ...


class GroupReward(Protocol):
    """Judges the siblings of a group against one another: one score per trajectory, in order."""

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]: ...


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """One usable line of a data set, already turned into a prompt's parts; `index` is its stable position in its source."""

    source: str
    index: int
    task: str
    messages: tuple[Message, ...]
    reference: Json = None
    metadata: Mapping[str, Json] | None = None


class Source(Protocol):
    """An endless, resumable stream of prompts: passes over records, each in a seeded order."""

    accepted: tuple[str, ...]
    """What `restore` found changed, where that is accepted (B5)."""

    def __iter__(self) -> Iterator[Prompt]: ...

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        """The rewards of a group that ended, for a source that learns from them; others change nothing.

        A pure change of state: equal sequences of `next` and `observe` calls give equal prompts."""
        ...

    def state(self) -> dict[str, Json]:
        """Where the next prompt comes from; JSON-ready, of bounded size, and cheap enough for every step."""
        ...

    def restore(self, state: Mapping[str, Json]) -> None: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rendered tokens, int32[T]; `parts` are the media that its placeholders stand for, in their order."""

    token_ids: Ints
    parts: tuple[MediaPart, ...] = ()


class Renderer(Protocol):
    """Owns tokenisation (TK1-TK6). Text from users and tools can never become special tokens (TK4)."""

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an assistant turn."""
        ...

    def encode(self, messages: Sequence[Message], generate: bool = True) -> Encoded:
        """A full conversation; with `generate`, opened for an assistant turn."""
        ...

    def extend(self, history: Sequence[Message], token_ids: Ints, messages: Sequence[Message]) -> Encoded | None:
        """The tokens to append after a sampled turn so that the whole equals a full render of `history` + `messages` (TK2).

        `history` ends with the reply that `token_ids` ends with. None when no suffix does that: the history branches.
        """
        ...

    def encode_reply(self, text: str) -> Ints:
        """The tokens, stop token included, that a policy would sample to say `text`; for supervised stages."""
        ...

    def decode(self, token_ids: Ints) -> str:
        """A completion's text, its stop token removed."""
        ...

    def is_stable(self, token_ids: Ints) -> bool:
        """Whether a completion's text encodes to the ids that were sampled; they are trained as sampled either way (TK1)."""
        ...


# --- bus -------------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A row or group that a consumer could take now; `ready_number` orders them by when they became complete."""

    id: str
    ready_number: int


class Sampler(Protocol):
    def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
        """Which candidates to lease now; may be none. Called inside the bus, so it must be quick and must not wait."""
        ...


class Storage(Protocol):
    """Keeps cells; knows nothing of leases."""

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> int:
        """Keep cells of rows; returns their bytes."""
        ...

    def get(self, row: str, columns: Sequence[str]) -> dict[str, Any]: ...

    def drop(self, row: str) -> None: ...


# --- runtime ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pool call may use before its process tree is killed."""

    time_s: float = 10.0
    memory_bytes: int = 1 << 30
    network: bool = False
    result_bytes: int = 1 << 20


class Pool(Protocol):
    async def run(self, function: Callable[..., T], *args: Any, limits: Limits) -> T:
        """Call a picklable function in a killable process. Raises LimitError when it was killed, TaskError when it raised."""
        ...


class Compute(Protocol):
    """One thread that owns a model. `busy_s` is the time spent inside calls (the idle metric is the rest)."""

    @property
    def busy_s(self) -> float: ...

    async def run(self, function: Callable[..., T], *args: Any) -> T: ...

    def close(self) -> None: ...


class Clock(Protocol):
    """Time for anything that decides; the event loop's own time in the services, virtual in simulation."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Handle(Protocol):
    """The callable face of a role or shared object, in this process or another."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    async def ping(self) -> bool: ...


class Launcher(Protocol):
    async def spawn(self, role: str, spec: Callable[[], Awaitable[Any]]) -> Handle: ...

    async def close(self) -> None: ...


# --- services --------------------------------------------------------------------------------------------------------


class Monitor(Protocol):
    """A tracker. It may be slow or broken: the caller isolates it (RR9)."""

    async def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None: ...

    async def close(self) -> None: ...
