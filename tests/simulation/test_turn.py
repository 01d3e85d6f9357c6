"""Schedules of device turns break no rule; each decision of the table, broken, is caught."""

import io
from collections.abc import Callable

import pytest

from relax.runtime import turn
from relax.runtime.turn import Grant, Instruction, TurnTable, Yield
from relax.simulation.turn import TurnWorld, draw_turn_setting, main, simulate_turns

Patch = Callable[[pytest.MonkeyPatch], None]


def test_rules_dt1_dt3_hold_in_2000_schedules() -> None:
    failures = [text for seed in range(2000) if (text := simulate_turns(seed))]
    assert not failures, failures[0]


def test_schedules_show_what_they_attack_and_a_seed_is_one_history() -> None:
    def history(seed: int) -> list[str]:
        world = TurnWorld(draw_turn_setting(seed))
        world.run()
        return world.events

    text = " ".join(event for seed in range(100) for event in history(seed))
    for word in ("Yield", "Refuse", "Offload", "Onload", "crashes", "lives again", "withdraws", "cannot be moved"):
        assert word in text, word
    assert history(7) == history(7) != history(8)


def newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    request = TurnTable.request

    def reversed_request(self: TurnTable, holder: str, now_s: float) -> list[Instruction]:
        instructions = request(self, holder, now_s)
        self._place(holder).queue.sort(reverse=True)
        return instructions

    monkeypatch.setattr(TurnTable, "request", reversed_request)


def never_urge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnTable, "_urge", lambda self, device, now_s: [])


def urge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    urge = TurnTable._urge
    monkeypatch.setattr(TurnTable, "_urge", lambda self, device, now_s: urge(self, device, now_s + 1e9))


def grant_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "Offload", lambda holder: Grant(holder))


def forget_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: TurnTable, holder: str, now_s: float) -> list[Instruction]:
        device = self._places.pop(holder)
        del device.resident[holder]
        return []

    monkeypatch.setattr(TurnTable, "gone", gone)


def keep_the_refused_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: TurnTable, holder: str, reason: str, now_s: float) -> list[Instruction]:
        self._end_move(self._place(holder), holder, now_s)
        return []

    monkeypatch.setattr(TurnTable, "failed", failed)


def grant_while_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    request = TurnTable.request

    def hasty(self: TurnTable, holder: str, now_s: float) -> list[Instruction]:
        instructions = request(self, holder, now_s)
        device = self._place(holder)
        if device.moving and device.turn == holder:
            device.granted_s = now_s
            return [*instructions, Grant(holder)]
        return instructions

    monkeypatch.setattr(TurnTable, "request", hasty)


def lose_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnTable, "tick", lambda self, now_s: [])


def yield_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = TurnTable.tick

    def twice(self: TurnTable, now_s: float) -> list[Instruction]:
        return [one for one in tick(self, now_s) for _ in range(2 if isinstance(one, Yield) else 1)]

    monkeypatch.setattr(TurnTable, "tick", twice)


@pytest.mark.parametrize(
    ("patch", "rules"),
    [
        (newest_first, ("DT3",)),
        (never_urge, ("DT3",)),
        (urge_at_once, ("DT3",)),
        (grant_beside_others, ("DT1", "DT3")),
        (forget_the_dead, ("DT1", "DT3", "progress", "crash")),
        (keep_the_refused_turn, ("progress",)),
        (grant_while_moving, ("DT1", "DT3")),
        (lose_alarms, ("DT3",)),
        (yield_twice, ("DT3",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_decision_is_caught_within_1000_schedules(
    patch: Patch, rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    broken = next((found for seed in range(1000) if (found := _broken(seed))), None)
    assert broken is not None
    assert broken in rules


def _broken(seed: int) -> str | None:
    try:
        text = simulate_turns(seed)
    except KeyError:
        return "crash"
    return None if text is None else text.split(":")[0].split(" breaks ")[1]


def test_the_command_counts_and_shows_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    assert main(["--seeds", "50"], out) == 0
    assert "50 schedules of device turns: none broken" in out.getvalue()
    never_urge(monkeypatch)
    out = io.StringIO()
    assert main(["--seeds", "50"], out) == 1
    assert "breaks DT3: [DT3]" in out.getvalue()
    assert "last events:" in out.getvalue()
