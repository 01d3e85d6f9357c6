"""The register: what happened to a group, until a snapshot covers it, and the same again after a restart (AC1, AC2, TQ2)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relax.bus.row import BusStatus, Fetched
from relax.core.error import InvariantError
from relax.core.id import GroupId, group_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.services.access import StepOutcome
from relax.services.account import Account
from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.register import Ending, Register
from relax.services.sample_file import SampleFiles
from tests.services.crash_world import Inline, rows_of
from tests.services.test_sample_file import fetched as samples_of


def prompt(number: int) -> Prompt:
    return Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", f"{number}? \ud800"),), {"n": [number]})


def fetched(group: GroupId, *rewards: float | None) -> Fetched:
    turns = {"turns": [[0, 1, 3, "stop", "x"]], "messages": [], "end": "stop", "info": {}}
    cells: dict[str, dict[str, Any]] = {group: {}}
    for index, reward in enumerate(rewards):
        cells[f"{group}/{index}"] = {"turns": turns, "failure": None, **({} if reward is None else {"reward": reward})}
    return Fetched(tuple(cells), cells)


class World:
    def __init__(self) -> None:
        self.ledger, self.number = Ledger(":memory:"), 0
        self.projection = Projection(self.ledger, Inline(), lambda: self.number, lambda step, metrics: None)
        self.register = Register(Account(), self.projection)
        self.seen: list[tuple[int, list[float]]] = []
        self.register.observe = lambda key, rewards: self.seen.append((key.record, list(rewards)))

    def admit(self, *numbers: int) -> list[GroupId]:
        for number in numbers:
            self.register.admitted(group_id(number), prompt(number), 1, 3, "only")
        return [group_id(number) for number in numbers]

    def rows(self) -> dict[str, tuple[Any, ...]]:
        asyncio.run(self.projection.flush())
        return rows_of(self.ledger)

    def dumped(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.register.dump()))  # type: ignore[no-any-return]


@pytest.fixture
def world() -> World:
    return World()


def test_rule_ac1_an_end_of_a_step_is_final_when_it_is_settled_and_not_before(world: World) -> None:
    first, second = world.admit(0, 1)
    world.number = 7
    world.register.stepped(first, fetched(first, 1.0), Ending("trained", "", 4))
    world.register.ended(second, fetched(second), "failed", "a test")
    assert world.rows().keys() == {second}
    assert world.register.unsettled(4) == []
    assert world.register.unsettled(5) == [first]
    world.number = 9
    world.register.settled([first, second, group_id(77)])
    rows = world.rows()
    assert rows.keys() == {first, f"{first}/0", second}
    assert (rows[first][1], rows[second][1]) == (9, 7), "each row has the event that closed it"
    world.register.settled([first])
    assert world.register.unsettled(5) == []
    for group in (first, second):
        with pytest.raises(KeyError):
            world.register.prompt(group)  # nothing is kept for ever


def test_the_ledger_is_the_same_from_the_columns_that_it_names(world: World, tmp_path: Path) -> None:
    """Tokens, logprobs and media are not read for it; where trajectories are kept whole, every cell is."""
    (group,) = world.admit(0)
    whole = samples_of(group)
    columns = world.register.columns
    assert columns is not None
    assert whole.cells[f"{group}/0"].keys() - columns == {"token_ids", "behaviour_logprobs"}
    part = {id: {name: cells[name] for name in cells if name in columns} for id, cells in whole.cells.items()}
    found = []
    for fetched in (whole, Fetched(whole.ids, part)):
        metrics: dict[int, Any] = {}
        other = World()
        other.projection._on_step = metrics.__setitem__
        other.admit(0)
        other.register.ended(group, fetched, "filtered", "a test")
        bus = BusStatus(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {})
        other.projection.stepped(StepOutcome(0, True, "", {}), other.register.account.counts(), 0, bus)
        found.append((other.rows(), metrics, other.seen))
    assert found[0] == found[1]
    assert len(found[0][0]) == 7
    files = SampleFiles(tmp_path, every=2, keep=1)
    keeping = Projection(world.ledger, Inline(), lambda: 0, lambda step, metrics: None, samples=files)
    assert Register(Account(), keeping).columns is None
    asyncio.run(files.flush(0))
    assert Register(Account(), keeping).columns == columns


def test_rule_tq2_a_step_that_is_taken_back_leaves_its_groups_outstanding(world: World) -> None:
    (group,) = world.admit(0)
    before = (world.dumped()["outstanding"], world.register.account.counts(), world.projection.sampled_tokens)
    for _ in range(2):
        world.register.stepped(group, fetched(group, 1.0, 2.0), Ending("dropped", "nonfinite", 4))
        assert world.register.account.counts()["dropped"] == 1
        assert world.projection.sampled_tokens == world.projection.wasted_tokens == 4
        world.register.reopened(group)
        world.register.reopened(group)
        assert (
            world.dumped()["outstanding"],
            world.register.account.counts(),
            world.projection.sampled_tokens,
        ) == before
    world.register.stepped(group, fetched(group, 1.0), Ending("trained", "", 5))
    world.register.settled([group])
    assert world.rows()[group][10] == "trained"


def test_the_source_is_shown_every_reward_once_however_often_the_step_is_trained(world: World) -> None:
    first, second, third = world.admit(0, 1, 2)
    world.register.stepped(first, fetched(first, 1.0, None, 0.0), Ending("trained", "", 4))
    world.register.reopened(first)
    world.register.stepped(first, fetched(first, 1.0, None, 0.0), Ending("trained", "", 4), is_retaken=True)
    world.register.ended(second, fetched(second, 0.5), "filtered", "equal")
    world.register.ended(third, fetched(third, None), "failed", "a test")
    assert world.seen == [(0, [1.0, 0.0]), (1, [0.5])]


def test_rule_ac3_a_group_that_is_admitted_again_keeps_its_number_and_is_counted_once(world: World) -> None:
    (group,) = world.admit(5)
    assert world.register.next_group() == group_id(6)
    world.admit(5)
    assert world.register.next_number == 6
    assert world.register.account.counts()["admitted"] == 1
    world.register.ended(group, fetched(group), "failed", "a test")
    with pytest.raises(InvariantError, match="AC1"):
        world.register.account.end(group, "failed")


def test_rule_rr3_a_restored_register_goes_on_as_the_first_would(world: World) -> None:
    groups = world.admit(*range(6))
    world.register.raised(groups[3], 2, 4)
    world.register.ended(groups[0], fetched(groups[0], 1.0), "filtered", "why (so)")
    world.register.stepped(groups[4], fetched(groups[4], 1.0), Ending("trained", "", 3))
    world.register.stepped(groups[1], fetched(groups[1]), Ending("dropped", "over_age", 3))
    dump, rows = world.dumped(), {GroupId(f"g{n:06d}"): fetched(GroupId(f"g{n:06d}"), 1.0) for n in (4,)}

    again = World()
    again.register.restore(dump)
    assert again.register.outstanding() == world.register.outstanding() == [(groups[n], prompt(n)) for n in (2, 3, 5)]
    assert again.register.unsettled(9) == []
    again.register.restore_unsettled(dump, lambda group: rows.get(group, fetched(group)), "only")
    assert again.dumped() == dump
    assert again.register.unsettled(9) == [groups[4], groups[1]]
    again.register.account.check(3)
    for one in (world, again):
        one.number = 20
        one.register.reopened(groups[1])
        one.register.admitted(groups[1], one.register.prompt(groups[1]), 1, 3, "only")
        one.register.settled([groups[4]])
        one.register.ended(groups[1], fetched(groups[1]), "failed", "a test")
        for group in (groups[2], groups[3], groups[5]):
            one.register.admitted(group, one.register.prompt(group), 2, 4, "only")
            one.register.ended(group, fetched(group, 1.0), "failed", "a test")
        one.register.account.check(0)
    assert again.register.account.counts() == world.register.account.counts()
    assert again.rows() == {id: row for id, row in world.rows().items() if not id.startswith(groups[0])}
    assert again.dumped() == world.dumped()
    assert (again.projection.sampled_tokens, again.projection.wasted_tokens) == (
        world.projection.sampled_tokens,
        world.projection.wasted_tokens,
    )
