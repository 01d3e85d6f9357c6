"""What a run left in its directory, and how it differs from what another run left.

Used by `kill`. Reading is apart from comparing, so that the comparison is a plain function of two values.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from relax.services.ledger import Ledger

Key = tuple[str, int, int]
"""Source, record, pass: a prompt in one pass over the data."""
MOST_SHOWN = 3


@dataclass(frozen=True)
class Remains:
    """`weights` are digests of the final tensors by name; `rates` the learning rate of each step; `account` must balance (AC1)."""

    trained: tuple[Key, ...]
    weights: dict[str, str] = field(default_factory=dict)
    rates: tuple[tuple[int, float], ...] = ()
    balances: bool = True
    violations: tuple[str, ...] = ()


def read_remains(root: Path, bounds: dict[str, int]) -> Remains:
    """Of a finished run. `bounds` is the largest staleness per stage."""
    ledger = Ledger(root / "ledger.sqlite", read_only=True)
    try:
        account = ledger.note("account")
        ended = sum(account[state] for state in ("trained", "filtered", "failed", "dropped"))
        return Remains(
            tuple(ledger.trained_keys()),
            final_weights(root),
            tuple(ledger.metric("train/learning_rate")),
            account["admitted"] == ended + account["outstanding"],
            tuple(ledger.staleness_violations(bounds)),
        )
    finally:
        ledger.close()


def final_weights(root: Path) -> dict[str, str]:
    """Digests of the tensors of the newest checkpoint's model."""
    from safetensors import safe_open

    newest = sorted((root / "checkpoints").glob("step-*"))[-1]
    found: dict[str, str] = {}
    for path in sorted((newest / "model").glob("*.safetensors")):
        with safe_open(str(path), framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                found[name] = blake2b(tensors.get_tensor(name).tobytes(), digest_size=16).hexdigest()
    return found


def differences(expected: Remains, got: Remains, exact: bool) -> list[str]:
    """What must be equal and is not, in words; with `exact` (deterministic mode) weights and learning rates too."""
    found = [] if got.balances else ["the account does not balance (AC1)"]
    found += [f"stale beyond its bound (ST1): {text}" for text in got.violations[:MOST_SHOWN]]
    twice, missing = Counter(got.trained), Counter(expected.trained)
    surplus, lacking = twice - missing, missing - twice
    if surplus:
        found.append(f"{surplus.total()} prompts trained too often (AC2), e.g. {sorted(surplus)[:MOST_SHOWN]}")
    if lacking:
        found.append(f"{lacking.total()} prompts not trained (AC2), e.g. {sorted(lacking)[:MOST_SHOWN]}")
    if not exact:
        return found
    if got.rates != expected.rates:
        pairs = zip(expected.rates, got.rates, strict=False)
        where = next((ours for ours, theirs in pairs if ours != theirs), (len(got.rates), float("nan")))
        found.append(f"learning rates differ from step {where[0]} on ({len(got.rates)} of {len(expected.rates)} steps)")
    unequal = sorted(
        name for name in expected.weights | got.weights if expected.weights.get(name) != got.weights.get(name)
    )
    if unequal:
        found.append(f"{len(unequal)} of {len(expected.weights)} tensors differ, e.g. {unequal[:MOST_SHOWN]}")
    return found


def last_event(root: Path) -> str:
    """The kind of the newest event in the journal, with the number of steps that its snapshots cover; for the table of moments.

    A torn last line is what a kill leaves, so it is passed over.
    """
    files = sorted((root / "journal").glob("events-*.jsonl"))
    kind = "no event"
    for path in reversed(files):
        for line in reversed(path.read_bytes().splitlines()):
            try:
                kind = str(json.loads(line[line.index(b"[") :])[2])
            except (ValueError, IndexError):
                continue
            break
        if kind != "no event":
            break
    unfinished = [
        path.name for folder in ("snapshots", "checkpoints") for path in (root / folder).glob(".*") if path.is_dir()
    ]
    return f"{kind}{' while writing ' + unfinished[0] if unfinished else ''}"


def step_of(root: Path) -> int:
    """Steps that the run has published so far, as its status file says; 0 before the first."""
    try:
        return int(json.loads((root / "status.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return 0
