"""The scheduler of the embedded engine: a waiting queue, a rectangle of running requests, one decode step after another.

Synchronous; everything but `submit`, `cancel` and the plain counters runs on one compute thread, called by the engine.
Running requests are rows 0..n-1 without holes. Invariant: allocated positions plus kept prefixes never exceed `kv_tokens`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from relax.core.completion import Completion
from relax.core.error import EngineError
from relax.core.media import Medium
from relax.engines.random import uniforms
from relax.engines.refusal import StaleError
from relax.engines.torch.encoder import Encoder
from relax.engines.torch.forward import Forward, Placement
from relax.engines.torch.prefix import PrefixStore
from relax.engines.torch.request import Prefix, Request
from relax.engines.torch.sampler import Sampler

Result = tuple[Request, Completion | Exception]
Deliver = Callable[[list[Result]], None]
"""Hands results to whoever waits for them; called on the compute thread, so it must not block.

Called once per decode step, not once per result: each call may cost a switch to the event loop's thread.
"""

_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("counter", np.uint64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("last", np.int64),
        ("length", np.int64),
        ("delta", np.float64),
    ]
)
_COLUMN_STEP = 64
"""Allocated columns are rounded up to this where the budget allows."""


class Batcher:
    """`exact` gives up speed so that bits depend on nothing but a request itself (DE2): prompts of one length per prefill,
    and interrupted requests start again."""

    def __init__(
        self,
        forward: Forward,
        encoder: Encoder,
        sampler: Sampler,
        deliver: Deliver,
        *,
        slots: int,
        kv_tokens: int,
        prefill_tokens: int,
        exact: bool = False,
    ) -> None:
        self._forward = forward
        self._encoder = encoder
        self._sampler = sampler
        self._deliver = deliver
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._prefill_tokens = prefill_tokens
        self._exact = exact
        self._prefixes = PrefixStore(kv_tokens // 4, slots)
        self._inbox: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows = np.zeros(slots, dtype=_ROW)
        self._sweep = False
        self.version = -1
        self.admits = True
        """False while running requests drain."""
        self.interrupted = False
        """Set from outside to end `step` at the next token boundary."""
        self.sampled_tokens = 0
        self.prefilled_tokens = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._inbox)

    @property
    def kv_tokens(self) -> int:
        """Positions held now: the rectangle and the kept prefixes."""
        return self._forward.cache.tokens + self._prefixes.tokens

    @property
    def has_work(self) -> bool:
        return bool(self._running) or self._sweep or (self.admits and self.waiting > 0)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next decode step. From any thread."""
        self._inbox.append(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request any more; its row is free after the next decode step. From any thread."""
        request.cancelled = True
        self._sweep = True

    def step(self, max_steps: int) -> None:
        """Up to `max_steps` decode steps; requests join and leave at each."""
        for _ in range(max_steps):
            self._remove_cancelled()
            if self.admits:
                self._admit()
            if not self._running:
                return
            self._prefill()
            if self._running:
                self._decode()
            if self.interrupted:
                return

    # --- new weights -------------------------------------------------------------------------------------------------

    def abort_running(self) -> None:
        """End running requests as they are; those that wait stay. In exact mode nothing that was sampled survives."""
        self._remove_cancelled()
        aborted, self._running = self._running, []
        for request in aborted:
            if self._exact:
                request.restart()
        self._deliver([(request, request.completion("abort")) for request in aborted])

    def switch(self, number: int, keep: bool) -> int:
        """Go on with weights `number`, already bound. Returns the tokens that were prefilled again (none with `keep`)."""
        self._remove_cancelled()
        before = self.prefilled_tokens
        if keep and not self._exact:
            self._prefixes.clear()
            self._encoder.clear()
        else:
            self.forget()
            self._restart_exact()
            self._prefill()
        for request in self._running:
            request.begin(number, mixed=keep and not self._exact and request.prefilled)
        self.version = number
        self._drop_below(number)
        return self.prefilled_tokens - before

    def forget(self) -> None:
        """Drop all keys, values and encoder outputs; running requests are prefilled again before their next token."""
        self._prefixes.clear()
        self._encoder.clear()
        self._forward.cache.wipe_all()
        for request in self._running:
            request.prefilled = False
            if not request.spans:
                request.begin(self.version)

    def release(self) -> None:
        """Somebody else needs the device: `forget`, and give the memory back."""
        self._restart_exact()
        self.forget()
        self._forward.cache.release()

    def fail_all(self, reason: str) -> None:
        """Deliver an EngineError to every request and forget them."""
        failed = [*self._running, *self._waiting, *self._drained()]
        self._running.clear()
        self._waiting.clear()
        self.forget()
        self._deliver([(request, EngineError(reason)) for request in failed])

    def _restart_exact(self) -> None:
        """In exact mode running requests go back to their prompts: prefilled tokens have other bits than sampled ones (DE2)."""
        if self._exact:
            for row, request in enumerate(self._running):
                request.restart()
                self._place(row, request)

    def _drop_below(self, number: int) -> None:
        """Refuse what must not be served by version `number` (a new incarnation can be lower than the old one)."""
        self._waiting.extend(self._drained())
        stale = [request for request in [*self._running, *self._waiting] if request.session.base > number]
        self._discard(stale)
        message = f"[ST2] the engine went back to version {number}, below base version"
        self._deliver([(request, StaleError(f"{message} {request.session.base}")) for request in stale])

    # --- one decode step ---------------------------------------------------------------------------------------------

    def _remove_cancelled(self) -> None:
        if self._sweep:
            self._sweep = False
            self._waiting.extend(self._drained())
            self._discard([request for request in [*self._running, *self._waiting] if request.cancelled])

    def _discard(self, requests: list[Request]) -> None:
        gone = set(map(id, requests))
        for row in range(len(self._running) - 1, -1, -1):
            if id(self._running[row]) in gone:
                self._release(row)
        self._waiting = deque(request for request in self._waiting if id(request) not in gone)

    def _drained(self) -> Iterator[Request]:
        while self._inbox:
            yield self._inbox.popleft()

    def _admit(self) -> None:
        """Fill rows in order of arrival; the first request that finds no room blocks the others, so none starves."""
        self._waiting.extend(self._drained())
        while self._waiting and len(self._running) < self._slots and self._reserve(self._waiting[0].columns):
            request = self._waiting.popleft()
            try:
                self._encoder.locate(request)
            except EngineError as error:
                self._deliver([(request, error)])
                continue
            self._running.append(request)
            self._place(len(self._running) - 1, request)
            request.begin(self.version)

    def _reserve(self, columns: int) -> bool:
        """Make the rectangle hold one more request of `columns`, evicting prefixes if it must; false when it cannot yet."""
        cache = self._forward.cache
        rows = max(len(self._running) + 1, self._forward.min_rows)
        if rows <= cache.rows and columns <= cache.columns:
            return True
        needed = max([columns, *(request.columns for request in self._running)])
        rounded = -(-needed // _COLUMN_STEP) * _COLUMN_STEP
        roomy = max(cache.columns, rounded)
        more_rows = max(rows, min(self._slots, 2 * cache.rows if rows > cache.rows else cache.rows))
        while True:
            free = self._kv_tokens - self._prefixes.tokens
            for shape in ((more_rows, roomy), (rows, roomy), (rows, rounded), (rows, needed)):
                if shape[0] * shape[1] <= free:
                    cache.reshape(*shape, used_rows=len(self._running))
                    return True
            if not self._prefixes.evict(self._wanted()):
                return False

    def _place(self, row: int, request: Request) -> None:
        sampling, session = request.sampling, request.session
        counter = session.offset + len(request.tokens)
        self._rows[row] = (
            session.seed % 2**64,
            counter % 2**64,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            request.last_token(),
            request.history_length,
            request.delta,
        )

    def _release(self, row: int) -> None:
        """Free a row; the last one moves into the hole."""
        last = len(self._running) - 1
        if row != last:
            moved = self._running[last]
            self._running[row] = moved
            self._rows[row] = self._rows[last]
            if moved.prefilled:
                self._forward.cache.copy_row(last, row, moved.history_length)
        self._running.pop()

    def _prefill(self) -> None:
        """Give every running request its keys and values: from a kept prefix, from a sibling's prefill, or by its own."""
        jobs: dict[Any, list[int]] = {}
        for row, request in enumerate(self._running):
            if request.prefilled:
                continue
            request.prefilled = True
            prefix = request.prefix
            if request.history_length == 0:
                continue
            if prefix is not None and prefix in self._prefixes:
                self._forward.cache.write(row, self._prefixes.get(prefix))
            else:
                jobs.setdefault(prefix or row, []).append(row)
        for batch in self._batches(sorted(jobs.items(), key=lambda job: self._running[job[1][0]].history_length)):
            self._prefill_batch(batch)
        failed = [(request, request.error) for request in self._running if request.error is not None]
        if failed:
            self._discard([request for request, _ in failed])
            self._deliver([*failed])

    def _batches(self, jobs: list[tuple[Any, list[int]]]) -> Iterator[list[tuple[Any, list[int]]]]:
        """Cut jobs, sorted by length, into forwards of at most `prefill_tokens` padded tokens, with media that have to be encoded
        for at most the encoder's `batch_tokens`."""
        batch: list[tuple[Any, list[int]]] = []
        media: dict[str, Medium] = {}
        for job in jobs:
            first = self._running[job[1][0]]
            length = first.history_length
            other = bool(batch) and self._running[batch[0][1][0]].history_length != length
            together = media | self._encoder.missing(first.media)
            too_much = sum(medium.encoder_tokens for medium in together.values()) > self._encoder.batch_tokens
            if batch and (
                (len(batch) + 1) * length > self._prefill_tokens
                or (too_much and len(together) > len(media))
                or (self._exact and other)
            ):
                yield batch
                # Asked again: what that prefill has encoded is there now.
                batch, together = [], self._encoder.missing(first.media)
            batch.append(job)
            media = together
        if batch:
            yield batch

    def _prefill_batch(self, batch: list[tuple[Any, list[int]]]) -> None:
        encoded = self._encoder.encode([medium for _, rows in batch for medium in self._running[rows[0]].media])
        prefixes: list[Any] = []
        placements: list[Placement] = []
        for prefix, rows in batch:
            request = self._running[rows[0]]
            found = [encoded[medium.key] for medium in request.media]
            failed = next((one for one in found if isinstance(one, EngineError)), None)
            if failed is not None:
                for row in rows:
                    self._running[row].error = failed
                continue
            encodings = [one for one in found if not isinstance(one, EngineError)]
            prefixes.append(prefix)
            placements.append(Placement(request.history(), rows, request.history_positions(), encodings))
        if not placements:
            return
        keep = [
            isinstance(prefix, tuple) and self._can_keep(len(placement.tokens))
            for prefix, placement in zip(prefixes, placements, strict=True)
        ]
        copies = self._forward.prefill(placements, keep)
        for prefix, placement, parts in zip(prefixes, placements, copies, strict=True):
            length = len(placement.tokens)
            self.prefilled_tokens += length
            if parts is not None and self._can_keep(length):
                self._prefixes.put(prefix, length, parts)

    def _can_keep(self, length: int) -> bool:
        free = self._kv_tokens - self._forward.cache.tokens - self._prefixes.tokens
        return free >= length and self._prefixes.make_room(length, self._wanted())

    def _wanted(self) -> set[Prefix]:
        return {request.shared for request in self._waiting if request.shared is not None}

    def _decode(self) -> None:
        rows = self._rows[: len(self._running)]
        logits = self._forward.decode(rows["last"], rows["length"], rows["delta"])
        tokens, logprobs = self._sampler.sample(logits, rows, uniforms(rows["seed"], rows["counter"]))
        rows["last"] = tokens
        rows["length"] += 1
        rows["counter"] += np.uint64(1)
        self.sampled_tokens += len(rows)
        finished = []
        for row, (request, token, logprob) in enumerate(
            zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            request.add(token, logprob)
            if logprob != logprob or request.has_ended:
                finished.append(row)
        if finished:
            # From the last row down, so that the row that moves into a hole is never one that has finished.
            self._deliver([self._finish(row) for row in reversed(finished)])

    def _finish(self, row: int) -> Result:
        request = self._running[row]
        is_finite = request.logprobs[-1] == request.logprobs[-1]
        if not is_finite:
            # Whatever made the logits NaN may sit in its keys and values, the prefix's, or what an encoder made of its
            # media: nothing of that may reach another request.
            self._forward.cache.wipe(row)
            if request.shared is not None:
                self._prefixes.drop(request.shared)
            self._encoder.drop(request.media)
        self._release(row)
        if is_finite:
            return request, request.completion("stop" if request.stopped else "length")
        group = request.session.group
        return request, EngineError(f"version {self.version} gave {group} logits that are not finite")
