"""One sample token by token: from the sample files of the run where its step was kept, else what the ledger knows of it.

Read by `relax show sample`. Returns data; the command renders it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.core.error import UserError
from relax.core.id import group_of
from relax.services.directory import RunDirectory
from relax.services.reader import LedgerReader
from relax.services.sample_file import find_trajectory, sample_files, step_of
from relax.services.show import GroupView, SampleView, TrajectoryView, read_group

SAMPLES = "samples"
"""The folder of sample files in a run directory."""
_NOT_NUMBERS = ("token_ids", "mask", "versions")


@dataclass(frozen=True, slots=True)
class Token:
    """One position of a sample's span. `values` are its other columns, e.g. `behaviour_logprobs`; `text` None: no tokenizer."""

    position: int
    id: int
    text: str | None
    sampled: bool
    version: int | None
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class SampleDetail:
    """`tokens` is None where only the ledger speaks of the sample, and `note` then says why."""

    id: str
    group: GroupView
    trajectory: TrajectoryView
    sample: SampleView
    tokens: tuple[Token, ...] | None
    source: str
    note: str


def read_sample(ledger: LedgerReader, directory: RunDirectory, id: str, tokenizer: str | None = None) -> SampleDetail:
    """`id` is a sample, or a trajectory that has one sample. `tokenizer` is a folder whose tokenizer shows tokens as text.

    Raises UserError that says which ids there are.
    """
    id = id.strip()
    group = read_group(ledger, group_of(id))
    if not isinstance(group, GroupView):
        raise UserError(f"{id} was evaluated, not trained, and has no samples; see `relax show group {group_of(id)}`")
    trajectory, sample = _chosen(group, id)
    folder = directory.root / SAMPLES
    found, problem = _find(folder, trajectory.id, group.step)
    if found is not None and [sample.start, sample.stop] not in found["spans"]:
        problem = f"{found['file']} holds another attempt at this trajectory, which a resume took back"
        found = None
    if found is None:
        return SampleDetail(sample.id, group, trajectory, sample, None, "ledger", problem or _why_not(folder, group))
    tokens = _tokens(found, sample, _texts(tokenizer))
    return SampleDetail(sample.id, group, trajectory, sample, tokens, str(found["file"]), "")


def _chosen(group: GroupView, id: str) -> tuple[TrajectoryView, SampleView]:
    trajectories = {trajectory.id: trajectory for trajectory in group.trajectories}
    samples = {sample.id: (trajectory, sample) for trajectory in group.trajectories for sample in trajectory.samples}
    if id in samples:
        return samples[id]
    if id in trajectories and len(trajectories[id].samples) == 1:
        return trajectories[id], trajectories[id].samples[0]
    if id in trajectories and not trajectories[id].samples:
        failure = trajectories[id].failure
        raise UserError(f"trajectory {id} has no sample{f': it failed ({failure})' if failure else ''}")
    some = ", ".join(list(samples)[:4]) or "none"
    what = "is a group" if id == group.id else "names no sample"
    raise UserError(f"{id} {what}; samples of {group.id}: {some}{', ...' if len(samples) > 4 else ''}")


def _find(folder: Path, trajectory: str, step: int | None) -> tuple[dict[str, Any] | None, str]:
    """The stored row, and what is wrong with the files when they cannot be read."""
    if not sample_files(folder):
        return None, ""
    try:
        return find_trajectory(folder, trajectory, step), ""
    except Exception as error:  # pyarrow's errors are of many kinds, and the ledger still has an answer
        return None, f"the sample files in {folder} cannot be read ({type(error).__name__}: {error})"


def _why_not(folder: Path, group: GroupView) -> str:
    kept = [step_of(path) for path in sample_files(folder)]
    if not kept:
        return f"{folder} holds no sample files yet; run.samples.every says how often one is written"
    steps = f"{', '.join(map(str, kept[-8:]))}"
    if group.step is None:
        return f"the group was not trained and is in none of the sample files (steps {steps})"
    return f"no sample file was kept of step {group.step}; there are those of steps {steps}"


def _tokens(row: dict[str, Any], sample: SampleView, texts: Sequence[str] | None) -> tuple[Token, ...]:
    numbers = [
        name
        for name, value in row.items()
        if isinstance(value, list)
        and len(value) == len(row["token_ids"])
        and name not in _NOT_NUMBERS
        and name != "spans"
    ]
    tokens: list[Token] = []
    for position in range(sample.start, sample.stop):
        id, version = row["token_ids"][position], None if row["versions"] is None else row["versions"][position]
        tokens.append(
            Token(
                position=position,
                id=id,
                text=texts[id] if texts is not None and id < len(texts) else None,
                sampled=row["mask"][position],
                version=version if version is not None and version >= 0 else None,
                values={name: row[name][position] for name in numbers},
            )
        )
    return tuple(tokens)


def _texts(folder: str | None) -> list[str] | None:
    """Each token as the tokenizer writes it; None when the folder has no fast tokenizer."""
    path = Path(folder).expanduser() / "tokenizer.json" if folder else None
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # it raises plain Exception; the ids are shown without it
        return None
    return [tokenizer.id_to_token(id) or "" for id in range(tokenizer.get_vocab_size())]
