"""Trainer and engine on one device: by configuration alone, the same bits, in turns, without standing still (DT)."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.core.error import ConfigError
from relax.data.quarantine import Quarantine
from relax.services.assembly import Assembly
from relax.services.check import check_run
from relax.services.roles.trainer import Trainer
from tests.e2e.tiny import final_weights, open_ledger, tiny_config, train

SHARED: dict[str, Any] = {"devices": {"trainer": "a", "engine": "a"}, "min_turn_s": 0.05}
LIMIT_S = 120.0


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who had its turn when, in order: each entry is one turn."""
    from relax.runtime.turn import TurnTable

    seen: list[str] = []
    done = TurnTable.done

    def remember(self: TurnTable, holder: str, now_s: float) -> Any:
        seen.append(holder)
        return done(self, holder, now_s)

    monkeypatch.setattr(TurnTable, "done", remember)
    return seen


async def run(directory: Path, runtime: dict[str, Any], **sections: Any) -> Any:
    config = tiny_config(directory, runtime={"type": "local", **runtime}, **sections)
    async with asyncio.timeout(LIMIT_S):
        summary, hub = await train(config)
    return config, summary, hub


async def test_a_colocated_deterministic_run_has_the_bits_of_a_separate_one(tmp_path: Path, spans: list[str]) -> None:
    sections: dict[str, Any] = {"run": {"deterministic": True}, "rollout": {"max_staleness": 0}}
    separate, _, _ = await run(tmp_path / "separate", {}, **sections)
    assert spans == []
    colocated, _, hub = await run(tmp_path / "colocated", SHARED, **sections)
    assert len(spans) > 8
    first, second = final_weights(separate), final_weights(colocated)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert hub.metrics[7]["device/trainer/offloads"] >= 5, "at each of the five steps the engine had its turn"


async def test_rule_dt4_on_policy_everything_is_generated_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a token is sampled from the first micro-batch of a step to its end, although the step could stream."""
    from relax.engines.torch.batcher import Batcher
    from relax.training.torch_backend import TorchBackend

    order: list[str] = []

    def note(owner: Any, method: str, what: str) -> None:
        inner = getattr(owner, method)

        def noted(self: Any, *args: Any) -> Any:
            if not order or order[-1] != what:
                order.append(what)
            return inner(self, *args)

        monkeypatch.setattr(owner, method, noted)

    note(Batcher, "_decode", "generate")
    note(TorchBackend, "forward_backward", "train")
    engine = {"type": "torch", "slots": 4, "burst": 1}  # so that groups end one after the other
    streaming = {"training": {"microbatch_tokens": 16}, "rollout": {"max_staleness": 0, "engine": engine}}
    await run(tmp_path / "separate", {}, **streaming)
    assert len(order) > 1 + 2 * 5, "without sharing, training streams between decode steps"
    order.clear()
    await run(tmp_path / "colocated", SHARED, **streaming)
    assert order == ["train"] + ["generate", "train"] * 5


@pytest.mark.parametrize("min_turn_s", [0.0, 0.05, 5.0])
async def test_asynchronous_roles_alternate_on_one_device_to_the_end(
    tmp_path: Path, min_turn_s: float, spans: list[str]
) -> None:
    runtime = {**SHARED, "min_turn_s": min_turn_s}
    config, _, hub = await run(tmp_path, runtime, rollout={"max_staleness": 2})
    with closing(open_ledger(config)) as ledger:
        assert ledger.counts()["trained"] == 3 * 16 + 5 * 4
    assert {"trainer", "engine"} == set(spans)
    last = hub.metrics[7]
    assert last["device/trainer/turns"] + last["device/engine/turns"] > 10


async def test_two_engines_and_the_reference_share_it_too(tmp_path: Path) -> None:
    runtime = {"devices": {"trainer": "a", "engine": "a", "reference": "a"}, "min_turn_s": 0.02, "strict": True}
    rl = {
        "name": "rl",
        "steps": 4,
        "groups_per_step": 4,
        "algorithm": {"type": "grpo", "group_size": 4, "kl_weight": 0.1},
    }
    _, _, hub = await run(tmp_path, runtime, stages=[rl], rollout={"max_staleness": 1, "replicas": 2})
    assert hub.metrics[3]["device/reference/turns"] >= 4


def test_a_role_that_has_no_device_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, runtime={"type": "local", "devices": {"trainr": "a", "engine-3": "a", "trainer": "b"}}
    )
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["runtime.devices.trainr"]


@pytest.mark.parametrize("shares", [True, False])
def test_rule_dt2_a_trainer_that_shares_its_device_waits_for_a_whole_step_before_it_asks(
    tmp_path: Path, shares: bool
) -> None:
    """On a device of its own it streams: micro-batches run as groups come."""
    config = tiny_config(tmp_path, runtime={"type": "local", **(SHARED if shares else {})})
    assembly = Assembly(config, Quarantine())
    setup = assembly.stage(1, 3, 8)
    nobody: Any = None
    trainer = Trainer(nobody, nobody, assembly.backend, nobody, setup.algorithm, setup.trainer, nobody, nobody)
    assert trainer._streams is not shares
