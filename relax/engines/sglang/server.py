"""What the engine asks of its server, each as one verb: sample, abort, load, prove.

Called by the engine, which decides when. Invariant: a request whose effect is not known is never sent again; those that may be are an
abort, a flush and a probe.
"""

import asyncio
from pathlib import Path
from typing import Any

from relax.core.completion import Floats
from relax.core.error import EngineError
from relax.core.message import Json
from relax.core.protocol import Clock, Compute
from relax.core.version import Version
from relax.core.weight import Probe, WeightSet
from relax.engines.config import SglangEngineConfig
from relax.engines.refusal import RefusedError
from relax.engines.sglang.answer import (
    Part,
    forbidden_bias,
    probe_request,
    read_part,
    read_probe,
    sampling_params,
)
from relax.engines.sglang.client import AnsweredError, Client, UnansweredError
from relax.engines.sglang.folder import ServerFolder
from relax.engines.sglang.turn import Turn
from relax.model.vocabulary import Vocabulary

AGAIN_S = 0.2
"""Seconds until a short call is made again: an abort that comes before its request is forgotten, a flush while one runs is refused."""


class RefusedLoadError(EngineError):
    """The server says that it did not load the version."""


class Server:
    """`name` is the engine's: errors carry it, and its weight files have a folder of that name."""

    def __init__(
        self,
        config: SglangEngineConfig,
        model: Any,
        vocabulary: Vocabulary,
        compute: Compute,
        name: str,
        clock: Clock,
        mark: str,
    ) -> None:
        """`mark` sets this engine's labels of versions apart from those of any other that loads into the same server."""
        self._config = config
        self._mark = mark
        self._vocabulary = vocabulary
        self._compute = compute
        self._name = name
        self._clock = clock
        self._client = Client(config.url, name, config.api_key)
        seen_as = None if config.folder_on_server is None else f"{config.folder_on_server.rstrip('/')}/{name}"
        self._folder = ServerFolder(Path(config.folder) / name, model, seen_as)
        self._bias = forbidden_bias(vocabulary.allowed)

    async def sample(self, rid: str, turn: Turn, version: Version) -> Part:
        """What is left of a turn, from the server's weights, which must be `version`.

        Raises RefusedError for what the server calls the request's fault, MislabelledError for other weights, else EngineError.
        """
        token_ids, sampling = turn.rest()
        body: dict[str, Json] = {
            "rid": rid,
            "input_ids": list(token_ids),
            "sampling_params": sampling_params(sampling, turn.session.seed, self._bias),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        try:
            answer = await self._client.post("/generate", body, self._config.request_s)
        except AnsweredError as error:
            raise RefusedError(str(error)) if error.status == 400 else error from error
        try:
            return read_part(answer, self._label(version), sampling.max_tokens, self._vocabulary.size)
        except EngineError as error:
            raise type(error)(f"engine {self._name}: {self._client.url} answers POST /generate: {error}") from error

    async def abort(self, rid: str) -> None:
        """End a request; one that the server does not know is none of its."""
        await self._client.post("/abort_request", {"rid": rid}, self._config.call_s)

    async def prepare(self, weights: WeightSet) -> str:
        """Write the version and empty the server's cache; returns the folder to load. Nothing has changed when this fails."""
        path = await self._compute.run(self._folder.write, weights)
        await self._flush()
        return path

    async def load(self, path: str, version: Version) -> None:
        """Have the server read a version. Raises RefusedLoadError when it did not, UnansweredError when that is not known."""
        body: dict[str, Json] = {"model_path": path, "weight_version": self._label(version), "flush_cache": True}
        try:
            answer = await self._client.post("/update_weights_from_disk", body, self._config.load_s)
        except AnsweredError as error:
            raise RefusedLoadError(str(error)) from error
        except UnansweredError as error:
            if error.sent:
                raise
            raise RefusedLoadError(str(error)) from error
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RefusedLoadError(f"engine {self._name}: the server did not load {path}: {str(answer)[:300]}")

    async def prove(self, probe: Probe, version: Version) -> Floats:
        """float32[T]: the server's logprobs of the probe, through the same path as sampling. Raises EngineError."""
        body = probe_request(probe.token_ids, probe.temperature, self._bias)
        answer = await self._client.post("/generate", body, self._config.call_s)
        try:
            return read_probe(answer, probe.token_ids, self._label(version))
        except EngineError as error:
            raise type(error)(f"engine {self._name}: {self._client.url} answers the probe: {error}") from error

    async def forget_others(self, version: Version) -> None:
        """Delete the files of every other version."""
        await self._compute.run(self._folder.keep, version)

    def _label(self, version: Version) -> str:
        return f"{version}{self._mark}"

    async def _flush(self) -> None:
        """The server does this only when nothing runs, and dies of a load that finds a request (its assertion on the cache)."""
        try:
            async with asyncio.timeout(self._config.call_s):
                while True:
                    try:
                        await self._client.post("/flush_cache", {}, self._config.call_s)
                        return
                    except AnsweredError as error:
                        if error.status != 400:
                            raise
                    await self._clock.sleep(AGAIN_S)
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._name}: {self._client.url} was not idle within {self._config.call_s:g} s, so no version can be"
                " loaded; does somebody else use this server?"
            ) from error
