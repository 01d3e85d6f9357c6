"""WS2: an engine is at one version at a time; all that it is decoding switches at one token boundary."""

import asyncio

import pytest

from relax.core.completion import Completion, GenerateInput, Sampling
from relax.core.version import Version
from tests.engines.setting import NO_STOP, Reader, prompt, session, torch_engine, until_sampled

BUDGET = 60


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_rule_ws2_all_running_requests_switch_at_one_token_boundary(mode: str) -> None:
    """Requests that began together have as many tokens of the old version; none has an old token after a new one."""
    async with torch_engine(0, slots=4, burst=1) as engine:
        begun: list[asyncio.Task[Completion]] = [
            asyncio.create_task(
                engine.generate(GenerateInput(prompt(6, i)), Sampling(1.0, BUDGET, stop_ids=NO_STOP), session(i))
            )
            for i in range(4)
        ]
        switches = []
        for number in (1, 2):
            await until_sampled(engine, 60 * number)
            assert (await engine.status()).version == Version(0, number - 1)
            await engine.pause(mode)  # type: ignore[arg-type]
            switches.append((await engine.status()).sampled_tokens)
            await engine.load(Version(0, number), Reader())
            assert (await engine.status()).sampled_tokens == switches[-1], "nothing is sampled during a swap"
            assert (await engine.status()).version == Version(0, number)
            await engine.resume()
        completions = await asyncio.gather(*begun)
    stamps = [completion.versions.tolist() for completion in completions]
    assert all(stamp == stamps[0] == sorted(stamp) for stamp in stamps)
    assert [sum(stamp.count(number) for stamp in stamps) for number in (0, 1)] == [
        switches[0],
        switches[1] - switches[0],
    ]
    assert len(stamps[0]) == BUDGET
