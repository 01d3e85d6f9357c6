"""From which cut a run goes on, and what it refuses: snapshots, checkpoints, stages, and data that has changed (RR3, RR4, B5)."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax.config.tree import RunConfig
from relax.core.error import DataError, UserError
from relax.services.resume import BACKEND_FOLDER, RunState, check_stages, complete_states, newest_state
from relax.services.snapshot import Snapshots
from relax.training.checkpoint import CheckpointStore
from tests.e2e.tiny import open_ledger, run_root, tiny_config, tiny_tree, train


def state(step: int = 3, stage: int = 0, outstanding: int = 0, **fields: Any) -> RunState:
    register = {"outstanding": [[f"g{number:06d}", {}] for number in range(outstanding)]}
    known = {"step": step, "stage": stage, "stages": [("warm-up", 3), ("rl", 5)], "event": 40, "incarnation": 1}
    controller = {"register": register}
    return RunState(**known, controller=controller, source={"at": 1}, streams={"a": {"position": 7}}, **fields)


def test_a_state_comes_back_from_json_as_it_was() -> None:
    for one in (state(), state(bus={"groups": {}}, segment=4, outstanding=2)):
        assert RunState.from_json(json.loads(json.dumps(one.to_json()))) == one


# --- which cut -------------------------------------------------------------------------------------------------------


class Stores:
    def __init__(self, folder: Path) -> None:
        self.snapshots = CheckpointStore(folder / "snapshots", 9)
        self.checkpoints = CheckpointStore(folder / "checkpoints", 9)

    def write(self, store: CheckpointStore, step: int) -> Path:
        def fill(folder: Path) -> None:
            (folder / BACKEND_FOLDER).mkdir()
            (folder / BACKEND_FOLDER / "weights").write_text(f"{step:03d}")

        return store.write(step, fill, state(step).to_json())

    def newest(self) -> tuple[str, int] | None:
        found = newest_state(self.snapshots, self.checkpoints)
        return None if found is None else (found[0].parent.parent.name, found[1].step)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def test_the_newest_cut_wins_and_of_equals_the_snapshot(stores: Stores) -> None:
    assert stores.newest() is None
    stores.write(stores.checkpoints, 2)
    assert stores.newest() == ("checkpoints", 2)
    stores.write(stores.snapshots, 1)
    assert stores.newest() == ("checkpoints", 2)
    stores.write(stores.snapshots, 2)
    assert stores.newest() == ("snapshots", 2)
    stores.write(stores.snapshots, 12)
    stores.write(stores.checkpoints, 4)
    assert stores.newest() == ("snapshots", 12)
    assert [one.step for one in complete_states(stores.snapshots)] == [1, 2, 12]


@pytest.mark.parametrize("kind", ["snapshots", "checkpoints"])
@pytest.mark.parametrize("damage", ["content", "missing", "marker", "short"])
def test_rule_rr4_a_damaged_newest_cut_is_an_error_that_names_it_and_the_way_out(
    stores: Stores, kind: str, damage: str
) -> None:
    stores.write(stores.snapshots, 1)
    stores.write(stores.checkpoints, 1)
    newest = stores.write(getattr(stores, kind), 5)
    weights, marker = newest / BACKEND_FOLDER / "weights", newest / "complete.json"
    {
        "content": lambda: weights.write_text("bad"),
        "missing": weights.unlink,
        "marker": lambda: marker.write_text("{"),
        "short": lambda: weights.write_text(""),
    }[damage]()
    with pytest.raises(
        UserError, match=f"{kind.removesuffix('s')} {newest} is damaged: .*to resume from the one before it"
    ):
        stores.newest()
    shutil.rmtree(newest)
    assert stores.newest() == ("snapshots", 1)


def test_an_old_damaged_cut_and_one_that_was_being_written_are_passed_over(stores: Stores) -> None:
    old = stores.write(stores.snapshots, 1)
    stores.write(stores.snapshots, 3)
    (old / BACKEND_FOLDER / "weights").unlink()
    (old.parent / ".writing-step-000009").mkdir()
    assert stores.newest() == ("snapshots", 3)


@pytest.mark.parametrize(
    ("known", "stages"),
    [
        (state(2), [("warm-up", 3), ("rl", 5)]),
        (state(2), [("warm-up", 9)]),
        (state(3), [("warm-up", 3)]),
        (state(4, 1), [("warm-up", 3), ("rl", 1), ("more", 2)]),
        (state(4, 1), [("warm-up", 3), ("rl", 99)]),
    ],
)
def test_stages_that_may_follow_a_cut(known: RunState, stages: list[tuple[str, int]]) -> None:
    check_stages(known, stages)


@pytest.mark.parametrize(
    ("known", "stages", "message"),
    [
        (state(4, 1), [("warm-up", 4), ("rl", 5)], "stages that have begun must stay as they were"),
        (state(4, 1), [("other", 3), ("rl", 5)], "stages that have begun must stay as they were"),
        (state(2), [("other", 3), ("rl", 5)], "stages that have begun must stay as they were"),
        (state(3), [("warm-up", 2), ("rl", 5)], "stage 'warm-up' would end at step 2, but the checkpoint is of step 3"),
        (state(3, outstanding=2), [("warm-up", 3), ("rl", 5)], "with 2 groups in flight; give it more steps"),
    ],
)
def test_stages_that_may_not(known: RunState, stages: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(known, stages)


# --- real runs -------------------------------------------------------------------------------------------------------


def file_config(folder: Path, sums: range, **data: Any) -> RunConfig:
    lines = [json.dumps({"prompt": f"{number}+1=", "reference": str(number + 1)}) for number in sums]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    source = {"name": "sums", "type": "jsonl", "path": str(folder / "sums.jsonl"), "task": "addition"}
    tree = tiny_tree(folder)
    stages = [{"name": "rl", "steps": 5, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 2}}]
    return tiny_config(folder, data={**tree["data"], "sources": [source], **data}, stages=stages)


def keys(config: RunConfig) -> Counter[tuple[str, int, int]]:
    ledger = open_ledger(config)
    found = Counter(ledger.trained_keys())
    ledger.close()
    return found


def fail_at_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Snapshots) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Snapshots, "begin", fail)


async def test_case_b5_changed_data_is_refused_or_accepted_by_name_and_every_prompt_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL#2519. An accepted change survives that the run dies before its next snapshot."""
    await train(file_config(tmp_path, range(9)), stop_after=2)
    changed = file_config(tmp_path, range(7))
    with pytest.raises(
        DataError, match=r"'sums' is not the data set of the saved state: .*was 9, now 7.*data.accept_changes=true"
    ):
        await train(changed, resume=True)
    accepting = file_config(tmp_path, range(7), accept_changes=True)
    with monkeypatch.context() as patch:
        fail_at_the_next_snapshot(patch)
        with pytest.raises((RuntimeError, ExceptionGroup)):
            await train(accepting, resume=True)
    summary, _ = await train(accepting, resume=True)
    assert summary["ledger"]["balances"]
    found = keys(accepting)
    assert sum(found.values()) == 20
    assert max(found.values()) == 1


async def test_the_journal_s_folder_may_be_lost_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the groups in flight run again; what that leaves behind is no obstacle to the next resume."""
    config = tiny_config(tmp_path)
    await train(config, stop_after=5)
    for newest in (run_root(config) / "checkpoints").glob("step-*"):
        shutil.rmtree(newest)
    shutil.rmtree(run_root(config) / "journal")
    with monkeypatch.context() as patch:
        fail_at_the_next_snapshot(patch)
        with pytest.raises((RuntimeError, ExceptionGroup)):
            await train(config, resume=True)
    summary, _ = await train(config, resume=True)
    assert summary["ledger"]["balances"]
    assert summary["ledger"]["trained"] == 3 * 16 + 5 * 4
    assert max(keys(config).values()) == 1


@pytest.mark.parametrize("first", [True, False])
async def test_bus_journal_may_be_switched_between_two_lives(first: bool, tmp_path: Path) -> None:
    await train(tiny_config(tmp_path, bus={"journal": first}), stop_after=4)
    config = tiny_config(tmp_path, bus={"journal": not first})
    summary, _ = await train(config, resume=True)
    assert summary["ledger"]["trained"] == 3 * 16 + 5 * 4
    assert max(keys(config).values()) == 1
    assert summary["ledger"]["balances"]
