"""Tiny models of every family that reads media: folders with configuration, tokenizer and processor settings, as transformers 5.24
writes them. No weights, no hub, no torchvision."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni")
OMNI = ("qwen2_5_omni", "qwen3_omni")
PATCH, HIDDEN, HEADS, LAYERS = 4, 64, 4, 2

_SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
]  # fmt: skip
_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif c.type == 'video' %}VIDEO"
    "{%- elif c.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{%- else %}{{ c.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
WRAPPED = "<|vision_start|><|video_pad|><|vision_end|>"
PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen2_5_omni": "Qwen2_5OmniProcessor",
    "qwen3_omni": "Qwen3OmniMoeProcessor",
}


def make_tokenizer(kind: str, *, wrapped: bool | None = None) -> Any:
    """A token for each byte and each role. `wrapped`: the template writes marks around videos; Qwen3-VL's processor in
    transformers expects none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(_SPECIALS)
    tokens.add_tokens(["system", "user", "assistant"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=_NAMED
    )
    marks = not kind.startswith("qwen3_vl") if wrapped is None else wrapped
    tokenizer.chat_template = _TEMPLATE.replace("VIDEO", WRAPPED if marks else "<|video_pad|>")
    return tokenizer


def make_config(kind: str, tokenizer: Any) -> Any:
    """The configuration of a model of some 0.2 M parameters."""
    import transformers
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    classes = {
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen3_vl": transformers.Qwen3VLConfig,
        "qwen3_vl_moe": transformers.Qwen3VLMoeConfig,
        "qwen2_5_omni": Qwen2_5OmniThinkerConfig,
        "qwen3_omni": Qwen3OmniMoeThinkerConfig,
    }
    ids = tokenizer.convert_tokens_to_ids
    suffix = "index" if kind == "qwen2_5_omni" else "id"
    known = {f"{one}_token_{suffix}": ids(f"<|{one}_pad|>") for one in ("image", "video", "audio")}
    known |= {f"vision_{end}_token_id": ids(f"<|vision_{end}|>") for end in ("start", "end")}
    known |= {f"audio_{end}_token_id": ids(f"<|audio_{end}|>") for end in ("start", "end")}
    if kind in OMNI:
        seconds = 13 if kind == "qwen3_omni" else 25  # as published; the processors assume them
        known |= {"audio_config": _audio_sizes(kind), "user_token_id": ids("user"), "position_id_per_seconds": seconds}
    config = classes[kind](
        text_config=_text_sizes(kind, tokenizer), vision_config=_vision_sizes(kind), tie_word_embeddings=False, **known
    )
    for (
        name,
        token_id,
    ) in known.items():  # some configurations drop what they do not declare and their models read all the same
        if name.endswith("_token_id"):
            setattr(config, name, token_id)
    return config


def make_model(kind: str, config: Any, seed: int = 0) -> Any:
    """The model with seeded random weights, in evaluation mode."""
    import torch
    import transformers

    names = {
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen3_omni": "Qwen3OmniMoeThinkerForConditionalGeneration",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, names[kind])._from_config(config).eval()


def processor_config(kind: str) -> dict[str, Any]:
    """What `save_pretrained` of the family's processor writes to processor_config.json."""
    clip = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    third = kind.startswith("qwen3_vl")
    shared = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "merge_size": 2,
        "patch_size": PATCH, "resample": 3, "rescale_factor": 0.00392156862745098, "temporal_patch_size": 2,
    }  # fmt: skip
    found: dict[str, Any] = {
        "image_processor": {
            **shared,
            **clip,
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"longest_edge": 64 * 64, "shortest_edge": 16 * 16},
        },
        "processor_class": PROCESSORS[kind],
        "video_processor": {
            **shared,
            **(half if third else clip),
            "cap_pixels_per_frame": False,
            "do_sample_frames": True,
            "fps": 2,
            "max_frames": 12,
            "max_video_tokens": 768 if third else 128000,
            "min_frames": 4,
            "size": {"longest_edge": 32 * 32 * (8 if third else 1), "shortest_edge": 128},
            "video_processor_type": "Qwen3VLVideoProcessor" if third else "Qwen2VLVideoProcessor",
        },
    }
    if kind in OMNI:
        found["feature_extractor"] = {
            "chunk_length": 8, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 32,
            "hop_length": 160, "n_fft": 400, "n_samples": 8 * 16000, "nb_max_frames": 800, "padding_side": "right",
            "padding_value": 0.0, "return_attention_mask": False, "sampling_rate": 16000,
        }  # fmt: skip
    return found


def save_folder(kind: str, folder: Path, *, wrapped: bool | None = None) -> Path:
    """A model folder without weights."""
    tokenizer = make_tokenizer(kind, wrapped=wrapped)
    tokenizer.save_pretrained(folder)
    make_config(kind, tokenizer).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor_config(kind)))
    return folder


def _text_sizes(kind: str, tokenizer: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": (len(tokenizer) + 7) // 8 * 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    interleaved = {"mrope_interleaved": True} if kind.startswith("qwen3") else {}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **interleaved}
    if kind.startswith("qwen3"):
        sizes["head_dim"] = HIDDEN // HEADS
    if kind in ("qwen3_vl_moe", "qwen3_omni"):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        sizes |= {**experts, "norm_topk_prob": True}
    return sizes


def _vision_sizes(kind: str) -> dict[str, Any]:
    sizes = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
    }
    if kind.startswith("qwen3"):
        return {**sizes, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return {**sizes, "window_size": PATCH * 8, "fullatt_block_indexes": [1], "tokens_per_second": 2}


def _audio_sizes(kind: str) -> dict[str, Any]:
    sizes = {
        "num_mel_bins": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": HIDDEN,
        "n_window": 50 if kind == "qwen3_omni" else 100,
    }
    return {**sizes, "n_window_infer": 400, "downsample_hidden_size": 16} if kind == "qwen3_omni" else sizes
