"""What a host's log says of it, and that a role which loads a model leaves its event loop free (RR5)."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relax.data.quarantine import Quarantine
from relax.services import reference
from relax.services.assembly import Assembly
from relax.services.reference import write_reference
from relax.services.remote import work
from relax.services.remote.desk import StageNotice
from tests.e2e.tiny import tiny_config

BEGIN = """
import logging
from relax.services.remote.host import RoleSpec, begin_log
begin_log(RoleSpec("runs/x", "x-1", "light", ("advantage", "reward"), 3, "unix:/x", secret="hunter2"))
logging.getLogger("relax.engines").info("of ours")
logging.getLogger("somebody.else").info("of others")
logging.getLogger("somebody.else").warning("a warning of others")
"""


def test_a_log_begins_with_who_it_is_of_and_has_of_others_their_warnings_only() -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, *rest = [line.partition(" INFO ")[2] or line.partition(" WARNING ")[2] for line in done.stderr.splitlines()]
    name, _, who = first.partition(": ")
    assert name == "relax.services.remote.host"
    host, incarnation, process = who.partition(": ")[0].split(", ")
    assert (host, incarnation, who.partition(": ")[2]) == ("host light", "incarnation 3", "advantage, reward")
    assert process.removeprefix("process ").isdigit()
    assert rest == ["relax.engines: of ours", "somebody.else: a warning of others"]
    assert "hunter2" not in done.stderr


async def test_a_reference_loads_its_model_and_its_weights_while_the_loop_turns(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Each waits for what only the loop can do: on the loop it would wait for ever."""
    algorithm = {"type": "grpo", "group_size": 2, "kl_weight": 0.1}
    config = tiny_config(tmp_path, stages=[{"name": "rl", "steps": 2, "groups_per_step": 2, "algorithm": algorithm}])
    assembly = Assembly(config, Quarantine(), owns_policy=False)
    path = tmp_path / "rl.safetensors"
    model = assembly.copy_model()
    write_reference(dict(model.named_parameters()), path)
    turned: list[bool] = []

    def meanwhile(call: Any) -> Any:
        loop = asyncio.get_running_loop()

        def waiting(*args: Any) -> Any:
            done = threading.Event()
            loop.call_soon_threadsafe(done.set)
            turned.append(done.wait(5))
            return call(*args)

        return waiting

    monkeypatch.setattr(assembly, "copy_model", meanwhile(assembly.copy_model))
    monkeypatch.setattr(reference, "load_file", meanwhile(reference.load_file))
    host: Any = SimpleNamespace(
        assembly=assembly, holders=(), generate=None, places=None, join=lambda stage: (None, None),
        spec=SimpleNamespace(host="reference"), directory=SimpleNamespace(reference=lambda stage: path),
    )  # fmt: skip
    try:
        parts = await work._parts(host, StageNotice(0, 0, 2), assembly.stage(0, 0, 2), ["reference"])
    finally:
        await assembly.close()
    assert parts.reference is not None
    assert turned == [True, True]
