"""From a configuration to the objects of a run on the local runtime: models, engines, backend, tasks, data.

Called by `run`. Every component gets its own node and explicit dependencies; nothing here decides anything while the run
is under way.
"""

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from relax.algorithms.table import ALGORITHMS
from relax.config.section import StageConfig
from relax.config.tree import RunConfig
from relax.core.algorithm import Algorithm
from relax.core.completion import Sampling, frozen
from relax.core.message import text_message
from relax.core.protocol import Compute, Decode, Pool, TrainBackend
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.engines.config import SglangEngineConfig
from relax.engines.router import Router
from relax.engines.table import ENGINES
from relax.model.device import find_device
from relax.model.family import Family, find_family
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.name import copy_tensors
from relax.model.source import ModelOrigin, model_folder
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.runtime.clock import LoopClock
from relax.runtime.compute import ComputeThread
from relax.runtime.config import LocalConfig
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.local import LocalLauncher
from relax.runtime.pool import build_pool
from relax.runtime.table import RUNTIMES
from relax.services.check import capacity, gate_policy, max_context_tokens, max_rows
from relax.services.controller import StageBounds
from relax.services.critic import first_policy_step
from relax.services.fleet import Fleet, update_timeouts
from relax.services.judge import Judges
from relax.services.plan import make_plan
from relax.services.play import EpisodeLimits
from relax.services.publisher import ProbeSource
from relax.services.recovery import StagePlace
from relax.services.resume import RunState
from relax.services.roles.evaluation import EvaluationSet
from relax.services.roles.rollout import RolloutSettings
from relax.services.roles.trainer import TrainerSettings
from relax.services.stage import StageSetup
from relax.services.supply import Supply
from relax.services.task import Task, make_task
from relax.services.timeline import Timeline
from relax.tasks.table import REWARDS
from relax.training.table import BACKENDS
from relax.weights.store import WeightStore
from relax.weights.transport import build_transport
from relax.weights.updater import EngineUpdater


@dataclass
class Assembly:
    """Builds each part once, when it is first asked for. `close` ends the compute threads and the process pool."""

    config: RunConfig
    quarantine: Quarantine
    clock: LoopClock = field(default_factory=LoopClock)
    timeline: Timeline = field(default_factory=lambda: Timeline(Path(), every=0))
    computes: dict[str, Compute] = field(default_factory=dict)
    owns_policy: bool = True
    """False in a process whose models all get their weights from somewhere else: no trainer lives here."""
    _engines: list[Any] = field(default_factory=list)

    # --- model facts ---

    @cached_property
    def _model_path(self) -> Path:
        model = self.config.model
        return model_folder(model.path, model.source, model.cache)

    @cached_property
    def _tokenizer_path(self) -> Path:
        model = self.config.model
        return self._model_path if model.tokenizer is None else model_folder(model.tokenizer, cache=model.cache)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer, load_model_config(self._model_path))

    @cached_property
    def renderer(self) -> TextRenderer:
        return TextRenderer(self._tokenizer, self.vocabulary, self.config.data.chat_template_args, self.family)

    @cached_property
    def family(self) -> Family | None:
        """What is particular to a model that reads media; None for one that reads text only, or where no media are read."""
        if self.config.data.media is None:
            return None
        return find_family(load_model_config(self._model_path), self._model_path, self._tokenizer)

    @cached_property
    def _model(self) -> Any:
        model = self.config.model
        return load_model(self._model_path, model.weights, model.dtype, self.config.run.seed)

    @property
    def limits(self) -> EpisodeLimits:
        rollout = self.config.rollout
        return EpisodeLimits(
            self.config.run.seed,
            max_context_tokens(self.config),
            self.vocabulary.allowed,
            rollout.max_trajectory_tokens,
        )

    @property
    def slots(self) -> int:
        """Requests that one engine runs at a time."""
        return self.config.rollout.engine.slots  # type: ignore[attr-defined, no-any-return]

    # --- threads and processes ---

    @cached_property
    def _launcher(self) -> LocalLauncher:
        runtime = self.config.runtime
        if not isinstance(runtime, LocalConfig):
            return LocalLauncher()  # roles of one host meet as plain objects, on every runtime
        launcher: LocalLauncher = RUNTIMES.component(runtime.type)(runtime, seed=self.config.run.seed)
        return launcher

    def wrap(self, name: str, target: object) -> object:
        """What roles get for a shared object: itself, or in strict mode a proxy that copies, freezes and reorders calls."""
        return self._launcher.wrap(name, self.timeline.wrap(name, target))

    def compute(self, name: str) -> Compute:
        """The compute thread of a model-owning role."""
        if name not in self.computes:
            thread = ComputeThread(name, self.config.runtime.threads_per_role)  # type: ignore[attr-defined]
            self.computes[name] = self.sharing.compute(name, self.timeline.measured_compute(name, thread))
        return self.computes[name]

    @cached_property
    def sharing(self) -> SharedDevices:
        """Which roles of this process share a device with others."""
        runtime = self.config.runtime
        return SharedDevices(runtime.devices, DeviceTurns(self.clock, runtime.min_turn_s))  # type: ignore[attr-defined]

    @cached_property
    def pool(self) -> Pool:
        return build_pool(self.config.runtime)  # type: ignore[arg-type]

    async def check_pool(self) -> None:
        """Raises UserError when a reward needs the process pool and this machine cannot isolate its processes (SE3)."""
        rewards = [reward for task in self.config.tasks.values() for reward in task.rewards]
        if any(getattr(reward, "uses_pool", True) for reward in rewards):
            await self.pool.check()  # type: ignore[attr-defined]
        await self.supply.check()

    async def close(self) -> None:
        """Idempotent; called on every path out of a run. Engines end before the threads that they compute on."""
        for engine in self._engines:
            await engine.close()
        if "judges" in self.__dict__:
            await self.judges.close()
        await self.sharing.close()
        for compute in self.computes.values():
            compute.close()
        self.computes.clear()
        if "supply" in self.__dict__:
            await self.supply.close()
        if "pool" in self.__dict__:
            await self.pool.close()  # type: ignore[attr-defined]

    # --- training ---

    @cached_property
    def backend(self) -> TrainBackend:
        backend = self.make_backend(self._model)
        self.sharing.add("trainer", backend)
        return backend

    def copy_model(self) -> Any:
        """A second copy of the policy as it is now; without the trainer in this process, a model of the same kind."""
        if not self.owns_policy:
            return self._fresh_model(getattr(self.config.training.backend, "device", "cpu"))
        backend = self.backend  # first: it puts the model on its device, and engines follow it there
        model = copy.deepcopy(self._model)
        copy_tensors(backend.export(), model)  # what it trains may be an adapter beside the model
        return model

    def _fresh_model(self, device: str) -> Any:
        model = self.config.model
        return load_model(self._model_path, model.weights, model.dtype, self.config.run.seed).to(find_device(device))

    @property
    def _model_origin(self) -> ModelOrigin:
        model = self.config.model
        return ModelOrigin(model.path, model.source, model.cache, model.weights, self.config.run.seed)

    def make_backend(self, model: Any, **others: Any) -> TrainBackend:
        """The configured backend around a model; `others` replace what is said of the policy, for a model that is not its kind."""
        config = self.config
        parts = {
            "config": config.training.backend,
            "vocabulary": self.vocabulary,
            "temperature": config.rollout.sampling.temperature,
            "grad_clip": config.training.grad_clip,
            "deterministic": config.run.deterministic,
            "tokenizer_path": self._tokenizer_path,
            "processor_path": self._model_path,
            "base": self._model_origin,
            "family": self.family,
        }
        backend: TrainBackend = BACKENDS.component(config.training.backend.type)(model=model, **{**parts, **others})
        return backend

    @cached_property
    def store(self) -> WeightStore:
        weights, dtype = self.config.weights, self.config.model.dtype
        return build_transport(weights.transport, weights.keep, dtype, self.compute("weights"))

    @property
    def probe(self) -> ProbeSource:
        """A short prompt of the policy's own tokens."""
        token_ids = self.renderer.encode([text_message("user", "2+3=5 0123456789")]).token_ids
        return ProbeSource(
            frozen(np.array(token_ids, dtype=np.int32)),
            self.config.weights.probe_tolerance,
            self.config.rollout.sampling.temperature,
        )

    # --- engines ---

    def engine(self, name: str, node: Any = None, role: str = "") -> Any:
        """By `rollout.engine` or `node`, with a model and a thread of its own, on the device of `role`. It has yet to load a version."""
        node = node or self.config.rollout.engine
        if self.config.rollout.max_context_tokens is not None:
            node = node.model_copy(update={"max_context_tokens": self.config.rollout.max_context_tokens})
        engine = ENGINES.component(node.type)(
            node,
            # A server elsewhere computes: of the model here only names and shapes are read.
            model=self._fresh_model("cpu") if isinstance(node, SglangEngineConfig) else self.copy_model(),
            vocabulary=self.vocabulary,
            compute=self.compute(role or name),
            name=name,
            deterministic=self.config.run.deterministic,
            clock=self.clock,
            seed=self.config.run.seed,
            family=self.family,
            decode=self._decoder() if self.config.rollout.sampling.stop else None,
        )
        self._engines.append(engine)
        self.sharing.add(role or name, engine)
        return engine

    def _decoder(self) -> Decode:
        """Ids to text, for one engine's thread: a tokenizer is not shared between threads."""
        decode = load_tokenizer(self._tokenizer_path).decode
        return lambda ids: str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def fleet(self) -> Fleet:
        router = Router(self.clock)
        engines = {f"engine-{i}": self.engine(f"engine-{i}") for i in range(self.config.rollout.replicas)}
        fleet = Fleet(router, engines)
        for name, engine in engines.items():
            router.attach(name, engine, capacity=self.slots)
        fleet.updaters = [
            EngineUpdater(
                name,
                engine,
                self.store,
                mode=self.config.rollout.on_load,
                on_live=fleet.on_live,
                on_failed=fleet.on_failed,
                timeouts=update_timeouts(self.sharing.is_shared(name), self.config.rollout.engine),
            )
            for name, engine in engines.items()
        ]
        return fleet

    # --- data and tasks ---

    @cached_property
    def supply(self) -> Supply:
        """What the run reads."""
        return Supply(self.config, self.quarantine, self.renderer, self.family)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        return {name: self._task(name) for name in self.config.tasks}

    def _task(self, name: str) -> Task:
        return make_task(name, self.config.tasks[name], self._reward)

    def _reward(self, label: str, node: Any) -> Any:
        judge = {} if getattr(node, "judge", None) is None else {"judge": self.judges.door(node.judge)}
        return self.timeline.wrap(f"reward/{label}", REWARDS.component(node.type)(node, pool=self.pool, **judge))

    @cached_property
    def judges(self) -> Judges:
        return Judges(self.config, self.compute, self.clock, self.wrap)

    def evaluation_sets(self) -> list[EvaluationSet]:
        return [
            EvaluationSet(
                node.name,
                [p for _, source in node.source_nodes for p in self.supply.prompts(source, node.max_records)],
                node.samples,
                self.sampling(node.temperature, node.max_tokens),
                node.k,
                node.threshold,
            )
            for node in self.config.eval.sets
        ]

    def sampling(self, temperature: float | None = None, max_tokens: int | None = None) -> Sampling:
        """The run's sampling settings, with some replaced (an evaluation set has its own)."""
        node = self.config.rollout.sampling
        return Sampling(
            temperature=node.temperature if temperature is None else temperature,
            max_tokens=max_tokens or node.max_tokens,
            top_p=node.top_p,
            top_k=node.top_k,
            stop_ids=tuple(self.renderer.stops),
            stop=tuple(node.stop),
        )

    # --- stages ---

    def algorithm(self, stage: StageConfig) -> Algorithm:
        algorithm: Algorithm = ALGORITHMS.component(stage.algorithm.type)(stage.algorithm)
        return algorithm

    async def begin_optimizer(self, index: int) -> None:
        """A fresh optimizer and schedule for stage `index`; a schedule counts optimizer updates (B7)."""
        stage = self.config.stages[index]
        nodes = self.config.optimizer_of(stage), self.config.schedule_of(stage)
        await self.compute("trainer").run(self.backend.begin, *nodes, stage.num_updates)

    def place(self, index: int, state: RunState | None) -> StagePlace:
        """Stage `index` for recovery: with its cursor if it is the one that `state` was taken in, else fresh."""
        stage = self.config.stages[index]
        source = self.supply.source(stage)
        if state is not None and index == state.stage:
            source.restore(state.source)
        return StagePlace(stage.name, max_rows(self.config, stage), int(self.config.bus.max_bytes), source)

    def stage(self, index: int, first: int, end: int) -> StageSetup:
        """The setup of stage `index`, whose remaining steps are `first .. end - 1`."""
        config = self.config
        node = config.stages[index]
        algorithm = self.algorithm(node)
        plan = make_plan(algorithm, reads_media=config.data.media is not None)
        staleness = config.max_staleness_of(node)
        return StageSetup(
            bounds=StageBounds(
                node.name,
                first,
                end,
                node.groups_per_step,
                staleness,
                capacity(config, node).size,
                max_lost=node.filter.max_per_step or 16 * node.groups_per_step,
                stops_when_lost=node.filter.then == "stop",
                policy=gate_policy(config, node, plan.samples),
                max_nonfinite_steps=config.training.max_nonfinite_steps,
            ),
            plan=plan,
            algorithm=algorithm,
            rollout=RolloutSettings(
                algorithm.group_size,
                self.sampling(),
                self.limits,
                concurrency=max(1, self.slots * config.rollout.replicas * 5 // 4),
            ),
            trainer=TrainerSettings(
                config.training.microbatch_tokens,
                staleness,
                in_order=config.run.deterministic,
                masks_over_age=config.rollout.over_age == "mask",
                microbatch_encoder_tokens=config.training.microbatch_encoder_tokens,
                seed=config.run.seed,
                policy_from=first_policy_step(config, index, algorithm),
                whole_steps=self.sharing.is_shared("trainer"),
            ),
            max_rows=max_rows(config, node),
            max_bytes=int(config.bus.max_bytes),
            judges_groups=any(
                getattr(r, "judges_groups", False) for task in config.tasks.values() for r in task.rewards
            ),
        )
