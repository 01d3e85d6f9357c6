"""What a real run leaves for people: the timeline, samples with their tokens, and a policy that other tools load."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.export import choose_checkpoint, export_policy
from relax.services.outline import outline_of
from relax.services.reader import open_ledger
from relax.services.sample_file import sample_files
from relax.services.show_sample import read_sample
from relax.services.show_step import read_step
from tests.e2e.tiny import final_weights, run_root, tiny_config, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run that kept samples of every second step."""
    import asyncio

    folder = tmp_path_factory.mktemp("run")
    run = {
        "name": "tiny",
        "directory": str(folder),
        "samples": {"every": 2, "keep": 3},
        "timeline": {"every": 3, "steps": 6},
    }
    config = tiny_config(folder, run=run)
    asyncio.run(train(config))
    return config


@pytest.fixture
def directory(config: RunConfig) -> RunDirectory:
    return RunDirectory(run_root(config))


def events(directory: RunDirectory) -> list[dict[str, Any]]:
    return json.loads((directory.root / "timeline.json").read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_the_timeline_shows_what_every_role_did_in_the_newest_steps(directory: RunDirectory) -> None:
    found = events(directory)
    steps = [event["args"]["step"] for event in found if event.get("cat") == "steps"]
    assert steps == [2, 3, 4, 5, 6, 7]
    names = {
        track: {e["name"] for e in found if e.get("cat") == track}
        for track in ("trainer", "engine-0", "reward", "controller")
    }
    assert {"TorchBackend.forward_backward", "TorchBackend.optim_step"} <= names["trainer"]
    assert any(name.startswith("Batcher.") for name in names["engine-0"])
    assert names["reward"] == {"tests.e2e.tiny:distinct_characters"}
    assert "take trainer" in names["controller"]


def test_spans_of_a_thread_never_cross_and_none_is_older_than_the_steps_covered(directory: RunDirectory) -> None:
    found = events(directory)
    first = min(event["ts"] for event in found if event.get("cat") == "steps")
    assert min(event["ts"] for event in found if "ts" in event) >= first
    for track in {event["tid"] for event in found if event["ph"] == "X"}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X" and e["tid"] == track)
        assert all(start >= end for (_, end), (start, _) in itertools.pairwise(spans))


def test_samples_of_every_nth_step_are_kept_whole(directory: RunDirectory) -> None:
    files = sample_files(directory.root / "samples")
    assert [path.stem for path in files] == ["step-000002", "step-000004", "step-000006"]
    rows = parquet.read_table(files[-1]).to_pylist()
    trained = [row for row in rows if row["state"] == "trained"]
    assert {row["step"] for row in trained} == {6}
    assert len(trained) == 16
    for row in trained:
        sampled = [version for version, mask in zip(row["versions"], row["mask"], strict=True) if mask]
        assert sampled
        assert all(5 <= version <= 6 for version in sampled)
        assert len(row["token_ids"]) == len(row["behaviour_logprobs"]) == len(row["advantages"])
    groups = {row["group"] for row in trained}
    for group in groups:
        advantages = [row["advantages"][-1] for row in trained if row["group"] == group]
        assert sum(advantages) == pytest.approx(0, abs=1e-4)


def test_a_kept_sample_and_its_step_are_shown(config: RunConfig, directory: RunDirectory) -> None:
    with open_ledger(directory) as ledger:
        step = read_step(ledger, outline_of(config), 6)
        sample = read_sample(ledger, directory, f"{step.groups[0].id}/0/0", config.model.path)
    assert len(step.groups) == 4
    assert sum(step.ages.values()) == sum(group.tokens for group in step.groups)
    assert sample.tokens is not None
    text = "".join(token.text or "" for token in sample.tokens if token.sampled)
    assert sample.trajectory.text in (text, text.replace("<|im_end|>", ""))
    assert all(("behaviour_logprobs" in token.values) for token in sample.tokens)


def test_the_exported_policy_is_the_trained_one(config: RunConfig, directory: RunDirectory, tmp_path: Path) -> None:
    choice = choose_checkpoint(config, directory, None, False)
    assert choice.step == 8
    export_policy(config, choice.path, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    own = dict(model.named_parameters())
    for name, tensor in final_weights(config).items():
        assert torch.equal(own[name], tensor)


LIMITED = """
import resource, sys
from relax.services.cli import main

limit = int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # Python turns the signal into an error of the write
main()
"""


def relax(limit: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command in a process that may write no file longer than `limit` bytes; 0 is no limit."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_run_whose_files_the_system_refuses_ends_with_a_sentence_and_goes_on_later(tmp_path: Path) -> None:
    """The limit cuts the run's first checkpoint in the middle of a file."""
    tiny_config(tmp_path, eval={"sets": []})
    arguments = ("train", str(tmp_path / "recipe.yaml"), "stages.rl.steps=1", "bus.journal=false")
    failed = relax(500_000, *arguments)
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr
    assert "cannot write the checkpoint of step" in failed.stderr
    assert "Earlier checkpoints are untouched" in failed.stderr
    assert "next: mend the cause" in failed.stderr
    assert list((tmp_path / "tiny" / "checkpoints").glob("*")) == []
    done = relax(0, *arguments, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "tiny: finished" in done.stdout
