"""The embedded engine gives its device up in the middle of its work and goes on as if nothing had happened (DT)."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.completion import Completion, GenerateInput
from relax.core.error import EngineError
from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.turn_desk import TurnLink
from tests.engines.setting import forced, prompt, session, torch_engine, until_sampled


async def sample(engine: Any, interrupt: bool, deterministic: bool) -> list[Completion]:
    """Six requests; with `interrupt` the engine's memory is given back after some of their tokens."""
    sampling = forced(40, temperature=0.0 if not deterministic else 1.0)
    running = [
        asyncio.create_task(engine.generate(GenerateInput(prompt(5 + i % 3, i)), sampling, session(i)))
        for i in range(6)
    ]
    if interrupt:
        await until_sampled(engine, 60)
        await engine._compute.run(_release, engine)
    return await asyncio.gather(*running)


def _release(engine: Any) -> None:
    """On the compute thread, between two bursts."""
    engine._batcher.release()
    assert all(layer.keys is None for layer in engine._forward.cache._slots)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_requests_go_on_after_their_memory_was_given_back(deterministic: bool) -> None:
    found = []
    for interrupt in (False, True):
        async with torch_engine(0, deterministic=deterministic, slots=6, burst=1) as engine:
            found.append(await sample(engine, interrupt, deterministic))
    for calm, interrupted in zip(*found, strict=True):
        assert calm.token_ids.tolist() == interrupted.token_ids.tolist()
        assert interrupted.versions.tolist() == [0] * 40
        if deterministic:
            assert calm.logprobs.tobytes() == interrupted.logprobs.tobytes()
        else:
            np.testing.assert_allclose(calm.logprobs, interrupted.logprobs, atol=1e-5)


async def test_on_a_cpu_nothing_moves_and_elsewhere_the_whole_model_does() -> None:
    async with torch_engine(0) as engine:
        weights = next(engine._model.parameters()).data_ptr()
        await engine._compute.run(engine.offload)
        assert next(engine._model.parameters()).data_ptr() == weights
        engine._forward.device = torch.device("meta")  # any device that is not the CPU
        await engine._compute.run(engine.onload)
        assert {parameter.device.type for parameter in engine._model.parameters()} == {"meta"}


def on_shared_device(engine: Any, turns: Any) -> None:
    """From now on the engine computes in turns only."""
    shared = SharedDevices({"trainer": "a", "engine": "a"}, turns, apart=True)
    engine._compute = shared.compute("engine-0", engine._compute)


async def test_closing_waits_for_no_turn() -> None:
    """In a process that ends, the link to whoever grants turns has ended before."""
    async with torch_engine(0) as engine:
        on_shared_device(engine, TurnLink("engine-0", None))
        waiting = asyncio.create_task(engine.generate(GenerateInput(prompt(5)), forced(5), session()))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await engine.close()
        with pytest.raises(EngineError, match="engine engine-0 was closed"):
            await waiting


async def test_closing_in_the_middle_of_a_turn_lets_the_burst_end_first() -> None:
    turns = DeviceTurns(LoopClock())
    async with torch_engine(0, burst=1) as engine:
        on_shared_device(engine, turns)
        running = asyncio.create_task(engine.generate(GenerateInput(prompt(5)), forced(400), session()))
        await until_sampled(engine, 3)
        await engine.close()
        sampled = engine._batcher.sampled_tokens
        with pytest.raises(EngineError, match="engine engine-0 was closed"):
            await running
        await asyncio.sleep(0.05)
        assert engine._batcher.sampled_tokens == sampled
        assert turns.status()["a"]["turn"] is None
    await turns.close()


async def test_requests_of_an_engine_that_cannot_have_its_device_fail() -> None:
    """Telling them so needs no turn: the next one would be refused as well."""

    class Refusing(DeviceTurns):
        def request(self, holder: str) -> None:
            raise EngineError("nobody has a turn")

    turns = Refusing(LoopClock())
    async with torch_engine(0) as engine:
        on_shared_device(engine, turns)
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match="engine engine-0 failed: EngineError: nobody has a turn"):
                await engine.generate(GenerateInput(prompt(5)), forced(5), session())
    await turns.close()
