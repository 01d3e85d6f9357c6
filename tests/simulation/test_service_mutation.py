"""Decisions of recovery broken one at a time: the simulation of the services must notice each, within a few seeds."""

from collections.abc import Callable
from typing import Any

import pytest

from relax.bus.index import BusIndex
from relax.bus.state import Change
from relax.services.controller import Controller
from relax.services.gate import Gate
from relax.services.recovery import Recovery
from relax.services.snapshot import Snapshots
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


def _ledger_lags_behind_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    async def flush(self: Any, state: Any) -> None: ...

    patch.setattr(Snapshots, "_flush", flush)


MUTATIONS = (
    _leases_stay,
    _rows_are_final_before_the_event,
    _taken_groups_stay_taken,
    _groups_without_rows_stay_at_the_gate,
    _ledger_lags_behind_the_snapshot,
)
SEEDS = 15


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_recovery_is_noticed(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert any(simulate_services(seed) is not None for seed in range(SEEDS))
