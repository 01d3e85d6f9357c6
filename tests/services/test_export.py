"""An exported policy is that of the checkpoint, for whoever reads Hugging Face folders."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.directory import RunDirectory
from relax.services.export import choose_checkpoint, export_policy
from relax.services.ledger import Ledger
from relax.training.checkpoint import CheckpointStore
from tests.services.story import story_directory, write_recipe
from tests.training.setting import LOSS, MODEL_PATH, make_backend, make_rows

METRIC = "eval/heldout/reward"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config([write_recipe(tmp_path, MODEL_PATH)])


@pytest.fixture
def directory(config: RunConfig) -> RunDirectory:
    return story_directory(config)


def trained(seed: int = 3, **options: Any) -> Any:
    """A backend that has made a step."""
    backend = make_backend(seed, **options)
    backend.forward_backward([[tuple(make_rows()[:4])]], LOSS)
    backend.optim_step(1.0)
    return backend


def checkpoint(directory: RunDirectory, step: int, backend: Any) -> Path:
    store = CheckpointStore(directory.checkpoints, keep_last=9)
    return store.write(step, lambda folder: backend.capture().write(str(folder / "model")), {"stage": 0})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 17, 3, 44]])).logits


def test_the_exported_model_gives_the_logits_of_the_trained_one(
    config: RunConfig, directory: RunDirectory, tmp_path: Path
) -> None:
    backend = trained()
    target = tmp_path / "out" / "policy"
    export_policy(config, checkpoint(directory, 4, backend), target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(logits(model), logits(backend._trained.model))
    assert not torch.equal(logits(model), logits(make_backend(3)._trained.model))
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(MODEL_PATH).chat_template
    assert tokenizer("12+34=").input_ids == AutoTokenizer.from_pretrained(MODEL_PATH)("12+34=").input_ids
    assert not (target / "training").exists()
    assert [path.name for path in target.parent.iterdir()] == ["policy"]


def test_a_checkpoint_without_a_tokenizer_gets_that_of_the_run(
    config: RunConfig, directory: RunDirectory, tmp_path: Path
) -> None:
    def fill(folder: Path) -> None:
        trained().capture().write(str(folder / "model"))
        for path in (folder / "model").glob("*token*"):
            path.unlink()
        for path in (folder / "model").glob("chat_template*"):
            path.unlink()

    path = CheckpointStore(directory.checkpoints).write(4, fill)
    export_policy(config, path, tmp_path / "policy")
    assert AutoTokenizer.from_pretrained(tmp_path / "policy")("1+2=").input_ids


def test_an_adapter_is_merged(config: RunConfig, directory: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from relax.model.load import load_model
    from relax.model.source import ModelOrigin
    from relax.training.config import AdamWConfig, ConstantConfig, LoraConfig, TorchConfig
    from relax.training.torch_backend import TorchBackend
    from tests.training.setting import vocabulary

    base = ModelOrigin(str(MODEL_PATH), weights="random", seed=3)
    model = load_model(MODEL_PATH, "random", "float32", 3)
    backend = TorchBackend(
        TorchConfig(lora=LoraConfig(rank=2)), model, vocabulary(), base=base, tokenizer_path=MODEL_PATH
    )
    backend.begin(AdamWConfig(lr=0.05), ConstantConfig(), 3)
    for _ in range(2):  # the first step moves one factor only
        backend.forward_backward([[tuple(make_rows()[:4])]], LOSS)
        backend.optim_step(1.0)
    export_policy(config, checkpoint(directory, 4, backend), tmp_path / "policy")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    adapted = logits(backend._trained.model)
    assert torch.allclose(logits(exported), adapted, atol=1e-5)
    assert not torch.allclose(logits(load_model(MODEL_PATH, "random", "float32", 3)), adapted, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").chat_template
    assert not list((tmp_path / "policy").glob("adapter_*"))


def test_nothing_that_exists_is_overwritten(config: RunConfig, directory: RunDirectory, tmp_path: Path) -> None:
    path = checkpoint(directory, 4, trained())
    full, file, link, empty = (tmp_path / name for name in ("full", "file", "link", "empty"))
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    for target in (full, file, link):
        with pytest.raises(UserError, match=f"{target} exists already"):
            export_policy(config, path, target)
    assert (full / "mine").read_text() == file.read_text() == "mine"
    empty.mkdir()
    export_policy(config, path, empty)
    assert (empty / "model.safetensors").exists()


def test_a_damaged_checkpoint_is_refused(config: RunConfig, directory: RunDirectory, tmp_path: Path) -> None:
    path = checkpoint(directory, 4, trained())
    weights = path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: model/model.safetensors does not have the content"):
        export_policy(config, path, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_a_full_disk_leaves_nothing(
    config: RunConfig, directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(directory, 4, trained())

    def copy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", copy)
    with pytest.raises(UserError, match=r"cannot write .*policy: .*No space left"):
        export_policy(config, path, tmp_path / "out" / "policy")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_emulated_checkpoint_holds_no_policy(config: RunConfig, directory: RunDirectory, tmp_path: Path) -> None:
    path = CheckpointStore(directory.checkpoints).write(1, lambda folder: (folder / "model").mkdir())
    with pytest.raises(UserError, match="holds no model weights"):
        export_policy(config, path, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


# --- which checkpoint ---


def choices(directory: RunDirectory, *steps: int) -> None:
    for step in steps:
        CheckpointStore(directory.checkpoints, keep_last=9).write(step, lambda folder: None)


def tell(directory: RunDirectory, points: dict[int, float], name: str = METRIC) -> None:
    ledger = Ledger(directory.ledger)
    ledger.write([], {step: {name: value} for step, value in points.items()}, {})
    ledger.close()


def test_the_newest_that_of_a_step_or_the_best(config: RunConfig, directory: RunDirectory) -> None:
    choices(directory, 20, 40, 60)
    tell(directory, {10: 0.1, 30: 0.9, 50: 0.2})
    assert choose_checkpoint(config, directory, None, False).step == 60
    assert choose_checkpoint(config, directory, 20, False).path.name == "step-000020"
    best = choose_checkpoint(config, directory, None, True)
    assert (best.step, best.why) == (40, "the best of 20, 40, 60 by eval/heldout/reward, 0.9000")


def test_case_b11_the_best_to_export_is_the_best_that_is_kept(
    tmp_path: Path, config: RunConfig, directory: RunDirectory
) -> None:
    choices(directory, 20, 40, 60)
    tell(directory, {20: 2.0, 40: 1.0, 60: 1.0}, "train/loss")
    chosen = load_config([directory.config], ["training.checkpoint.keep_best={metric: train/loss, mode: min}"])
    assert choose_checkpoint(chosen, directory, None, True).step == 60


@pytest.mark.parametrize(
    ("step", "best", "words"),
    [
        (7, False, "has no checkpoint of step 7; it has 20, 40"),
        (20, True, "choose one of them"),
        (None, True, "nothing is known of eval/heldout/reward at any checkpoint.*: 20, 40"),
    ],
)
def test_what_cannot_be_chosen_says_what_there_is(
    step: int | None, best: bool, words: str, config: RunConfig, directory: RunDirectory
) -> None:
    choices(directory, 20, 40)
    with pytest.raises(UserError, match=words):
        choose_checkpoint(config, directory, step, best)


def test_without_checkpoints_or_sets_there_is_nothing_to_choose(
    tmp_path: Path, directory: RunDirectory, config: RunConfig
) -> None:
    with pytest.raises(UserError, match="no complete checkpoint yet"):
        choose_checkpoint(config, directory, None, False)
    choices(directory, 20)
    bare = load_config([directory.config], ["eval.sets=[]"])
    with pytest.raises(UserError, match="has no evaluation sets; name one with --step"):
        choose_checkpoint(bare, directory, None, True)
