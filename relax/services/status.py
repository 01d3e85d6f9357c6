"""How a run stands, read from its directory: by anyone, during the run and after it.

Read by `relax status`. The lock says whether a process owns the run now, `status.json` where its gate and its roles stand, the
ledger what has been measured.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.outline import outline_of
from relax.services.reader import open_ledger
from relax.services.role_status import RoleStatus, read_roles
from relax.training.checkpoint import CheckpointStore

RunState = Literal["running", "finished", "unfinished", "empty"]
"""`unfinished`: no process owns it, and it can be resumed. `empty`: it has not finished a step."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`metrics` holds the newest value of every metric; `gate` is what the controller last said; `age_s` is how old that is.

    `roles` are the running ones (none where all of the run is one process), their signs of life as old as they are now.
    `notes` are sentences about files that could not be read; what they would tell is taken as unknown.
    """

    run: str
    directory: str
    state: RunState
    owner: int | None
    stage: str
    step: int
    total: int
    age_s: float | None
    gate: dict[str, Json]
    account: dict[str, Json]
    evaluations: dict[str, dict[str, float]]
    metrics: dict[str, float]
    checkpoint: str | None
    snapshot: str | None
    quarantined: int
    notes: tuple[str, ...] = ()
    roles: tuple[RoleStatus, ...] = ()
    ending: str = ""
    """Why it is not under way, where that is known."""


def read_status(config: RunConfig, directory: RunDirectory) -> RunStatus:
    """A snapshot. Reads only."""
    outline = outline_of(config)
    gate, notes = _read_gate(directory)
    roles, num_bad = read_roles(gate.get("roles"))
    if num_bad:
        notes = (*notes, f"{num_bad} of the roles in {directory.status.name} cannot be read and are left out")
    metrics, account, evaluations, step = _read_ledger(config, directory)
    step = max(step, int(gate.get("step", 0)))
    owner = directory.owner
    state: RunState = "unfinished" if step else "empty"
    if directory.is_finished:
        state = "finished"
    elif owner is not None:
        state = "running"
    age_s = max(0.0, time.time() - directory.status.stat().st_mtime) if directory.status.exists() else None
    return RunStatus(
        run=config.run.name,
        directory=str(directory.root),
        state=state,
        owner=owner,
        stage=outline.stages[outline.index_of(min(step, outline.total - 1))].name,
        step=step,
        total=outline.total,
        age_s=age_s,
        gate={key: gate[key] for key in ("taken", "outstanding", "live", "closing", "paused") if key in gate},
        account=gate.get("account") or account,
        evaluations=evaluations,
        metrics=metrics,
        checkpoint=_newest(directory.checkpoints),
        snapshot=_newest(directory.snapshots),
        quarantined=directory.quarantine.read_bytes().count(b"\n") if directory.quarantine.exists() else 0,
        notes=notes,
        # Roles of a run that is over or was killed do nothing any more, whatever they last said.
        roles=tuple(role.aged(age_s or 0.0) for role in roles) if state == "running" else (),
        ending=_ending(directory) if state in ("unfinished", "empty") else "",
    )


def _ending(directory: RunDirectory) -> str:
    try:
        return directory.ending.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _newest(folder: Path) -> str | None:
    """The newest complete checkpoint or snapshot in a folder."""
    newest = CheckpointStore(folder).newest()
    return None if newest is None else str(newest)


def _read_gate(directory: RunDirectory) -> tuple[dict[str, Json], tuple[str, ...]]:
    """`status.json`, empty when it is absent, and what is wrong with it: a run replaces it whole, but a full disk or a person
    may have spoilt it."""
    try:
        found = json.loads(directory.status.read_text("utf-8"))
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, RecursionError) as error:
        return {}, (f"{directory.status.name} cannot be read ({error}) and is left out",)
    if not _is_gate(found):
        return {}, (f"{directory.status.name} is not what a run writes and is left out",)
    return found, ()


def _is_gate(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    step, account = found.get("step", 0), found.get("account") or {}
    reasons = account.get("reasons") or {} if isinstance(account, dict) else None
    return isinstance(step, int) and step >= 0 and isinstance(reasons, dict)


def _read_ledger(
    config: RunConfig, directory: RunDirectory
) -> tuple[dict[str, float], dict[str, Json], dict[str, dict[str, float]], int]:
    """Newest metrics, the account, the newest evaluation of each set, and how many steps were measured."""
    if not directory.ledger.exists():
        return {}, {}, {}, 0
    with open_ledger(directory) as ledger:
        evaluations: dict[str, dict[str, float]] = {}
        for item in config.eval.sets:
            points = ledger.metric(f"eval/{item.name}/reward")
            if points:
                evaluations[item.name] = {"step": points[-1][0], "reward": points[-1][1]}
        steps = ledger.metric("train/applied")
        metrics = _last_known(ledger.last_metrics())
        return metrics, ledger.note("account") or {}, evaluations, steps[-1][0] + 1 if steps else 0


def _last_known(metrics: Mapping[str, tuple[int, float | None]]) -> dict[str, float]:
    """The values; of threads only those that the newest step knows: an engine that has left idles no more."""
    idle = [step for name, (step, _) in metrics.items() if name.startswith("idle/")]
    return {
        name: value
        for name, (step, value) in metrics.items()
        if value is not None and (not name.startswith("idle/") or step == max(idle))
    }
