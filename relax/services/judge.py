"""The models that judge: for each of `judges` engines of its own behind a router, and the door through which rewards ask it.

Built by the assembly. A judge never learns, so its engines load once, what is in its folder. In a process where no engine of a judge
lives, `elsewhere` says who answers instead: a reward does not know the difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from relax.config.judge import JudgeSection
from relax.config.tree import RunConfig
from relax.core.completion import Sampling
from relax.core.protocol import Clock, Compute, Decode, Generate, RolloutEngine
from relax.core.version import Version
from relax.core.weight import Manifest, WeightSet
from relax.data.renderer import TextRenderer
from relax.engines.router import Router
from relax.engines.table import ENGINES
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.name import published_tensors, tensor_specs
from relax.model.source import model_folder
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.tasks.judge_engine import JudgeEngine

FIRST = Version(0, 0)


class OwnWeights:
    """Core's `WeightReader` of a model that never changes: an engine is given what its model already holds."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def fetch(self, version: Version) -> WeightSet:
        tensors = published_tensors(self._model)
        return WeightSet(Manifest(version, tensor_specs(tensors), ""), tensors)


@dataclass
class JudgeModel:
    """The facts of one judge, each read when it is first asked for."""

    node: JudgeSection

    @cached_property
    def path(self) -> Path:
        return model_folder(self.node.model.path, self.node.model.source, self.node.model.cache)

    @cached_property
    def _tokenizer_path(self) -> Path:
        model = self.node.model
        return self.path if model.tokenizer is None else model_folder(model.tokenizer, cache=model.cache)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer, load_model_config(self.path))

    @cached_property
    def renderer(self) -> TextRenderer:
        return TextRenderer(self._tokenizer, self.vocabulary, self.node.chat_template_args)

    @property
    def sampling(self) -> Sampling:
        node = self.node.sampling
        stops = tuple(self.renderer.stops)
        return Sampling(node.temperature, node.max_tokens, node.top_p, node.top_k, stops, tuple(node.stop))

    @property
    def slots(self) -> int:
        """Requests that one engine runs at a time."""
        return self.node.engine.slots  # type: ignore[attr-defined, no-any-return]

    def load(self, device: str, seed: int) -> Any:
        """The model, on `device` (`auto`: CUDA where there is one)."""
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        model = self.node.model
        return load_model(self.path, model.weights, model.dtype, seed).requires_grad_(False).to(chosen)

    def decoder(self) -> Decode | None:
        """Ids to text, for one engine's thread; None where no stop string needs it."""
        if not self.node.sampling.stop:
            return None
        decode = load_tokenizer(self._tokenizer_path).decode
        return lambda ids: str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass
class Judges:
    """Every judge of a run. `open` starts engines, `door` gives what a reward asks through."""

    config: RunConfig
    compute: Callable[[str], Compute]
    clock: Clock
    wrap: Callable[[str, object], object] = lambda name, target: target
    elsewhere: dict[str, Generate] = field(default_factory=dict)
    _models: dict[str, JudgeModel] = field(default_factory=dict)
    _routers: dict[str, Router] = field(default_factory=dict)
    _doors: dict[str, JudgeEngine] = field(default_factory=dict)
    _engines: list[Any] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """The judges that some reward names."""
        asked = [getattr(reward, "judge", None) for task in self.config.tasks.values() for reward in task.rewards]
        return tuple(name for name in self.config.judges if name in asked)

    def door(self, name: str) -> JudgeEngine:
        """What rewards ask the judge through; one for all of them, so that together they keep within its places."""
        if name not in self._doors:
            model, generate = self._model(name), self.elsewhere.get(name) or self.router(name)
            places = model.slots * model.node.replicas
            wrapped: Any = self.wrap(f"judge/{name}", generate)
            seed = self.config.run.seed
            self._doors[name] = JudgeEngine(name, model.renderer, wrapped, model.sampling, seed, places)
        return self._doors[name]

    def router(self, name: str) -> Router:
        """The `Generate` of a judge whose engines live here; requests wait until one is open."""
        if name not in self._routers:
            self._routers[name] = Router(self.clock)
        return self._routers[name]

    async def open(self, names: Sequence[str]) -> None:
        """Start the engines of these judges: each loads its model and takes requests from then on."""
        for name in names:
            for index in range(self.config.judges[name].replicas):
                await self._open_engine(name, f"judge-{name}-{index}")

    async def close(self) -> None:
        """Idempotent; engines end before the threads that they compute on."""
        for engine in self._engines:
            await engine.close()
        self._engines.clear()

    async def _open_engine(self, name: str, engine_name: str) -> None:
        model, compute, config = self._model(name), self.compute(engine_name), self.config
        loaded = await compute.run(model.load, getattr(config.training.backend, "device", "cpu"), config.run.seed)
        node = model.node.engine
        if model.node.max_context_tokens is not None:
            node = node.model_copy(update={"max_context_tokens": model.node.max_context_tokens})
        engine: RolloutEngine = ENGINES.component(node.type)(
            node,
            model=loaded,
            vocabulary=model.vocabulary,
            compute=compute,
            name=engine_name,
            deterministic=config.run.deterministic,
            clock=self.clock,
            seed=config.run.seed,
            family=None,
            decode=model.decoder(),
        )
        self._engines.append(engine)
        await engine.load(FIRST, OwnWeights(loaded))
        router = self.router(name)
        router.attach(engine_name, engine, capacity=model.slots)
        router.set_live(engine_name, FIRST.number)

    def _model(self, name: str) -> JudgeModel:
        if name not in self._models:
            self._models[name] = JudgeModel(self.config.judges[name])
        return self._models[name]
