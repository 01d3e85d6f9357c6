"""An inference server as SGLang documents its HTTP API, on a loopback socket, with faults on demand.

Written from sgl-project/sglang: `docs/basic_usage/native_api`, `sampling_params`, `advanced_features/sglang_for_rl`, and the request
and answer structures of `managers/io_struct.py`, `managers/tokenizer_manager.py` and `entrypoints/http_server.py`. Its "model" is a
function of the weight files, the last token and the position, so that what was loaded shows in every logprob.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.engines.setting import vocabulary


def digest(tensors: Mapping[str, Any]) -> int:
    """What the model is a function of: names and bytes of the weights."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return int.from_bytes(found.digest()[:4], "big")


def log_softmax(weights: int, context: list[int], temperature: float, bias: Mapping[str, float]) -> Any:
    """float64[V] of the next token."""
    logits = np.random.default_rng([weights, context[-1], len(context)]).normal(size=vocabulary().size) * 2
    for token_id, value in bias.items():
        logits[int(token_id)] += value
    logits /= temperature or 1.0
    return logits - np.logaddexp.reduce(logits)


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False


@dataclass
class FakeServer:
    """`faults` are taken one by one, by path: a status, `hang`, `drop`, `cut`, or a body to answer instead."""

    weights: int = 0
    label: str = "default"
    tick_s: float = 0.001
    eos: tuple[int, ...] = ()
    decode: Any = None
    api_key: str | None = None
    original_logprobs: bool = False
    goes_back: bool = True
    log: list[tuple[str, Any]] = field(default_factory=list)
    faults: dict[str, list[Any]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    crashed: bool = False
    url: str = ""

    def asked(self, path: str) -> list[Any]:
        """The bodies of the requests to a path."""
        return [body for asked, body in self.log if asked == path]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in head[1:] if line)}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert method == "POST"
            self.log.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "drop" or self.crashed:
                return
            if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
                status, answer = 401, {"error": "Unauthorized"}
            elif isinstance(fault, int):
                status, answer = fault, {"error": {"message": f"fault {fault}"}}
            elif fault not in (None, "cut"):
                status, answer = 200, fault
            else:
                status, answer = await self.answer(path, body)
            if self.crashed:
                return
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            length = len(content) + (100 if fault == "cut" else 0)
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + content
            )
            await writer.drain()
        finally:
            with suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/generate":
            return await self.generate(body)
        if path == "/abort_request":
            for rid, run in self.runs.items():
                run.aborted |= rid.startswith(body["rid"]) or body.get("abort_all", False)
            return 200, ""
        if path == "/flush_cache":
            return 400 if self.runs else 200, "Cache flushed."
        if path == "/update_weights_from_disk":
            return self.update(body)
        return 404, {"detail": "Not Found"}

    def update(self, body: Any) -> tuple[int, Any]:
        if self.runs and body["flush_cache"]:
            self.crashed = True  # an assertion of the scheduler: the cache could not be flushed
        try:
            found = self.read(Path(body["model_path"]))
        except OSError as error:
            if not self.goes_back:
                self.weights += 1
            message = f"Failed to update weights: {error}.\nRolling back to original weights."
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        self.weights, self.label = found, body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def read(self, path: Path) -> int:
        """A number that stands for the weights there. Raises OSError."""
        return digest(load_file(path / "model.safetensors"))

    def distribution(self, context: list[int], temperature: float, bias: Mapping[str, float]) -> Any:
        """float64[V]: logprobs of the next token."""
        return log_softmax(self.weights, context, temperature, bias)

    async def generate(self, body: Any) -> tuple[int, Any]:
        if not isinstance(body["input_ids"][0], list):
            return 200, await self.sample(body["rid"], body, body["input_ids"])
        wanted = body["token_ids_logprob"]
        return 200, [
            await self.sample(f"batch{index}", body, ids, wanted[index]) for index, ids in enumerate(body["input_ids"])
        ]

    async def sample(self, rid: str, body: Any, prompt: list[int], wanted: list[int] | None = None) -> dict[str, Any]:
        params, run = body["sampling_params"], Run()
        self.runs[rid] = run
        logprobs, rows = [], []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        try:
            while len(run.tokens) < params["max_new_tokens"]:
                await asyncio.sleep(self.tick_s)
                if run.aborted:
                    finish = {"type": "abort", "message": "Aborted by AbortReq."}
                    break
                context = [*prompt, *run.tokens]
                temperature, bias = params["temperature"], params.get("logit_bias", {})
                found = self.distribution(context, temperature, bias)
                noise = np.random.default_rng([params["sampling_seed"], len(context)]).gumbel(size=len(found))
                token = int(np.argmax(found + (noise if temperature else 0)))
                told = self.distribution(context, 1.0, bias) if self.original_logprobs else found
                run.tokens.append(token)
                logprobs.append([float(told[token]), token, None])
                rows.append([[float(told[one]), one, None] for one in wanted or []])
                if (stop := self.stop(params, run.tokens)) is not None:
                    finish = {"type": "stop", "matched": stop}
                    break
        finally:
            del self.runs[rid]
        meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "weight_version": self.label}
        meta |= {"completion_tokens": len(run.tokens), "output_token_logprobs": logprobs}
        if wanted is not None:
            meta["output_token_ids_logprobs"] = rows
        return {"text": "", "output_ids": run.tokens, "meta_info": meta}

    def stop(self, params: Any, tokens: list[int]) -> int | str | None:
        if not params["ignore_eos"] and tokens[-1] in (*params["stop_token_ids"], *self.eos):
            return tokens[-1]
        for string in params["stop"]:
            if string in self.decode(tokens):
                return str(string)
        return None


def expected_logprobs(weights: int, token_ids: Any, temperature: float = 1.0) -> Any:
    """float32[T]: what a trainer with these weights says of a probe."""
    bias = {str(token_id): -math.inf for token_id in np.flatnonzero(~vocabulary().allowed)}
    ids = [int(token_id) for token_id in token_ids]
    found = [log_softmax(weights, ids[:end], temperature, bias)[ids[end]] for end in range(1, len(ids))]
    return np.asarray([0.0, *found], dtype=np.float32)


@asynccontextmanager
async def serve(kind: type[FakeServer] = FakeServer, **settings: Any) -> AsyncIterator[FakeServer]:
    """A server that ends with the block, whatever its handlers are doing."""
    fake = kind(**settings)
    handlers: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(fake.handle(reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        for task in tuple(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
