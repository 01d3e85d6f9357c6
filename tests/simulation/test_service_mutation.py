"""Decisions of recovery broken one at a time: the simulation of the services must notice each, within a few seeds."""

from collections.abc import Callable
from typing import Any

import pytest

from relax.bus.index import BusIndex
from relax.bus.state import Change
from relax.services.controller import Controller
from relax.services.gate import Gate
from relax.services.recovery import Recovery
from relax.simulation.services import simulate_services

Patch = Callable[[pytest.MonkeyPatch], None]


def _leases_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BusIndex, "release_all", lambda self, cause: Change())


def _rows_are_final_before_the_event(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: Any, before: int) -> None:
        groups = self.register.unsettled(before)
        if groups:
            self.register.settled(groups)
            await self._bus.settle(groups)

    patch.setattr(Controller, "settle", settle)


def _taken_groups_stay_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "put_back", lambda self, groups: None)


def _groups_without_rows_stay_at_the_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "_withdraw", lambda self: None)


FIRST_SEED = {
    _leases_stay: 0,
    _rows_are_final_before_the_event: 0,
    _taken_groups_stay_taken: 0,
    _groups_without_rows_stay_at_the_gate: 25,
}
SEEDS = 15


@pytest.mark.parametrize("mutation", FIRST_SEED, ids=lambda mutation: mutation.__name__)
def test_a_broken_recovery_is_noticed(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert any(simulate_services(FIRST_SEED[mutation] + number) is not None for number in range(SEEDS))
