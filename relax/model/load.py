"""Loads a Hugging Face directory: model (its own or seeded random weights), configuration and tokenizer.

Called by engines, training and data at start-up; the only file that constructs transformers models. Nothing here reaches
the network, runs code from a model folder or unpickles weights (SE2), and the global random state is left as it was.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from relax.core.error import UserError
from relax.model.dtype import torch_dtype

Model: TypeAlias = Any
"""A transformers.PreTrainedModel; transformers carries no types."""
Tokenizer: TypeAlias = Any
"""A transformers fast tokenizer."""
ModelConfig: TypeAlias = Any
"""A transformers.PretrainedConfig."""


def load_model(path: str | Path, weights: Literal["pretrained", "random"], dtype: str, seed: int = 0) -> Model:
    """The model in folder `path`, in `dtype`, in evaluation mode.

    `random` builds seeded initial weights from config.json alone: equal seeds give equal weights.
    Raises UserError when the folder, its config.json, its weights or its architecture is missing, unknown or incomplete.
    """
    folder = _model_folder(path)
    config = load_model_config(folder)
    model_class = _model_class(config, folder)
    with torch.random.fork_rng(devices=_seeded_devices()):
        torch.manual_seed(seed)
        if weights == "random":
            model = model_class._from_config(config, dtype=torch_dtype(dtype))
        else:
            model = _load_pretrained(model_class, folder, dtype)
    return model.train(False)


def load_model_config(path: str | Path) -> ModelConfig:
    """The configuration in folder `path`. Raises UserError when it is missing or of an unknown model type."""
    from transformers import AutoConfig

    folder = _model_folder(path)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model folder {str(folder)!r} has no config.json; point model.path at a Hugging Face model folder"
        )
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError) as error:
        raise UserError(f"config.json of {str(folder)!r} cannot be read: {error}") from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in folder `path`. Raises UserError when there is none."""
    from transformers import AutoTokenizer

    folder = _model_folder(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        raise UserError(
            f"folder {str(folder)!r} holds no tokenizer; set model.tokenizer to a folder with tokenizer.json"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"the tokenizer in {str(folder)!r} cannot be loaded: {error}") from error


def _model_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"model folder {str(path)!r} does not exist; models are read from local folders, download it first"
        )
    return folder


def _model_class(config: ModelConfig, folder: Path) -> Any:
    """The class that config.json names, or the causal language model of its model type."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
        raise UserError(
            f"architecture {name!r} of {str(folder)!r} is not in transformers {transformers.__version__};"
            " use a model that it implements"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model type {config.model_type!r} of {str(folder)!r} has no causal language model;"
            " name its class under 'architectures' in config.json"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _load_pretrained(model_class: Any, folder: Path, dtype: str) -> Model:
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "convert its pickled weights to safetensors" if pickled else "or set model.weights to random"
        raise UserError(f"model folder {str(folder)!r} has no *.safetensors weights; add them, {hint}")
    try:
        model, report = model_class.from_pretrained(
            str(folder),
            dtype=torch_dtype(dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the weights in {str(folder)!r} cannot be loaded: {error}") from error
    # transformers fills what a checkpoint lacks with random numbers and only logs it; a run must not start from those.
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            listed = ", ".join(str(name) for name in sorted(map(str, report[kind]))[:5])
            raise UserError(f"the weights in {str(folder)!r} do not fit the model: {kind} {listed}")
    return model


def _seeded_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
