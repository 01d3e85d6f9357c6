"""The seat of an engine in its own process: which device it is on, and that it ends by itself."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.core.error import TransportError
from relax.core.version import Version
from relax.data.quarantine import Quarantine
from relax.runtime.device import SharedDevices
from relax.runtime.liveness import Pulse
from relax.runtime.task import TaskSet
from relax.runtime.turn_compute import TurnCompute
from relax.runtime.turn_desk import TurnLink
from relax.services.assembly import Assembly
from relax.services.remote import engine as seat
from relax.services.remote.host import RoleSpec
from tests.e2e.tiny import tiny_config

DEVICES = {"trainer": "a", "engine": "a"}


class Nobody:
    """A controller that answers nothing."""

    def proxy(self, name: str) -> "Nobody":
        return self

    def __getattr__(self, verb: str) -> Any:
        async def call(*args: Any) -> None:
            await asyncio.Event().wait()

        return call


def host_of(directory: Path, name: str, devices: dict[str, str]) -> Any:
    config = tiny_config(directory, runtime={"type": "local", "devices": devices})
    assembly = Assembly(config, Quarantine(), owns_policy=False)
    assembly.sharing = SharedDevices(devices, TurnLink(name, Nobody()), apart=True)

    def ignore(*args: Any) -> None: ...

    return SimpleNamespace(
        spec=RoleSpec(str(directory), "run", name, ("engine",), 1, ""),
        config=config,
        assembly=assembly,
        client=Nobody(),
        server=SimpleNamespace(serve=ignore),
        busy=ignore,
        pulse=Pulse(),
        on_arrival=[],
        transfers=[],
    )


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "weight_reader", lambda host: None)


@pytest.mark.parametrize("name", ["gen", "engine-0", "engine"])
async def test_the_role_decides_on_its_device_whatever_the_host_is_called(tmp_path: Path, name: str) -> None:
    host = host_of(tmp_path, name, DEVICES)
    async with TaskSet("host") as tasks:
        await seat.start_engine(host, tasks)
        (engine,) = host.assembly.fleet.engines.values()
        compute = host.assembly.computes["engine-0"]
        assert isinstance(compute, TurnCompute), "it shares the trainer's device"
        assert engine._compute is compute
        assert [member[1] for member in compute.turn._members] == [engine], "and is moved off it"
        assert list(host.assembly.fleet.engines) == [name]
    async with asyncio.timeout(5):
        await host.assembly.close()  # as the last of a process, when nobody grants turns any more


async def test_a_host_that_carries_the_engine_goes_by_an_entry_of_that_engine_too(tmp_path: Path) -> None:
    host = host_of(tmp_path, "gen", {"trainer": "a", "engine-0": "a"})
    async with TaskSet("host") as tasks:
        await seat.start_engine(host, tasks)
        assert isinstance(host.assembly.computes["engine-0"], TurnCompute)
    await host.assembly.close()


async def test_rule_ws5_why_a_load_failed_stands_in_the_log_and_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        async def fetch(self, version: Version) -> Any:
            raise TransportError("the folder of versions is gone")

    monkeypatch.setattr(seat, "weight_reader", lambda host: Gone())
    host = host_of(tmp_path, "engine-0", {})
    pulse = host.pulse.of("engine")
    async with TaskSet("host") as tasks:
        await seat.start_engine(host, tasks)
        assert str(pulse.read()) == "waiting for its first version"
        (updater,) = host.assembly.fleet.updaters
        updater.notify(Version(0, 1))
        async with asyncio.timeout(10):
            while not caplog.records:  # noqa: ASYNC110 - a log record sets no event
                await asyncio.sleep(0.01)
    await host.assembly.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("engine engine-0 takes no requests: ")
    assert "the folder of versions is gone" in record.getMessage()
    assert str(pulse.read()).startswith("waiting for weights, after a failed load: ")
    assert "the folder of versions is gone" in str(pulse.read())
