"""A server that somebody else started, attached to a run under way by its URL: it loads every version, samples, and is let go."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from relax.core.error import RelaxError
from relax.core.message import Json
from relax.services.control.client import ControlClient
from relax.services.directory import RunDirectory
from relax.services.remote.launch import RemoteRun
from tests.e2e.tiny import Watcher, run_root, tiny_config
from tests.engines.sglang_server import FakeServer, serve
from tests.parity.inside import Inside, play
from tests.parity.story import RAY, ended, operate, outcome, rl, undisturbed


class ModelServer(FakeServer):
    """Reads what it is told to, by Hugging Face's own way, and computes it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model: Any = None
        self.third_version = asyncio.Event()
        self.fourth_request, self.again = asyncio.Event(), asyncio.Event()
        self.again_from = 0

    def read(self, path: Path) -> int:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()
        found = self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        assert not found.unexpected_keys
        assert set(found.missing_keys) <= {"lm_head.weight"}
        if len(set(labels(self))) == 3:
            self.third_version.set()
        return 1

    async def generate(self, body: Any) -> tuple[int, Any]:
        if len(requests(self)) == 4:
            self.fourth_request.set()
        if self.again_from and len(requests(self)) >= self.again_from:
            self.again.set()
        return await super().generate(body)

    def distribution(self, context: list[int], temperature: float, bias: Mapping[str, float]) -> Any:
        with torch.no_grad():
            logits = self.model(torch.tensor([context])).logits[0, -1].double()
        for token_id, value in bias.items():
            logits[int(token_id)] += value
        return torch.log_softmax(logits / (temperature or 1.0), -1).numpy()


async def test_a_server_is_attached_samples_and_is_let_go(tmp_path: Path) -> None:
    rollout = {"max_staleness": 8, "engine": {"type": "torch", "slots": 2}}
    expected = await undisturbed(tmp_path, stages=rl(80), rollout=rollout)
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(80), rollout=rollout)
    hub, operations = Watcher(), list[Mapping[str, Json]]()

    async with serve(ModelServer) as server:
        assert isinstance(server, ModelServer)

        async def attach(run: RemoteRun, inside: Inside) -> None:
            await hub.reached(1)
            operations.append(await operate(config, "/v1/engines", {"name": "lab", "url": server.url, "capacity": 4}))
            await server.third_version.wait()
            await server.fourth_request.wait()
            client = ControlClient(RunDirectory(run_root(config)))
            engines = (await asyncio.to_thread(client.get, "/v1/engines"))["engines"]
            assert {one["name"]: one["own"] for one in engines} == {"engine-0": True, "lab": False}
            with pytest.raises(RelaxError, match="engine-0 is the only engine"):
                await asyncio.to_thread(client.delete, "/v1/engines/engine-0")
            asked = await asyncio.to_thread(client.delete, "/v1/engines/lab")
            operations.append(await asyncio.to_thread(client.follow, asked, lambda line: None))

        summary = await ended(play(config, Inside(), hub, during=attach))
        assert server.runs == {}
        assert not (run_root(config) / "attached").exists()
    assert [one["state"] for one in operations] == ["done", "done"], operations
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


async def test_a_server_that_was_started_anew_samples_again(tmp_path: Path) -> None:
    rollout = {"max_staleness": 8, "engine": {"type": "torch", "slots": 2}}
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000), rollout=rollout)
    hub, seen = Watcher(), list[int]()

    async with serve(ModelServer) as server:
        assert isinstance(server, ModelServer)

        async def attach(run: RemoteRun, inside: Inside) -> None:
            await hub.reached(1)
            await operate(config, "/v1/engines", {"name": "lab", "url": server.url, "capacity": 4})
            await server.fourth_request.wait()
            server.label, server.again = "default", asyncio.Event()
            server.again_from = len(requests(server)) + 8
            seen.append(len(labels(server)))
            await server.again.wait()
            seen.append(len(labels(server)))
            await run.stop()

        summary = await ended(play(config, Inside(), hub, during=attach))
    assert seen[1] > seen[0], "it was told to load again"
    assert summary["ledger"]["balances"]


def requests(server: FakeServer) -> list[Any]:
    """What was to be sampled there: a probe is a batch."""
    return [body for body in server.asked("/generate") if not isinstance(body["input_ids"][0], list)]


def labels(server: FakeServer) -> list[str]:
    """The versions that it was told to load."""
    return [body["weight_version"] for body in server.asked("/update_weights_from_disk")]


@pytest.mark.parametrize("problem", ["nobody", "dies"])
async def test_a_server_that_is_not_there_ends_nothing(tmp_path: Path, problem: str) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(30))
    hub, found = Watcher(), list[Any]()

    async with serve(ModelServer) as server:

        async def attach(run: RemoteRun, inside: Inside) -> None:
            await hub.reached(1)
            url = server.url if problem == "dies" else "http://127.0.0.1:9"
            found.append(await operate(config, "/v1/engines", {"name": "lab", "url": url, "capacity": 4}))
            server.faults["/generate"] = ["drop"] * 1000
            server.faults["/update_weights_from_disk"] = ["drop"] * 1000

        summary = await ended(play(config, Inside(), hub, during=attach))
    assert found[0]["state"] == ("done" if problem == "dies" else "failed"), found
    if problem == "nobody":
        assert "lab takes no requests: it is failed" in found[0]["error"]
    assert summary["ledger"]["balances"]
    assert summary["steps"] == 30


@pytest.mark.parametrize(
    ("body", "sections", "sentence"),
    [
        ({"name": "engine-7"}, {}, "name of a process of this run"),
        ({"name": "trainer"}, {}, "name of a process of this run"),
        ({"name": "lab"}, {"rollout": {"on_load": "keep"}}, "rollout.on_load is keep"),
    ],
)
async def test_what_cannot_be_attached_is_said_at_once(
    tmp_path: Path, body: dict[str, Json], sections: dict[str, Any], sentence: str
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000), **sections)
    hub, found = Watcher(), list[str]()

    async def attach(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(1)
        try:
            await operate(config, "/v1/engines", body | {"url": "http://127.0.0.1:9"})
        except RelaxError as error:
            found.append(str(error))
        await run.stop()

    await ended(play(config, Inside(), hub, during=attach))
    assert sentence in found[0]
