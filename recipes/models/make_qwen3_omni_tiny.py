"""Writes `recipes/models/qwen3-omni-tiny`: the thinker of a Qwen3-Omni of 1.0 M parameters, the character tokenizer, no weights.

Run `python recipes/models/make_qwen3_omni_tiny.py` to make the committed files again. The architecture is the published one: a
language model with a mixture of experts, a vision encoder with DeepStack (patches of 4 pixels, so a picture of 32x32 is 16
tokens) and a sound encoder (13 tokens for a second). Recipes use the folder with `model.weights: random`.
"""

from pathlib import Path

from make_qwen3_vl_tiny import make_tokenizer, text_sizes, vision_sizes, write_processor_settings
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

MEL_BINS = 128


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3OmniMoeThinkerConfig:
    ids = tokenizer.convert_tokens_to_ids
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    config = Qwen3OmniMoeThinkerConfig(
        architectures=["Qwen3OmniMoeThinkerForConditionalGeneration"],
        text_config={**text_sizes(tokenizer, layers=3), **experts, "tie_word_embeddings": False},
        vision_config=vision_sizes(),
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": 128,
            "n_window": 50,
            "n_window_infer": 400,
            "downsample_hidden_size": 32,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        audio_token_id=ids("<|audio_pad|>"),
        audio_start_token_id=ids("<|audio_start|>"),
        user_token_id=ids("user"),
        position_id_per_seconds=13,
    )
    config.vision_start_token_id = ids("<|vision_start|>")
    config.vision_end_token_id = ids("<|vision_end|>")
    return config


if __name__ == "__main__":
    folder = Path(__file__).parent / "qwen3-omni-tiny"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)
    sounds = WhisperFeatureExtractor(
        feature_size=MEL_BINS,
        sampling_rate=16000,
        hop_length=160,
        chunk_length=30,
        n_fft=400,
        return_attention_mask=True,
    )
    write_processor_settings(
        folder, "Qwen3OmniMoeProcessor", "Qwen2VLVideoProcessor", **{
            key: value for key, value in sounds.to_dict().items() if key != "mel_filters" and value is not None
        }
    )  # fmt: skip
