"""Loads a Hugging Face directory: model (its own or seeded random weights), configuration and tokenizer.

Called by engines, training and data at start-up, with a folder that `source` found. A folder that holds an adapter is loaded
as its base model with the adapter merged in. Nothing here reaches the network, runs code from a model folder or unpickles
weights (SE2), and the global random state is left as it was.
"""

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from relax.core.error import UserError
from relax.model.dtype import torch_dtype
from relax.model.lora import holds_adapter, merge_adapter, read_base
from relax.model.source import model_folder

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
    if holds_adapter(folder) and weights == "pretrained":
        return _load_adapted(folder, dtype)
    config = load_model_config(folder)
    model_class = _model_class(config, folder)
    with torch.random.fork_rng(devices=_seeded_devices()):
        torch.manual_seed(seed)
        if weights == "random":
            model = _build_random(model_class, config, folder, dtype)
        else:
            model = _load_pretrained(model_class, folder, dtype)
    return model.train(False)


def _load_adapted(folder: Path, dtype: str) -> Model:
    """The base model that the adapter's folder names, in `dtype`, with the adapter merged into its weights."""
    base, _ = read_base(folder)
    model = load_model(model_folder(base.path, base.source, base.cache), base.weights, "float32", base.seed)
    merged = merge_adapter(model, folder)
    for parameter in merged.parameters():
        # Not `merged.to`: it would round the rotary frequencies as well.
        parameter.data = parameter.data.to(torch_dtype(dtype))
    return merged


def load_model_config(path: str | Path) -> ModelConfig:
    """The configuration in folder `path`: of the part that thinks, where the model also speaks.

    Raises UserError when it is missing, broken or of an unknown model type.
    """
    from transformers import AutoConfig

    folder = _model_folder(path)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model folder {str(folder)!r} has no config.json; point model.path at a Hugging Face model folder"
        )
    problem = _json_problem(folder / "config.json")
    if problem:
        raise UserError(f"{problem}; {_COPY_AGAIN}")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # every model type checks its own fields in its own way
        raise UserError(f"config.json of {str(folder)!r} cannot be used: {_reason(error)}; correct it") from error
    if config.model_type not in _THINKERS:
        return config
    thinker = config.thinker_config
    thinker.architectures, thinker.name_or_path = [_THINKERS[config.model_type]], config.name_or_path
    return thinker


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in folder `path`. Raises UserError when there is none, or a broken one."""
    from transformers import AutoTokenizer

    folder = _model_folder(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        raise UserError(
            f"folder {str(folder)!r} holds no tokenizer; set model.tokenizer to a folder with tokenizer.json"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception, and each file is read by code of its own
        files = [folder / name for name in (*names, "special_tokens_map.json", "added_tokens.json", "config.json")]
        found = [file for file in files if file.is_file()]
        problem = next(filter(None, (_json_problem(file) for file in found if file.suffix == ".json")), None)
        blamed = problem or f"the tokenizer file {str(found[0])!r} cannot be loaded: {_reason(error)}"
        raise UserError(f"{blamed}; {_COPY_AGAIN}") from error


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

    names = getattr(config, "architectures", None) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"'architectures' in config.json of {str(folder)!r} is {names!r}; expected a list of class names"
        )
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
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


def _build_random(model_class: Any, config: ModelConfig, folder: Path, dtype: str) -> Model:
    torch_type = torch_dtype(dtype)
    try:
        return model_class._from_config(config, dtype=torch_type)
    except Exception as error:  # sizes that do not fit each other fail wherever a layer first meets them
        raise UserError(
            f"config.json of {str(folder)!r} describes no model that can be built: {_reason(error)}; correct it"
        ) from error


def _load_pretrained(model_class: Any, folder: Path, dtype: str) -> Model:
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "convert its pickled weights to safetensors" if pickled else "or set model.weights to random"
        raise UserError(f"model folder {str(folder)!r} has no *.safetensors weights; add them, {hint}")
    torch_type = torch_dtype(dtype)
    try:
        model, report = model_class.from_pretrained(
            str(folder),
            dtype=torch_type,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors and the readers of the JSON files beside it raise errors of their own
        problem = _weight_problem(folder)
        if problem:
            raise UserError(f"{problem}; {_COPY_AGAIN}") from error
        raise UserError(f"the weights in {str(folder)!r} cannot be loaded: {_reason(error)}") from error
    # transformers fills what a checkpoint lacks with random numbers and only logs it; a run must not start from those.
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            listed = ", ".join(str(name) for name in sorted(map(str, report[kind]))[:5])
            raise UserError(f"the weights in {str(folder)!r} do not fit the model: {kind} {listed}")
    return model


_THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Of whole omni models, the class that reads media and writes text; what speaks is left unread."""

_COPY_AGAIN = "copy or download the file again"


def _weight_problem(folder: Path) -> str | None:
    """The first file of the weights that is broken or absent, and how; None when all can be opened."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.json")):
        problem = _json_problem(file)
        if problem:
            return problem
    for index in sorted(folder.glob("*.safetensors.index.json")):
        shards = json.loads(index.read_bytes()).get("weight_map")
        if not isinstance(shards, dict):
            return f"{str(index)!r} has no mapping 'weight_map'"
        absent = sorted({str(name) for name in shards.values() if not (folder / str(name)).is_file()})
        if absent:
            return f"{str(folder / absent[0])!r}, named in {index.name}, does not exist"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except Exception as error:  # safetensors' own error class, or OSError
            return f"{str(file)!r} is no whole safetensors file: {_reason(error)}"
    return None


def _json_problem(file: Path) -> str | None:
    """Why a file that must hold one JSON object does not."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{str(file)!r} is not valid JSON: {_reason(error)}"
    return None if isinstance(value, dict) else f"{str(file)!r} holds a JSON {type(value).__name__}, expected an object"


def _reason(error: Exception) -> str:
    """Type and the lines of the message as one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _seeded_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
