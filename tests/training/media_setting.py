"""Tiny models of every family that reads media, and rows of text, images, sounds and videos for them."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.media import Medium, Modality
from relax.core.message import MediaPart
from relax.model.family import Family, find_family
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.training.config import AdamWConfig, ConstantConfig, OptimizerConfig, TorchConfig
from relax.training.torch_backend import TorchBackend

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"
VL, VL_MOE, VL_25, OMNI, OMNI_25 = "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni", "qwen2_5_omni"
KINDS = (VL, VL_MOE, VL_25, OMNI, OMNI_25)

_SCRATCH = tempfile.TemporaryDirectory(prefix="relax-media-")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_WINDOWED = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 32, "out_hidden_size": 128, "fullatt_block_indexes": [1],
}  # fmt: skip
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


@cache
def model_folder(kind: str) -> Path:
    """A folder with configuration, tokenizer and processor settings; no weights."""
    if kind in (VL, OMNI):
        return MODELS / ("qwen3-vl-tiny" if kind == VL else "qwen3-omni-tiny")
    source = model_folder(VL if kind in (VL_MOE, VL_25) else OMNI)
    folder = Path(_SCRATCH.name) / kind
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_CHANGES[kind](config)))
    return folder


def _to_vl_moe(config: dict[str, Any]) -> dict[str, Any]:
    text = {**config["text_config"], **_EXPERTS, "model_type": "qwen3_vl_moe_text"}
    vision = {**config["vision_config"], "model_type": "qwen3_vl_moe_vision"}
    return config | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": text,
        "vision_config": vision,
    }


def _to_vl_25(config: dict[str, Any]) -> dict[str, Any]:
    text = {**config["text_config"], "model_type": "qwen2_5_vl_text", "rope_parameters": _PLAIN_ROPE}
    text.pop("head_dim")
    return config | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {**_WINDOWED, "model_type": "qwen2_5_vl", "tokens_per_second": 2},
    }


def _to_omni_25(config: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id")
    text = {name: config["text_config"][name] for name in names if name in config["text_config"]}
    tokenizer = load_tokenizer(model_folder(OMNI))
    end = tokenizer.convert_tokens_to_ids("<|audio_end|>")
    made = Qwen2_5OmniThinkerConfig(
        architectures=["Qwen2_5OmniThinkerForConditionalGeneration"],
        text_config=text | {"rope_parameters": _PLAIN_ROPE, "tie_word_embeddings": False},
        vision_config=_WINDOWED,
        audio_config={
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "d_model": 64,
            "output_dim": 128, "n_window": 100,
        },
        audio_token_index=config["audio_token_id"],
        image_token_index=config["image_token_id"],
        video_token_index=config["video_token_id"],
        audio_start_token_id=config["audio_start_token_id"],
        audio_end_token_id=end,
        vision_start_token_id=config["vision_start_token_id"],
        vision_end_token_id=config["vision_end_token_id"],
        user_token_id=config["user_token_id"],
        tie_word_embeddings=False,
    )  # fmt: skip
    converted: dict[str, Any] = made.to_dict()
    return converted


_CHANGES = {VL_MOE: _to_vl_moe, VL_25: _to_vl_25, OMNI_25: _to_omni_25}


@cache
def tokenizer_of(kind: str) -> Any:
    return load_tokenizer(model_folder(kind))


@cache
def family_of(kind: str) -> Family:
    folder = model_folder(kind)
    family = find_family(load_model_config(folder), folder, tokenizer_of(kind))
    assert family is not None
    return family


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    return read_vocabulary(tokenizer_of(kind), load_model_config(model_folder(kind)))


def make_model(kind: str, seed: int = 0) -> Any:
    return load_model(model_folder(kind), "random", "float32", seed)


def make_backend(
    kind: str = VL,
    seed: int = 0,
    config: TorchConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    model: Any = None,
    **arguments: Any,
) -> TorchBackend:
    """A torch backend over a fresh tiny model that reads media, its stage begun."""
    arguments = {"vocabulary": vocabulary_of(kind), "family": family_of(kind), **arguments}
    backend = TorchBackend(config or TorchConfig(device="cpu"), model or make_model(kind, seed), **arguments)
    backend.begin(optimizer or AdamWConfig(lr=1e-3), ConstantConfig(), 100)
    return backend


@cache
def make_part(modality: Modality, seed: int) -> MediaPart:
    """A part that was looked at: its size depends on the seed, its content will too."""
    rng = np.random.default_rng(seed)
    width, height = int(rng.integers(16, 48)), int(rng.integers(16, 48))
    facts: dict[str, Any] = {"width": width, "height": height}
    if modality == "audio":
        samples = int(rng.integers(4000, 20000))
        facts = {"samples": samples, "rate": 16000, "seconds": samples / 16000}
    elif modality == "video":
        facts |= {"frames": 8, "fps": 4.0, "seconds": 2.0, "audio": None}
    return MediaPart(modality, f"file:///{modality}-{seed}", f"{modality}-{seed}", {}, facts)


@cache
def make_medium(kind: str, modality: Modality, seed: int) -> Medium:
    family, part = family_of(kind), make_part(modality, seed)
    target, rng = family.target(part), np.random.default_rng(seed)
    if modality == "audio":
        decoded = {"audio": rng.normal(0, 0.3, target["samples"]).astype(np.float32)}
    else:
        size: tuple[int, ...] = (target["height"], target["width"], 3)
        size = size if modality == "image" else (len(target["frames"]), *size)
        decoded = {str(modality): rng.integers(0, 256, size).astype(np.uint8)}
    (medium,) = family.features(part, decoded)
    return medium


def make_media_row(
    kind: str, index: int, media: Sequence[tuple[Modality, int]] = (), sampled: int = 6, group: int | None = None
) -> TrainRow:
    """A row whose prompt is a few letters around each medium (modality, seed), then `sampled` letters masked in."""
    family, tokenizer = family_of(kind), tokenizer_of(kind)
    rng = np.random.default_rng(1000 + index)
    content: list[dict[str, str]] = [{"type": "text", "text": "read"}]
    for modality, _ in media:
        content += [{"type": modality}, {"type": "text", "text": "abcdefgh"[: int(rng.integers(1, 8))]}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    for modality, seed in media:
        text = text.replace(family.names[modality], f"\0{modality}/{seed}\0", 1)
    for modality, seed in media:
        text = text.replace(f"\0{modality}/{seed}\0", family.slot(make_part(modality, seed)))
    prompt = tokenizer.encode(text, add_special_tokens=False)
    token_ids = np.array([*prompt, *rng.integers(0, 95, sampled)], np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt)
    arrays = (
        token_ids,
        mask,
        (mask * rng.uniform(0.5, 2.0)).astype(np.float32),
        (mask * rng.normal()).astype(np.float32),
    )
    for array in arrays:
        frozen(array)
    owner = group_id(index // 4 if group is None else group)
    return TrainRow(
        sample_id(trajectory_id(owner, index % 4), 0),
        *arrays[:3],
        {"advantages": arrays[3]},
        tuple(make_medium(kind, modality, seed) for modality, seed in media),
    )


def make_media_rows(kind: str) -> list[TrainRow]:
    """Rows of text, image, video and, where the model hears, sound; some with several, two groups that share theirs."""
    hears = "audio" in family_of(kind).modalities
    mixed: list[tuple[Modality, int]] = [("image", 3), ("audio" if hears else "video", 5), ("image", 4)]
    plans: list[list[tuple[Modality, int]]] = [
        [], [("image", 1)], [("video", 2)], mixed,
        [("image", 6)], [("image", 6)], [("image", 6)], [("image", 6)],
        [("audio", 7)] if hears else [("video", 7)], [("video", 8), ("image", 1)], [], mixed,
    ]  # fmt: skip
    return [make_media_row(kind, index, plan, sampled=2 + index % 5) for index, plan in enumerate(plans)]
