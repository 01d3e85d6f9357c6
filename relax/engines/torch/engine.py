"""The embedded engine: the async shell around the batcher, behind the core protocol `RolloutEngine`.

Called by the router, the weight service and evaluation. The event loop never computes: bursts of decode steps run on the
compute thread while there is work. Invariant: whatever happens in `load`, the engine serves exactly one whole version (WS5).
"""

import asyncio
import time
from typing import Any

import numpy as np

from relax.core.completion import Completion, Floats, GenerateInput, Sampling, Session
from relax.core.error import EngineError, InvariantError
from relax.core.protocol import Compute, Decode, EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Probe, WeightSet
from relax.engines.config import TorchEngineConfig
from relax.engines.refusal import RefusedError, check_base, check_media, checked_budget
from relax.engines.standing import Standing
from relax.engines.torch.batcher import Batcher, Result
from relax.engines.torch.encoder import Encoder
from relax.engines.torch.forward import Forward
from relax.engines.torch.invariance import check_invariance
from relax.engines.torch.request import Prefix, Request
from relax.engines.torch.sampler import Sampler
from relax.engines.torch.stop import StopStrings
from relax.model.family import Family
from relax.model.name import bind_tensors, published_tensors
from relax.model.vocabulary import Vocabulary

_EXACT_ROWS = 4
"""Rows of a linear layer are bit-equal for every batch of at least this many (FACTS, Determinism)."""


class TorchEngine:
    """`model` becomes the engine's own: its parameters are replaced at every load. It must not be the trainer's.

    `compute` stays the caller's to close; `decode`, which stop strings need, is called on it alone. An engine serves nothing
    before its first `load`, which needs no `pause`. Without a `family` it refuses media.
    """

    def __init__(
        self,
        config: TorchEngineConfig,
        model: Any,
        vocabulary: Vocabulary,
        compute: Compute,
        name: str,
        deterministic: bool = False,
        decode: Decode | None = None,
        family: Family | None = None,
    ) -> None:
        self._config = config
        self._model = model.eval()
        self._vocabulary = vocabulary
        self._compute = compute
        self._name = name
        self._deterministic = deterministic
        self._decode = decode
        self._family = family
        _check_allowed(family, vocabulary)
        min_rows = _EXACT_ROWS if deterministic else 1
        self._forward = Forward(model, min_rows, family)
        self.context = _context(config, model, min_rows)
        """Most tokens that a prompt and its completion can have together."""
        self._sampler = Sampler(vocabulary.allowed, self._forward.device)
        self._encoder = Encoder(
            model,
            family,
            max_tokens=config.kept_encoder_tokens,
            batch_tokens=config.prefill_encoder_tokens,
            exact=deterministic,
        )
        self._batcher = Batcher(
            self._forward,
            self._encoder,
            self._sampler,
            self._deliver,
            slots=config.slots,
            kv_tokens=config.kv_tokens or max(config.slots, min_rows) * self.context,
            prefill_tokens=config.prefill_tokens,
            exact=deterministic,
        )
        self._standing = Standing(name, config.slots)
        self._drive_task: asyncio.Task[None] | None = None

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        """Sample until a stop id, a stop string of the decoded text, or the budget. Cancelling the call frees its slot.

        Raises RefusedError (ContextError, StaleError) for what cannot be served, EngineError when the engine cannot serve.
        While the engine is paused the call waits for `resume`, which the weight service owes on every path (WS5).
        """
        version = self._standing.serving()
        check_base(session, version.number, self._name)
        budget = checked_budget(input, sampling, self.context, self._vocabulary.size)
        check_media(input, None if self._family is None else self._family.placeholders, self._name)
        request = Request(
            prompt=input.token_ids.tolist(),
            sampling=sampling,
            session=session,
            budget=budget,
            stop_ids=frozenset(sampling.stop_ids or self._vocabulary.stop_ids),
            stop_strings=self._stop_strings(sampling),
            shared=_shared_prompt(input, session),
            waiter=asyncio.get_running_loop().create_future(),
            media=input.media,
        )
        self._batcher.submit(request)
        self._ensure_driving()
        try:
            result: Completion = await request.waiter
            return result
        except asyncio.CancelledError:
            self._batcher.cancel(request)
            self._ensure_driving()
            raise

    async def pause(self, mode: LoadMode) -> None:
        """Stop at a token boundary; `drain` lets running requests end first. Cancelled or failing, the engine goes on.

        On a paused engine it only sets what the next load does with running requests; `abort` hands them back now.
        """
        self._standing.check_free("pause")
        self._standing.state = "pausing"
        try:
            self._batcher.admits = False
            self._batcher.interrupted = mode != "drain"
            if self._drive_task is not None:
                # Ends by itself: after one step, or when the running requests have used up their budgets.
                await asyncio.wait({self._drive_task})
            if mode == "abort":
                await self._compute.run(self._batcher.abort_running)
        except BaseException:
            self._reopen()
            raise
        self._standing.paused()
        self._standing.mode = mode

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        """Swap to `version`; on any error the old weights are bound again (WS3, WS5)."""
        async with self._standing.loading(version, reader) as weights:
            return await self._compute.run(self._swap, weights)

    async def resume(self) -> None:
        """Go on with whatever version is bound. An engine that is not paused goes on as it did."""
        self._standing.check_free("resume")
        self._reopen()

    async def status(self) -> EngineStatus:
        batcher = self._batcher
        return self._standing.status(batcher.running, batcher.waiting, batcher.sampled_tokens, self._compute.busy_s)

    @property
    def encoded_media(self) -> int:
        """Media that went through an encoder so far."""
        return self._encoder.encoded

    async def close(self) -> None:
        """Fail whatever still waits. Idempotent."""
        if self._standing.is_closed:
            return
        self._standing.state = "closed"
        self._batcher.interrupted = True
        if self._drive_task is not None:
            # It may wait for a turn that nobody grants any more. A burst under way ends on its thread, before what follows there.
            self._drive_task.cancel()
            await asyncio.wait({self._drive_task})
        await self._fail_all(f"engine {self._name} was closed")

    # --- device turns, on the compute thread between two bursts (DT) ---

    def offload(self) -> None:
        """Leave the device to others: weights go to the CPU's memory, running requests are prefilled again. On a CPU nothing moves."""
        if self._forward.device.type != "cpu":
            self._batcher.release()
            self._model.to("cpu")

    def onload(self) -> None:
        """Back onto the device that the engine was built on."""
        self._model.to(self._forward.device)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        if not sampling.stop:
            return None
        if self._decode is None:
            raise RefusedError(
                f"engine {self._name} was built without a decoder, so it cannot find the stop strings {list(sampling.stop)}"
            )
        return StopStrings(sampling.stop, self._decode)

    def _reopen(self) -> None:
        if self._standing.is_closed:
            return
        self._standing.state = "open"
        self._batcher.admits = True
        self._batcher.interrupted = False
        self._ensure_driving()

    def _ensure_driving(self) -> None:
        if self._standing.is_open and self._drive_task is None and self._batcher.has_work:
            self._drive_task = asyncio.create_task(self._drive(), name=f"engine {self._name}")

    async def _drive(self) -> None:
        """Runs bursts until there is nothing to do, the engine is paused, or the model fails; then ends."""
        try:
            while self._batcher.has_work and not self._batcher.interrupted:
                await self._compute.run(self._batcher.step, self._config.burst)
        except Exception as error:
            self._standing.failed = f"{type(error).__name__}: {error}"
            await self._fail_all(f"engine {self._name} failed: {self._standing.failed}")
        finally:
            self._drive_task = None

    async def _fail_all(self, reason: str) -> None:
        """On the compute thread, without a turn where the device is shared: nothing is computed, and there may be no turns any more."""
        run = getattr(self._compute, "run_aside", self._compute.run)
        await run(self._batcher.fail_all, reason)

    def _deliver(self, results: list[Result]) -> None:
        """On the compute thread: hand results over to the event loop at once, in the middle of a burst too."""
        if results:
            loop: asyncio.AbstractEventLoop = results[0][0].waiter.get_loop()
            loop.call_soon_threadsafe(_settle, results)

    def _swap(self, weights: WeightSet) -> LoadReport:
        """On the compute thread: bind, prove, prefill again; or put everything back."""
        old = published_tensors(self._model)
        started = time.perf_counter()
        try:
            bind_tensors(self._model, {name: value.to(self._forward.device) for name, value in weights.tensors.items()})
            if self._deterministic and self._standing.version is None:
                check_invariance(self._model, _EXACT_ROWS, self._vocabulary.size, self._family)
            logprobs = self._prove(weights.manifest.probe)
            swapped = time.perf_counter()
            tokens = self._batcher.switch(weights.manifest.version.number, keep=self._standing.mode == "keep")
        except BaseException:
            bind_tensors(self._model, old)
            self._batcher.forget()
            raise
        self._standing.version, self._standing.failed = weights.manifest.version, None
        return LoadReport(logprobs, swapped - started, time.perf_counter() - swapped, tokens)

    def _prove(self, probe: Probe | None) -> Floats | None:
        if probe is None:
            return None
        return self._forward.logprobs(probe.token_ids, probe.temperature, self._sampler.allowed)


def _context(config: TorchEngineConfig, model: Any, min_rows: int) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    bounds = [config.max_context_tokens, positions, config.kv_tokens and config.kv_tokens // min_rows]
    known = [bound for bound in bounds if bound]
    if not known:
        raise EngineError("the model names no longest context; set max_context_tokens of the engine")
    return int(min(known))


def _check_allowed(family: Family | None, vocabulary: Vocabulary) -> None:
    named = {} if family is None else family.placeholders
    sampled = sorted(modality for modality, token_id in named.items() if vocabulary.allowed[token_id])
    if sampled:
        raise InvariantError("MM4", f"the vocabulary lets the policy sample the placeholder of {', '.join(sampled)}")


def _shared_prompt(input: GenerateInput, session: Session) -> Prefix | None:
    if session.prefix is None:
        return None
    token_ids = np.asarray(input.token_ids, dtype=np.int32).tobytes()
    return session.prefix, token_ids, tuple(medium.key for medium in input.media)


def _settle(results: list[Result]) -> None:
    for request, result in results:
        future: asyncio.Future[Completion] = request.waiter
        if future.done():  # its caller was cancelled
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def build_torch_engine(
    config: TorchEngineConfig,
    *,
    model: Any,
    vocabulary: Vocabulary,
    compute: Compute,
    name: str,
    deterministic: bool,
    decode: Decode | None = None,
    family: Family | None = None,
    **others: object,
) -> TorchEngine:
    """The engine of a configuration node; `others` are what only other engines need."""
    return TorchEngine(config, model, vocabulary, compute, name, deterministic, decode, family)
