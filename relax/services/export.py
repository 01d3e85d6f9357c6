"""The policy of a checkpoint as a plain Hugging Face folder: configuration, safetensors, tokenizer with its chat template.

Called by `relax export`. An adapter is merged into its base model. The folder is there whole or not at all, and nothing that exists
is overwritten.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.best import metric_score
from relax.services.directory import RunDirectory
from relax.services.resume import BACKEND_FOLDER
from relax.training.checkpoint import CheckpointStore, best_step, damage, read_meta

_NOT_THE_POLICY = {"training"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint, and why it is this one."""

    path: Path
    step: int
    why: str


def choose_checkpoint(config: RunConfig, directory: RunDirectory, step: int | None, best: bool) -> Choice:
    """The checkpoint of `step`, the best one, or else the newest. Raises UserError that says which there are."""
    if step is not None and best:
        raise UserError("--step names a checkpoint and --best looks for one; choose one of them")
    found = {int(read_meta(path)["step"]): path for path in CheckpointStore(directory.checkpoints).complete()}
    if not found:
        raise UserError(
            f"{directory.root} has no complete checkpoint yet; one is written every training.checkpoint.every steps"
        )
    if best:
        step, why = _best(config, directory, list(found))
        return Choice(found[step], step, why)
    if step is None:
        return Choice(found[max(found)], max(found), "the newest")
    if step not in found:
        raise UserError(f"{directory.root} has no checkpoint of step {step}; it has {_listed(found)}")
    return Choice(found[step], step, "as asked for")


def _best(config: RunConfig, directory: RunDirectory, steps: list[int]) -> tuple[int, str]:
    """By `training.checkpoint.keep_best`, or by the reward on the first evaluation set."""
    node = config.training.checkpoint.keep_best
    if node is None and not config.eval.sets:
        raise UserError(
            f"{directory.config} says of no metric that it tells the best checkpoint, and has no evaluation sets; "
            "name one with --step, or set training.checkpoint.keep_best"
        )
    metric, mode = (node.metric, node.mode) if node else (f"eval/{config.eval.sets[0].name}/reward", "max")
    score = metric_score(directory, metric)
    try:
        step = best_step(steps, score, mode)
        value = None if step is None else score(step)
    except OSError as error:
        raise UserError(f"{error}; name a checkpoint with --step: {_listed(steps)}") from error
    if step is None:
        raise UserError(
            f"nothing is known of {metric} at any checkpoint, so none is the best; name one with --step: {_listed(steps)}"
        )
    return step, f"the best of {_listed(steps)} by {metric}, {value:.4f}"


def export_policy(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Write the policy in `checkpoint` into the new folder `target`. Raises UserError; what stood there is then untouched."""
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UserError(f"{target} exists already; name a folder that does not")
    problem = damage(checkpoint, contents=True)
    if problem is not None:
        raise UserError(f"checkpoint {checkpoint} is damaged: {problem}; export another one")
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        _write_model(checkpoint / BACKEND_FOLDER, aside)
        _write_tokenizer(config, aside)
        os.replace(aside, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}; free some space, or name another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_model(source: Path, target: Path) -> None:
    """Copy a whole model as it is; merge an adapter into its base."""
    from relax.model.load import load_model
    from relax.model.lora import holds_adapter
    from relax.training.file import quiet_saving
    from relax.training.state import TOKENIZER_FILES

    if holds_adapter(source):
        with quiet_saving("the model", target):
            load_model(source, "pretrained", "float32").save_pretrained(target)
        for path in (path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
            shutil.copyfile(path, target / path.name)
        return
    if not any(source.glob("*.safetensors")):
        raise UserError(f"{source} holds no model weights; was the run trained with an emulated backend?")
    shutil.copytree(
        source, target, ignore=lambda folder, names: _NOT_THE_POLICY.intersection(names), dirs_exist_ok=True
    )


def _write_tokenizer(config: RunConfig, target: Path) -> None:
    """The run's tokenizer, unless the checkpoint brought it."""
    if (target / "tokenizer.json").is_file() or (target / "tokenizer_config.json").is_file():
        return
    from relax.model.load import load_tokenizer
    from relax.model.source import model_folder

    model = config.model
    folder = (
        model_folder(model.tokenizer, cache=model.cache)
        if model.tokenizer
        else model_folder(model.path, model.source, model.cache)
    )
    load_tokenizer(folder).save_pretrained(target)


def _listed(steps: object) -> str:
    return ", ".join(map(str, sorted(steps)))  # type: ignore[call-overload]
