"""What a run of the services left behind, held against the contract: ledger, steps, versions and trained samples.

Called by `services` after each step and at the end. It reads what a person would read: the ledger and the published
versions; and it recomputes whose tokens are whose from the request seeds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from relax.bus.row import BusStatus
from relax.core.id import GroupId, TrajectoryId, group_id, index_of, trajectory_id
from relax.core.message import PromptKey
from relax.engines.random import hashes
from relax.services.ledger import Ledger, SampleRow, TrajectoryRow, parse_versions
from relax.simulation.fake import MAX_TOKENS, VOCABULARY
from relax.simulation.scenario import Scenario, StageScenario
from relax.simulation.violation import Violation
from relax.tasks.episode import request_seed

_COUNTS = ("trained", "filtered", "failed", "dropped", "outstanding")


def check_space(status: BusStatus) -> None:
    """TQ5: what is stored stays within what was reserved, and that within the bounds."""
    if status.charged_rows > status.max_rows or status.charged_bytes > status.max_bytes:
        raise Violation("TQ5", f"the bus is over its bounds: {status}")
    if status.over_rows:
        raise Violation("TQ5", f"groups hold {status.over_rows} rows more than they reserved")


class Audit:
    """The checks at the end of a run."""

    def __init__(self, scenario: Scenario, ledger: Ledger, admitted: int, steps: Sequence[Sequence[str]]) -> None:
        self._scenario, self._ledger, self._steps = scenario, ledger, steps
        self._stages = {stage.name: stage for stage in scenario.stages}
        self._groups = [ledger.group(group_id(number)) for number in range(admitted)]

    def run(self, counts: Mapping[str, int]) -> None:
        self._check_sums(counts)
        self._check_groups()
        self._check_tokens()
        self._check_trained()

    def _check_sums(self, counts: Mapping[str, int]) -> None:
        """AC1 at every step and at the end; ST1 by the ledger's own question."""
        columns = {name: dict(self._ledger.metric(f"ledger/{name}")) for name in ("admitted", *_COUNTS)}
        num_steps = sum(stage.steps for stage in self._scenario.stages)
        if sorted(columns["admitted"]) != list(range(num_steps)):
            raise Violation("ST7", f"steps {sorted(columns['admitted'])} have metrics, {num_steps} were run")
        for step, admitted in columns["admitted"].items():
            parts = {name: columns[name][step] for name in _COUNTS}
            if admitted != sum(parts.values()):
                raise Violation("AC1", f"step {step}: {admitted} admitted, {parts}")
        if counts["outstanding"] or counts["admitted"] != len(self._groups):
            raise Violation("AC1", f"the run is over with {counts}")
        if any(self._ledger.counts().get(name, 0) != counts[name] for name in _COUNTS[:-1]):
            raise Violation("AC1", f"ledger {self._ledger.counts()}, account {counts}")
        # Where tokens over the bound are masked, that some were sampled says nothing; the trainer asserts what it trains.
        masked = {name for name, stage in self._stages.items() if stage.policy.over_age == "mask"}
        steps = sum(stage.steps for stage in self._stages.values())
        bounds = {name: steps if name in masked else stage.max_staleness for name, stage in self._stages.items()}
        broken = self._ledger.staleness_violations(bounds)
        if broken:
            raise Violation("ST1", f"{broken[0]}, bounds {bounds}")

    def _check_groups(self) -> None:
        """AC3, AC4: one row per admission number, one prompt once, all siblings of whatever was judged."""
        missing = [group_id(number) for number, group in enumerate(self._groups) if group is None]
        if missing:
            raise Violation("AC1", f"groups {missing[:5]} were admitted and have no end")
        keys = Counter((g["source"], g["record"], g["pass_number"], g["attempt"]) for g in self._groups if g)
        if max(keys.values(), default=1) > 1:
            raise Violation("AC3", f"prompt {keys.most_common(1)[0]} was admitted more than once")
        per_step: Counter[int] = Counter()
        for group in self._groups:
            assert group is not None
            self._check_group(group, self._stages[group["stage"]])
            per_step[group["step"]] += group["state"] == "trained"
        for step, count in per_step.items():
            if step is not None and count > self._stage_of(step).groups_per_step:
                raise Violation("ST3", f"step {step} trained {count} groups")

    def _check_group(self, group: Mapping[str, object], stage: StageScenario) -> None:
        rows = self._ledger.children(TrajectoryRow, str(group["id"]))
        if group["state"] in ("trained", "filtered") or (
            group["state"] == "failed" and stage.algorithm != "supervised"
        ):
            expected = [trajectory_id(GroupId(str(group["id"])), sibling) for sibling in range(stage.group_size)]
            if [row["id"] for row in rows] != expected:
                raise Violation("AC4", f"{group['id']} ended {group['state']} with rows {[row['id'] for row in rows]}")
        if group["state"] != "trained" and not group["reason"]:
            raise Violation("AC1", f"{group['id']} ended {group['state']} without a reason")
        if group["state"] == "trained" and stage.algorithm != "supervised":
            for row in rows:
                if row["reward"] is None and row["failure"] is None and '"failure": null' in row["parts"]:
                    raise Violation("AC5", f"{row['id']} has neither a reward nor a failure")

    def _stage_of(self, step: int) -> StageScenario:
        end = 0
        for stage in self._scenario.stages:
            end += stage.steps
            if step < end:
                return stage
        raise Violation("ST7", f"step {step} is beyond the last stage")

    def _check_tokens(self) -> None:
        """AC3: the reply under an id is the one that its request seed gives, whatever engine answered and when."""
        for group in self._groups:
            assert group is not None
            if self._stages[group["stage"]].algorithm == "supervised":
                continue
            key = PromptKey(group["source"], group["record"], group["pass_number"], group["attempt"])
            turns = 1 + key.record % self._scenario.task.turns
            for row in self._ledger.children(TrajectoryRow, group["id"]):
                if row["failure"] is None:
                    expected = [self._reply(key, row["id"], turn) for turn in range(turns)]
                    if row["text"] != "\n".join(expected):
                        raise Violation("AC3", f"{row['id']} holds {row['text']!r}, its seeds give {expected}")

    def _reply(self, key: PromptKey, id: TrajectoryId, turn: int) -> str:
        seed = request_seed(self._scenario.seed, key, index_of(id), turn)
        length = 1 + int(hashes(seed, 2**63)[0] % MAX_TOKENS)
        return " ".join(str(int(token % VOCABULARY)) for token in hashes(seed, range(length)))

    def _check_trained(self) -> None:
        """No sample is trained twice; each step trained just what the ledger says, rows without a gradient left out."""
        seen = Counter(sample for step in self._steps for sample in step)
        if max(seen.values(), default=1) > 1:
            raise Violation("AC2", f"sample {seen.most_common(1)[0]} was trained more than once")
        bound: dict[int, tuple[set[str], set[str]]] = {step: (set(), set()) for step in range(len(self._steps))}
        for group in self._groups:
            assert group is not None
            if group["step"] is None:
                continue
            everything, needed = bound[group["step"]]
            rows = self._ledger.children(TrajectoryRow, group["id"])
            judged = [row for row in rows if row["reward"] is not None]
            for row in judged or rows:  # AC4: of a judged group the survivors only
                for sample in self._ledger.children(SampleRow, row["id"]):
                    everything.add(sample["id"])
                    if self._has_gradient(group["stage"], sample) and not self._may_be_masked(group, row):
                        needed.add(sample["id"])
        for step, samples in enumerate(self._steps):
            everything, needed = bound[step]
            if not needed <= set(samples) <= everything:
                raise Violation(
                    "TQ10",
                    f"step {step}: never trained {sorted(needed - set(samples))}, not its own {sorted(set(samples) - everything)}",
                )

    def _may_be_masked(self, group: Mapping[str, object], row: Mapping[str, object]) -> bool:
        """ST5: some token of the trajectory is over the bound, so a sample of it may have none that is trained."""
        stage = self._stages[str(group["stage"])]
        oldest = min((version for version, _ in parse_versions(str(row["versions"]))), default=None)
        return oldest is not None and int(str(group["step"])) - oldest > stage.max_staleness

    def _has_gradient(self, stage: str, sample: Mapping[str, object]) -> bool:
        if not sample["tokens"]:
            return False
        if self._stages[stage].algorithm == "supervised" or self._stages[stage].kl_weight:
            return True
        return bool(sample["advantage"])
