"""The critic's service across processes: begins from the policy's file, is captured and loaded by the trainer; says what is too early."""

import json
from pathlib import Path

import pytest
import torch

from relax.config.tree import RunConfig
from relax.core.error import InvariantError, TransportError, UserError
from relax.data.quarantine import Quarantine
from relax.services.assembly import Assembly
from relax.services.critic import CRITIC_FOLDER, open_critic
from relax.services.reference import write_reference
from relax.services.remote.critic import CriticService
from relax.services.remote.desk import StageNotice
from tests.e2e.test_critic import config_of, stages
from tests.training.setting import same_bits, weights_of


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_of(tmp_path, stages=stages(epochs=3))


def service(config: RunConfig) -> tuple[CriticService, Assembly]:
    assembly = Assembly(config, Quarantine(), owns_policy=False)
    return CriticService(assembly, lambda stage: None), assembly  # type: ignore[arg-type, return-value]


async def test_it_starts_from_the_weights_of_the_policy(config: RunConfig, tmp_path: Path) -> None:
    trainer = Assembly(config, Quarantine())
    critic, assembly = service(config)
    try:
        with torch.no_grad():
            for tensor in trainer.backend.export().values():
                tensor.add_(0.25)  # it has been trained since the run began
        beside = await open_critic(trainer, 1)
        assert beside is not None
        write_reference(trainer.backend.export(), tmp_path / "policy.safetensors")
        await critic.begin(1, str(tmp_path / "policy.safetensors"))
        assert same_bits(weights_of(critic._begun().backend), weights_of(beside.backend))
        assert critic._begun().step == beside.step == 3
    finally:
        await assembly.close()
        await trainer.close()


async def test_case_b9_it_is_captured_and_loaded_beside_the_policy(config: RunConfig, tmp_path: Path) -> None:
    trainer = Assembly(config, Quarantine())
    critic, assembly = service(config)
    again, other = service(config)
    try:
        write_reference(trainer.backend.export(), tmp_path / "policy.safetensors")
        await critic.begin(1, str(tmp_path / "policy.safetensors"))
        with torch.no_grad():
            critic._begun().backend.export()["lm_head.bias"].fill_(0.5)
        await critic.capture()
        folder = tmp_path / "step-000003"
        await critic.write_capture(str(folder / CRITIC_FOLDER))
        (folder / "meta.json").write_text(json.dumps({"step": 3}))
        (folder / "complete.json").write_text(json.dumps({"files": {}}))
        await again.load(1, str(folder / "model"))
        assert same_bits(weights_of(critic._begun().backend), weights_of(again._begun().backend))
        (folder / "meta.json").write_text(json.dumps({"step": 4}))
        with pytest.raises(UserError, match="is of step 3, the policy beside it of step 4"):
            await again.load(1, str(folder / "model"))
        with pytest.raises(InvariantError, match="without a capture"):
            await critic.write_capture(str(folder / CRITIC_FOLDER))
    finally:
        for one in (trainer, assembly, other):
            await one.close()


async def test_a_critic_that_restarted_says_so(config: RunConfig, tmp_path: Path) -> None:
    critic, assembly = service(config)
    trainer = Assembly(config, Quarantine())
    try:
        for call in (
            critic.evaluate(3, []),
            critic.train(3, []),
            critic.capture(),
            critic.join(StageNotice(1, 3, 8)),
        ):
            with pytest.raises(TransportError, match="holds no weights; begin again from a snapshot"):
                await call
        write_reference(trainer.backend.export(), tmp_path / "policy.safetensors")
        await critic.begin(1, str(tmp_path / "policy.safetensors"))
        with pytest.raises(InvariantError, match="before it had joined a stage"):
            await critic.train(3, [])
        await critic.join(StageNotice(1, 3, 8))
        assert (await critic.train(3, []))["critic/updates"] == 0
    finally:
        await assembly.close()
        await trainer.close()
