"""Cases D1 and D10 where the application decides: the temperatures of whoever scores, and groups of one survivor."""

from pathlib import Path

import numpy as np
import pytest
import torch

from relax.config.tree import warnings_of
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.error import ConfigError
from relax.core.id import group_id, sample_id, trajectory_id
from relax.data.quarantine import Quarantine
from relax.model.logprob import token_logprobs
from relax.services.assembly import Assembly
from tests.e2e.tiny import ADDITION, tiny_config, tiny_tree

IDS = frozen(np.array([3, 5, 7, 9, 11], dtype=np.int32))


def assembly_at(directory: Path, temperature: float) -> Assembly:
    tree = tiny_tree(directory)
    tree["stages"][1]["algorithm"]["kl_weight"] = 0.1
    source = {"name": "held", **ADDITION}
    return Assembly(
        tiny_config(
            directory,
            stages=tree["stages"],
            rollout={**tree["rollout"], "sampling": {"max_tokens": 3, "temperature": temperature}},
            eval={"sets": [{"name": "greedy", "source": source, "max_records": 2}]},
        ),
        Quarantine(),
    )


def logprobs_by(assembly: Assembly, model: object, temperature: float) -> np.ndarray:
    """float32[T], of the ids at `temperature`, by the one function of the model room."""
    ids = torch.from_numpy(IDS.copy()).long()
    allowed = torch.from_numpy(assembly.vocabulary.allowed.copy())
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]  # type: ignore[operator]
        values = token_logprobs(logits[:-1], ids[1:], temperature, allowed)
    return np.concatenate([np.zeros(1, np.float32), values.numpy()])


async def test_case_d1_whoever_scores_rollouts_scores_at_their_temperature(tmp_path: Path) -> None:
    """slime#2085: the reference (or a teacher) is a backend like the trainer's, and so is the proof of a load."""
    assembly = assembly_at(tmp_path, 0.7)
    try:
        model = assembly.copy_model()
        mask = frozen(np.arange(len(IDS)) > 0)
        row = TrainRow(sample_id(trajectory_id(group_id(0), 0), 0), IDS, mask, frozen(mask.astype(np.float32)))
        reference = assembly.make_backend(model)
        expected, plain = (logprobs_by(assembly, model, temperature) for temperature in (0.7, 1.0))
        for backend in (assembly.backend, reference):
            found = backend.logprobs([[(row,)]])[0][0][0]
            assert np.abs(found - expected).max() < 1e-5
            assert np.abs(found - plain).max() > 1e-3
        assert assembly.probe.temperature == 0.7
        assert assembly.sampling().temperature == 0.7
    finally:
        await assembly.close()


async def test_case_d1_evaluation_is_greedy_whatever_the_rollout_does(tmp_path: Path) -> None:
    """TRL#3029: and the temperature of an evaluation reaches nothing that trains."""
    assembly = assembly_at(tmp_path, 0.7)
    try:
        (greedy,) = assembly.evaluation_sets()
        assert greedy.sampling.temperature == 0.0
        assert assembly.sampling().temperature == 0.7
    finally:
        await assembly.close()


@pytest.mark.parametrize("temperature", [0, -1])
def test_case_d1_a_rollout_without_a_temperature_is_refused(tmp_path: Path, temperature: int) -> None:
    """slime#2297: greedy rollouts have no logprobs to train on."""
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        tiny_config(tmp_path, rollout={"sampling": {"temperature": temperature, "max_tokens": 3}})


@pytest.mark.parametrize(
    ("task", "count"),
    [({"min_survivors": 1}, 1), ({"min_survivors": 2}, 0), ({}, 0), ({"min_survivors": 1, "on_failure": "drop"}, 0)],
)
def test_case_d10_a_group_of_one_survivor_is_warned_about(tmp_path: Path, task: dict[str, object], count: int) -> None:
    """AReaL#1474: its advantage is zero by policy; whoever accepts such groups is told so, once for each task."""
    tree = tiny_tree(tmp_path)
    tasks = {"addition": {**tree["tasks"]["addition"], **task}}
    warnings = [text for text in warnings_of(tiny_config(tmp_path, tasks=tasks)) if "min_survivors" in text]
    assert len(warnings) == count
    assert all("tasks.addition.min_survivors: is 1: stage 'rl'" in text for text in warnings)
