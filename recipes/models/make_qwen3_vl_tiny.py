"""Writes `recipes/models/qwen3-vl-tiny`: a Qwen3-VL configuration of 1.0 M parameters, the character tokenizer, no weights.

Run `python recipes/models/make_qwen3_vl_tiny.py` to make the committed files again. Recipes use the folder with
`model.weights: random`. Patches have 4 pixels, so a picture of 32x32 is 16 tokens. `chat_template_args: {plain: true}` joins the
parts of the messages without chat markup. The settings of the processors are written as the published models have them.
"""

import json
from pathlib import Path
from typing import Any

from make_qwen3_char import make_tokenizer as make_char_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PATCH, MERGE = 4, 2
NAMED = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
}  # fmt: skip
"""The names under which processors of transformers look for placeholders."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not plain -%}{{ '<|im_start|>' + message.role + '\\n' }}{%- endif -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'audio' -%}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if not plain -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt and not plain -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """The character tokenizer with a template for parts, and the placeholders under their names."""
    characters = make_char_tokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters.backend_tokenizer,
        eos_token=characters.eos_token,
        pad_token=characters.pad_token,
        extra_special_tokens=NAMED,
        **options,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def text_sizes(tokenizer: PreTrainedTokenizerFast, layers: int) -> dict[str, Any]:
    """Sizes of the language model. Its 16 rotary frequencies are shared out to time, height and width."""
    return {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
            "mrope_interleaved": True,
        },
    }


def vision_sizes() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }


def write_processor_settings(folder: Path, processor_class: str, video_class: str, **more: Any) -> None:
    """`preprocessor_config.json` and `video_preprocessor_config.json`, with `more` in the former."""
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 256 * 256},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).to_dict()
    images = {key: value for key, value in images.items() if value is not None}
    images["image_processor_type"] = "Qwen2VLImageProcessor"
    images["processor_class"] = processor_class
    # Written by hand: the video processors of transformers need torchvision even to be made.
    videos = {key: images[key] for key in sorted(images) if key not in ("image_processor_type", "data_format")}
    videos |= {
        "video_processor_type": video_class,
        "size": {"shortest_edge": 2 * (PATCH * MERGE) ** 2, "longest_edge": 64 * 64 * 64},
        "do_sample_frames": True,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 64,
    }
    for name, settings in (("preprocessor_config", images | more), ("video_preprocessor_config", videos)):
        text = json.dumps(settings, indent=2, sort_keys=True)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    ids = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={**text_sizes(tokenizer, layers=3), "tie_word_embeddings": True},
        vision_config=vision_sizes(),
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


if __name__ == "__main__":
    folder = Path(__file__).parent / "qwen3-vl-tiny"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)
    write_processor_settings(folder, "Qwen3VLProcessor", "Qwen3VLVideoProcessor")
