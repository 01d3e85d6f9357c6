"""Tiny models that read media, and stand-in families for them: random features, and positions from transformers' own functions.

Shared by the tests of `model` and `engines`. Nothing here uses `relax.model.families`, so that a fault there is not repeated here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from relax.core.completion import Ints, frozen
from relax.core.media import Medium, Modality
from relax.model.family import Encoding

PAD, EOS, USER = 0, 1, 2
TEXT = np.arange(3, 60)
"""Ids of ordinary text."""
IMAGE, VIDEO, AUDIO, SEE, SEEN, HEAR, HEARD = range(60, 67)
SIZE = 72
HIDDEN, PATCH, MELS = 64, 4, 16
MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni")
OMNI = ("qwen2_5_omni", "qwen3_omni")


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    } | more


_INTERLEAVED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_SECTIONED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
}
_DEEP = _VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_WINDOWED = _VISION | {"window_size": PATCH * 4, "fullatt_block_indexes": [1]}
_SOUND = {
    "num_mel_bins": MELS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": HIDDEN,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_ENDS = {"vision_start_token_id": SEE, "vision_end_token_id": SEEN}


def _config(name: str) -> Any:
    if name == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config=_text(rope_parameters=_SECTIONED),
            vision_config=_WINDOWED | {"tokens_per_second": 2},
            **_TOKENS,
            **_ENDS,
        )
    if name in ("qwen3_vl", "qwen3_vl_moe"):
        found = transformers.Qwen3VLConfig if name == "qwen3_vl" else transformers.Qwen3VLMoeConfig
        text = _text(rope_parameters=_INTERLEAVED, head_dim=16, **({} if name == "qwen3_vl" else _EXPERTS))
        return found(text_config=text, vision_config=_DEEP, **_TOKENS, **_ENDS)
    common = {"audio_start_token_id": HEAR, "user_token_id": USER, "tie_word_embeddings": False}
    if name == "qwen2_5_omni":
        from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

        return Qwen2_5OmniThinkerConfig(
            text_config=_text(rope_parameters=_SECTIONED),
            vision_config=_WINDOWED,
            audio_config=_SOUND | {"n_window": 50},
            audio_token_index=AUDIO,
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            audio_end_token_id=HEARD,
            **common,
            **_ENDS,
        )
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    text = _text(rope_parameters=_INTERLEAVED, head_dim=16, **_EXPERTS)
    del text["bos_token_id"]
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=_DEEP,
        audio_config=_SOUND | {"n_window": 50, "n_window_infer": 400, "downsample_hidden_size": 16},
        audio_token_id=AUDIO,
        **_TOKENS,
        **common,
    )
    config.vision_start_token_id, config.vision_end_token_id = SEE, SEEN
    return config


_CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def build(name: str, seed: int = 0) -> Any:
    """A model of one's own; weights larger than the initial ones, so that media change what it says."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, _CLASSES[name])(_config(name)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@cache
def model_of(name: str, seed: int = 0) -> Any:
    """A model nobody may change."""
    return build(name, seed)


class StandIn:
    """The parts of `Family` that engines and training use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.modalities: tuple[Modality, ...] = ("image", "video", "audio") if name in OMNI else ("image", "video")
        known: dict[Modality, int] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
        self.placeholders: Mapping[Modality, int] = {one: known[one] for one in self.modalities}
        self.calls: list[list[str]] = []
        """Keys of each call of `encode`."""

    def encode(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        self.calls.append([medium.key for medium in media])
        found: dict[int, Encoding] = {}
        for modality in self.modalities:
            chosen = {number: one for number, one in enumerate(media) if one.modality == modality}
            if chosen:
                found |= dict(zip(chosen, _encode(model, modality, list(chosen.values())), strict=True))
        return [found[number] for number in range(len(media))]

    def positions(self, token_ids: Ints, media: Sequence[Medium]) -> Any:
        ids = torch.tensor(np.asarray(token_ids)).long()[None]
        model = model_of(self.name)
        owner = model if self.name in OMNI else model.model
        raw = raw_inputs(self.name, [(token_ids, media)])
        names = {"image_grid_thw", "video_grid_thw", "mm_token_type_ids", "second_per_grid_ts"}
        if self.name not in OMNI:
            return (
                owner.get_rope_index(ids, **{key: value for key, value in raw.items() if key in names})[0][:, 0]
                .float()
                .numpy()
            )
        found, _ = owner.get_rope_index(
            ids,
            raw.get("image_grid_thw"),
            raw.get("video_grid_thw"),
            torch.ones_like(ids),
            False,
            None if "feature_attention_mask" not in raw else raw["feature_attention_mask"].sum(-1),
            raw.get("video_second_per_grid"),
        )
        return found[:, 0].float().numpy()


def _encode(model: Any, modality: Modality, media: Sequence[Medium]) -> list[Encoding]:
    body = model.model
    if modality == "audio":
        lengths = torch.tensor([one.arrays["mel"].shape[1] for one in media])
        padded = torch.zeros(len(media), MELS, int(lengths.max()))
        seen = torch.zeros(len(media), int(lengths.max()), dtype=torch.long)
        for row, one in enumerate(media):
            padded[row, :, : lengths[row]] = torch.tensor(one.arrays["mel"])
            seen[row, : lengths[row]] = 1
        output = body.get_audio_features(padded, seen, return_dict=True).last_hidden_state
        parts = output.split([one.num_tokens for one in media])
        return [Encoding("audio", part) for part in parts]
    pixels = torch.cat([torch.tensor(one.arrays["pixels"]) for one in media])
    grid = torch.tensor(np.stack([one.arrays["grid"] for one in media]))
    function = body.get_image_features if modality == "image" else body.get_video_features
    output = function(pixels, grid, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or []
    return [
        Encoding(modality, embeds, tuple(layer[number] for layer in deep))
        for number, embeds in enumerate(output.pooler_output)
    ]


def raw_inputs(name: str, rows: Sequence[tuple[Ints, Sequence[Medium]]]) -> dict[str, Any]:
    """What transformers' own forward takes for padded rows, media included."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), PAD)
    seen = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (token_ids, _) in enumerate(rows):
        ids[row, : len(token_ids)] = torch.tensor(np.asarray(token_ids))
        seen[row, : len(token_ids)] = 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": seen}
    media = [one for _, row in rows for one in row]
    for modality, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        found = [one for one in media if one.modality == modality]
        if found:
            inputs[pixels] = torch.cat([torch.tensor(one.arrays["pixels"]) for one in found])
            inputs[grid] = torch.tensor(np.stack([one.arrays["grid"] for one in found]))
    videos = [one for one in media if one.modality == "video"]
    if videos and name in (*OMNI, "qwen2_5_vl"):
        key = "second_per_grid_ts" if name == "qwen2_5_vl" else "video_second_per_grid"
        inputs[key] = torch.tensor([float(one.arrays["seconds"][0]) for one in videos])
    sounds = [one for one in media if one.modality == "audio"]
    if sounds:
        longest = max(one.arrays["mel"].shape[1] for one in sounds)
        inputs["input_features"] = torch.zeros(len(sounds), MELS, longest)
        inputs["feature_attention_mask"] = torch.zeros(len(sounds), longest, dtype=torch.long)
        for row, one in enumerate(sounds):
            length = one.arrays["mel"].shape[1]
            inputs["input_features"][row, :, :length] = torch.tensor(one.arrays["mel"])
            inputs["feature_attention_mask"][row, :length] = 1
    if name not in OMNI:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return inputs


@dataclass
class Dice:
    """Random media and prompts of a model."""

    name: str
    random: np.random.Generator

    def medium(self, modality: Modality) -> Medium:
        key = f"{modality}-{self.random.integers(1 << 40)}"
        if modality == "audio":
            # Of at least one whole chunk: Qwen3-Omni's encoder pads shorter ones to their longest neighbour, which changes them.
            frames = int(self.random.integers(100, 170) if self.name == "qwen3_omni" else self.random.integers(20, 130))
            mel = self.random.standard_normal((MELS, frames)).astype(np.float32)
            return Medium(key, "audio", self._heard(frames), frames, {"mel": frozen(mel)})
        shape = (1 if modality == "image" else int(self.random.integers(1, 4)), *(2 * self.random.integers(1, 4, 2)))
        patches = int(np.prod(shape))
        arrays = {
            "pixels": frozen(self.random.standard_normal((patches, 3 * 2 * PATCH * PATCH)).astype(np.float32)),
            "grid": frozen(np.array(shape, dtype=np.int64)),
            "seconds": frozen(self.random.choice([0.75, 8.0], 1).astype(np.float32)),
        }
        return Medium(key, modality, patches // 4, patches, arrays)

    def _heard(self, frames: int) -> int:
        if self.name == "qwen2_5_omni":
            return ((frames - 1) // 2 + 1 - 2) // 2 + 1
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        return int(_get_feat_extract_output_lengths(torch.tensor(frames), 50))

    def slot(self, medium: Medium) -> list[int]:
        if medium.modality == "audio":
            return [HEAR, *[AUDIO] * medium.num_tokens, HEARD]
        if medium.modality == "image":
            return [SEE, *[IMAGE] * medium.num_tokens, SEEN]
        if self.name in ("qwen3_vl", "qwen3_vl_moe"):
            frames = int(medium.arrays["grid"][0])
            frame = [SEE, *[VIDEO] * (medium.num_tokens // frames), SEEN]
            return [token for number in range(frames) for token in (5 + number, *frame)]
        return [SEE, *[VIDEO] * medium.num_tokens, SEEN]

    def text(self, length: int) -> list[int]:
        return [int(token) for token in self.random.choice(TEXT, length)]

    def prompt(self, media: Sequence[Medium]) -> Ints:
        """The media between texts of odd lengths."""
        tokens = self.text(int(self.random.integers(1, 9)))
        for medium in media:
            tokens += [*self.slot(medium), *self.text(int(self.random.integers(1, 6)))]
        return frozen(np.array(tokens, dtype=np.int32))

    def row(self, *modalities: Modality) -> tuple[Ints, tuple[Medium, ...]]:
        media = tuple(self.medium(modality) for modality in modalities)
        return self.prompt(media), media


def dice(name: str, seed: int = 0) -> Dice:
    return Dice(name, np.random.default_rng(seed))
