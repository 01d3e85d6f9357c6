"""Runtimes that do not fit the run are refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from relax.core.error import ConfigError
from relax.services.check import check_run
from tests.e2e.test_train import EVALUATED
from tests.e2e.tiny import tiny_config

SERVER = {"type": "sglang", "url": "http://127.0.0.1:30000", "folder": "versions"}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"runtime": {"type": "ray", "hosts": [{"name": "light", "roles": ["rewards"]}]}}, "no role 'rewards'.*reward"),
        ({"runtime": {"type": "ray", "resources": {"trianer": {"gpus": 1}}}}, "no role or host 'trianer'.*trainer"),
        ({"runtime": {"type": "ray", "resources": {"engine-x": {"gpus": 1}}}}, "no role or host 'engine-x'.*engine"),
        ({"runtime": {"type": "ray", "hosts": [{"name": "launcher", "roles": ["reward"]}]}}, "choose another name"),
        (
            {"runtime": {"type": "ray", "hosts": [{"name": "c", "roles": ["controller"]}]}},
            "a process of its own in any",
        ),
        (
            {"runtime": {"type": "ray", "hosts": [{"name": "gen", "roles": ["engine"]}]}, "rollout": {"replicas": 2}},
            "'engine' has 2 processes",
        ),
        ({"runtime": {"type": "ray", "devices": {"trainer-0": "a", "engine": "a"}}}, "devices.trainer-0: no role"),
        ({"runtime": {"type": "ray", "hosts": [{"name": "x", "roles": ["engine", "trainer"]}]}}, "'engine' must have"),
        ({"runtime": {"type": "ray"}, "bus": {"journal": False}}, "bus.journal: is false"),
        ({"rollout": {"max_staleness": 1, "autoscale": {"max": 2}}}, "cannot be added to one process"),
        ({"runtime": {"type": "local", "devices": {"reward": "a"}}}, "runtime.devices.reward: no role"),
        ({"rollout": {"max_staleness": 1, "engine": SERVER, "on_load": "keep"}}, "rollout.on_load: is keep"),
        ({"rollout": {"max_staleness": 1, "engine": SERVER, "replicas": 2}}, "rollout.replicas: is above 1"),
        (
            {"rollout": {"max_staleness": 1, "engine": SERVER}, "eval": EVALUATED},
            "eval.sets: need an engine of their own",
        ),
    ],
)
def test_what_cannot_work_is_said_with_its_key(tmp_path: Path, sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_run(tiny_config(tmp_path, **sections))


def test_light_roles_may_share_a_host(tmp_path: Path) -> None:
    hosts = [{"name": "light", "roles": ["reward", "advantage", "demonstration"]}]
    assert check_run(tiny_config(tmp_path, runtime={"type": "ray", "hosts": hosts})) == []


def test_resources_are_asked_for_by_role_by_host_and_by_replica(tmp_path: Path) -> None:
    hosts = [{"name": "light", "roles": ["reward", "advantage"]}]
    resources = {name: {"cpus": 1} for name in ("trainer", "controller", "light", "engine-1", "reward-0")}
    assert check_run(tiny_config(tmp_path, runtime={"type": "ray", "hosts": hosts, "resources": resources})) == []
