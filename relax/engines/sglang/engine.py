"""An engine that speaks to an SGLang server somebody else started, by its documented HTTP protocol, behind `RolloutEngine`.

There is no CPU build of SGLang, so this is tested against a server written from that protocol. The server must be this engine's alone.
A pause never pauses the server, which then could not answer the probe of a load: it aborts the engine's requests there, keeps their
tokens, and sends the rest as new prompts after `resume`. So every token is sampled from exactly the version stamped on it (WS6).
The server's logprobs are of the tempered distribution before top-p and top-k (TK5) unless it was started with
SGLANG_RETURN_ORIGINAL_LOGPROB, which the probe shows. Its seeds count only with `--enable-deterministic-inference`.
"""

import asyncio
import uuid
from dataclasses import replace
from typing import Any

from relax.core.completion import Completion, Floats, GenerateInput, Sampling, Session
from relax.core.error import EngineError, UserError
from relax.core.protocol import Clock, Compute, Decode, EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Probe, WeightSet
from relax.engines.config import SglangEngineConfig
from relax.engines.refusal import RefusedError, check_base, check_media, checked_budget
from relax.engines.sglang.answer import MislabelledError, Part
from relax.engines.sglang.entrance import Entrance
from relax.engines.sglang.server import AGAIN_S, RefusedLoadError, Server
from relax.engines.sglang.turn import Turn
from relax.engines.standing import Standing
from relax.model.vocabulary import Vocabulary


class SglangEngine:
    """`model` lends its config and the names of its tensors; it computes nothing. `compute` stays the caller's to close.

    An engine serves nothing before its first `load`, which needs no `pause`. It reads text only.
    """

    def __init__(
        self,
        config: SglangEngineConfig,
        model: Any,
        vocabulary: Vocabulary,
        compute: Compute,
        name: str,
        clock: Clock,
        decode: Decode | None = None,
        mark: str | None = None,
    ) -> None:
        """`mark`: see `Server`; None: one of its own."""
        self._config = config
        self._vocabulary = vocabulary
        self._compute = compute
        self._name = name
        self._clock = clock
        self._decode = decode
        mark = f".{uuid.uuid4().hex[:12]}" if mark is None else mark
        self._server = Server(config, model, vocabulary, compute, name, clock, mark)
        self.context = _context(config, model)
        """Most tokens that a prompt and its completion can have together."""
        self._standing = Standing(name, config.slots)
        self._proof: tuple[Probe, Floats] | None = None
        """The probe of the version held, and what the server answered."""
        self._entrance = Entrance(config.slots)
        self._calls: dict[str, asyncio.Task[Part]] = {}
        """The requests that are with the server, by their id there."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._sampled_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        """Sample until a stop id, a stop string of the decoded text, or the budget. Cancelling the call aborts it on the server.

        Raises RefusedError (ContextError, StaleError) for what cannot be served, EngineError for a server that is gone, slow or wrong.
        While the engine is paused the call waits for `resume`, which the weight service owes on every path (WS5).
        """
        check_base(session, self._standing.serving().number, self._name)
        budget = checked_budget(input, sampling, self.context, self._vocabulary.size)
        check_media(input, None, self._name)
        if sampling.stop and self._decode is None:
            raise RefusedError(
                f"engine {self._name} was built without a decoder, so it cannot find the stop strings {list(sampling.stop)}"
            )
        named = replace(sampling, stop_ids=sampling.stop_ids or self._vocabulary.stop_ids)
        turn = Turn(input.token_ids.tolist(), named, session, budget, self._decode)
        await self._entrance.enter()
        try:
            return await self._perform(turn)
        finally:
            self._entrance.leave()

    async def pause(self, mode: LoadMode) -> None:
        """Stop decoding; `drain` lets running requests end first. Cancelled or failing, the engine goes on.

        On a paused engine it only sets what the next load does with running requests; `abort` hands them back now.
        Raises UserError for `keep`: a server that keeps requests over a load can prove it only after they have gone on.
        """
        if mode == "keep":
            raise UserError(
                f"engine {self._name} cannot keep keys and values over a load: SGLang answers no probe while requests stand"
                " still; choose rollout.on_load: recompute, drain or abort"
            )
        self._standing.check_free("pause")
        self._standing.state, self._standing.mode = "pausing", mode
        self._entrance.shut()
        if mode == "abort":
            self._entrance.wake()
        try:
            await self._settle(mode)
        except BaseException:
            self._reopen()
            raise
        self._standing.paused()

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        """Have the server read `version` from the disk, and probe it; whoever called compares (WS4).

        When the server refuses, the old version stays if the probe still finds it; otherwise, and when it is not known what the
        server did, the engine has failed until its next load (WS3, WS5).
        """
        async with self._standing.loading(version, reader) as weights:
            started = self._clock.time()
            logprobs = await self._swap(weights)
            return LoadReport(logprobs, self._clock.time() - started)

    async def resume(self) -> None:
        """Go on with whatever version is loaded. An engine that is not paused goes on as it did."""
        self._standing.check_free("resume")
        self._reopen()

    async def status(self) -> EngineStatus:
        """What this engine knows; the server is not asked."""
        busy_s = self._busy_s + (0.0 if self._busy_since is None else self._clock.time() - self._busy_since)
        return self._standing.status(self._entrance.taken, self._entrance.waiting, self._sampled_tokens, busy_s)

    async def close(self) -> None:
        """Fail whatever still waits, and abort on the server what runs there. Idempotent."""
        if self._standing.is_closed:
            return
        self._standing.state = "closed"
        self._entrance.fail(EngineError(f"engine {self._name} was closed"))
        for rid, call in self._calls.items():
            call.cancel()
            self._abort_later(rid)
        while self._aborts:
            await asyncio.wait(self._aborts)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _perform(self, turn: Turn) -> Completion:
        while True:
            while self._stands_still():
                if self._standing.mode == "abort":
                    return turn.completion("abort")
                await self._entrance.park()
            version = self._standing.serving()
            check_base(turn.session, version.number, self._name)
            part = await self._ask(turn, version)
            if turn.sampling.stop:  # a decoder is called on the engine's own thread only
                ended = await self._compute.run(turn.add, part, version.number)
            else:
                ended = turn.add(part, version.number)
            self._sampled_tokens += len(part.token_ids)
            if ended is not None:
                return turn.completion(ended)
            if part.finish == "abort" and self._standing.is_open:
                return turn.completion("abort")  # by somebody else, or by a pause that was given up

    def _stands_still(self) -> bool:
        return self._standing.state == "paused" or (
            self._standing.state == "pausing" and self._standing.mode != "drain"
        )

    async def _ask(self, turn: Turn, version: Version) -> Part:
        """One request to the server. Left by a cancellation or without an answer, it is aborted there."""
        rid = uuid.uuid4().hex
        call = asyncio.create_task(self._server.sample(rid, turn, version), name=f"generate {rid}")
        self._calls[rid] = call
        self._count_busy()
        answered = False
        try:
            await asyncio.wait({call})
            if call.cancelled():
                raise EngineError(f"engine {self._name} was closed")
            part = call.result()
            answered = True
            return part
        except MislabelledError as error:
            self._standing.failed = str(error)
            raise
        finally:
            del self._calls[rid]
            self._count_busy()
            if not answered and not self._standing.is_closed:  # `close` has done it already
                call.cancel()
                self._abort_later(rid)

    def _abort_later(self, rid: str) -> None:
        """Nobody waits for this request any more: tell the server, without making the caller wait for that."""
        task = asyncio.create_task(self._abort(rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        try:
            await self._server.abort(rid)
        except EngineError as error:
            # A server that is gone runs nothing, and one that is there sees the closed connection; but it takes no more.
            if self._standing.is_open and not self._standing.is_loading:
                self._standing.failed = str(error)

    async def _settle(self, mode: LoadMode) -> None:
        """Return once no request moves. `drain` waits as long as the requests' own deadlines, the others for a call's."""
        try:
            async with asyncio.timeout(None if mode == "drain" else self._config.call_s):
                while self._entrance.moving:
                    self._entrance.changed.clear()
                    moved = asyncio.ensure_future(self._entrance.changed.wait())
                    try:
                        if mode != "drain":
                            await asyncio.gather(*(self._server.abort(rid) for rid in tuple(self._calls)))
                        await asyncio.wait({moved}, timeout=None if mode == "drain" else AGAIN_S)
                    finally:
                        moved.cancel()
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._name}: {self._entrance.moving} requests did not stop within {self._config.call_s:g} s"
            ) from error

    async def _swap(self, weights: WeightSet) -> Floats | None:
        """Files, server, probe. Until the server is told to load, nothing has changed."""
        version, probe = weights.manifest.version, weights.manifest.probe
        path = await self._server.prepare(weights)
        try:
            await self._server.load(path, version)
            logprobs = None if probe is None else await self._server.prove(probe, version)
        except BaseException as error:
            if not (isinstance(error, RefusedLoadError) and await self._still_holds()):
                self._standing.version, self._proof = None, None
                self._standing.failed = f"loading {version} ended with {error!r}"
            raise
        self._standing.version, self._standing.failed = version, None
        self._proof = None if probe is None or logprobs is None else (probe, logprobs)
        await self._server.forget_others(version)
        return logprobs

    async def _still_holds(self) -> bool:
        """Whether the server computes what it did under the version held: its word that it went back proves nothing."""
        if self._standing.version is None or self._proof is None:
            return False
        probe, before = self._proof
        try:
            now = await self._server.prove(probe, self._standing.version)
        except EngineError:
            return False
        return bool(abs(now - before).max(initial=0.0) <= probe.tolerance)

    def _count_busy(self) -> None:
        now = self._clock.time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if self._calls else None

    def _reopen(self) -> None:
        if not self._standing.is_closed:
            self._standing.state = "open"
            self._entrance.open()


def _context(config: SglangEngineConfig, model: Any) -> int:
    longest = config.max_context_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        raise UserError("the model names no longest context; set max_context_tokens of the engine")
    return int(longest)


def build_sglang_engine(
    config: SglangEngineConfig,
    *,
    model: Any,
    vocabulary: Vocabulary,
    compute: Compute,
    name: str,
    deterministic: bool,
    clock: Clock,
    decode: Decode | None = None,
    **others: object,
) -> SglangEngine:
    """The engine of a configuration node; `others` are what only other engines need. Raises UserError for what it cannot do."""
    if deterministic:
        raise UserError(
            "run.deterministic: true needs bits that depend on nothing but the run, which a server of somebody else's does not"
            " promise; choose rollout.engine.type: torch, or run.deterministic: false"
        )
    return SglangEngine(config, model, vocabulary, compute, name, clock, decode)
