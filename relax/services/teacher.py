"""The frozen model that a distilled policy is to become like. Opened by the run when a stage's plan holds the teacher role.

It may be of any size and architecture, but it scores the policy's own tokens: their ids must mean the same to both, which is
checked before anything is sampled. Its distribution runs over the policy's allowed vocabulary, at the rollout's temperature (TK5).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from relax.algorithms.config_distillation import TeacherConfig
from relax.config.base import ComponentConfig
from relax.core.completion import frozen
from relax.core.error import UserError
from relax.core.protocol import Compute
from relax.model.family import Family, find_family
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.source import ModelOrigin, model_folder
from relax.model.vocabulary import Vocabulary
from relax.services.roles.teacher import TeacherModel

if TYPE_CHECKING:
    from relax.services.assembly import Assembly

_TRAINING = ("lora", "freeze", "parts", "activation_checkpointing")
"""What a backend's node says about training, which a teacher is not subject to."""


async def open_teacher(assembly: "Assembly", stage: str) -> tuple[TeacherModel, Compute]:
    """The stage's teacher behind the configured backend, on a thread of its own. Raises UserError when it does not fit the policy."""
    algorithm = next(node.algorithm for node in assembly.config.stages if node.name == stage)
    node = getattr(algorithm, "teacher", None)
    if node is None:
        raise UserError(f"stage {stage!r} has no teacher: set algorithm.teacher.path to the model to learn from")
    compute = assembly.compute("teacher")
    backend = await compute.run(_open, assembly, node)
    assembly.sharing.add("teacher", backend)
    return backend, compute


def _open(assembly: "Assembly", node: TeacherConfig) -> Any:
    path = model_folder(node.path, node.source, node.cache)
    tokenizer_path = path if node.tokenizer is None else model_folder(node.tokenizer, cache=node.cache)
    tokenizer = load_tokenizer(tokenizer_path)
    own = assembly.config.model
    policy = load_tokenizer(model_folder(own.tokenizer or own.path, "auto" if own.tokenizer else own.source, own.cache))
    model_config = load_model_config(path)
    size = int(model_config.get_text_config().vocab_size)
    vocabulary = shared_vocabulary(policy, tokenizer, assembly.vocabulary, size, node.path)
    family = shared_family(assembly.family, find_family(model_config, path, tokenizer), node.path)
    model = load_model(path, node.weights, node.dtype, assembly.config.run.seed).requires_grad_(False)
    return assembly.make_backend(
        model,
        config=_frozen(assembly.config.training.backend),
        vocabulary=vocabulary,
        tokenizer_path=tokenizer_path,
        processor_path=path,
        base=ModelOrigin(node.path, node.source, node.cache, node.weights, assembly.config.run.seed),
        family=family,
    )


def shared_vocabulary(policy: Any, teacher: Any, vocabulary: Vocabulary, size: int, path: str) -> Vocabulary:
    """The policy's vocabulary over the `size` logit columns of the teacher, which may be padded in another way.

    Raises UserError unless every id that the policy can sample means the same token to both tokenizers.
    """
    ids = np.flatnonzero(vocabulary.allowed).tolist()
    theirs = {number: token for token, number in teacher.get_vocab().items()}
    own = {number: token for token, number in policy.get_vocab().items()}
    other = [number for number in ids if own.get(number) != theirs.get(number)]
    if other:
        first = other[0]
        raise UserError(
            f"teacher {path!r} has another tokenizer than the policy: {len(other)} of {len(ids)} ids differ, e.g. id {first} is "
            f"{own.get(first)!r} to the policy and {theirs.get(first)!r} to the teacher; distillation scores the policy's own "
            "tokens, so choose a teacher of the same family, or set algorithm.teacher.tokenizer if its folder lacks its own"
        )
    if ids[-1] >= size:
        raise UserError(
            f"teacher {path!r} has {size} logit columns, but the policy samples ids up to {ids[-1]}; choose a teacher with the "
            "policy's whole vocabulary"
        )
    allowed = np.zeros(size, dtype=np.bool_)
    allowed[ids] = True
    return replace(vocabulary, size=size, allowed=frozen(allowed))


def shared_family(policy: Family | None, teacher: Family | None, path: str) -> Family | None:
    """Features are made once, for the policy; a teacher that reads media has to read the same ones."""
    if policy is not None and type(teacher) is not type(policy):
        what = "reads text only" if teacher is None else f"is a {type(teacher).__name__}"
        raise UserError(
            f"this run reads media as a {type(policy).__name__} does, but teacher {path!r} {what}; choose a teacher of that family"
        )
    return None if policy is None else teacher


def _frozen(node: ComponentConfig) -> ComponentConfig:
    fields = type(node).model_fields
    return node.model_copy(
        update={name: fields[name].get_default(call_default_factory=True) for name in _TRAINING if name in fields}
    )
