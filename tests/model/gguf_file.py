"""A tiny Llama as a GGUF file, written as llama.cpp's converter would: for the tests of model sources."""

import string
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, TokenType

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACE, LINE = "\u0120", "\u010a"
"""How a byte-level vocabulary spells a space and a line feed."""


def make_llama(seed: int = 0) -> Any:
    """A Llama of 2 layers with grouped heads and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(_tokens()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, splitting: str = "smollm") -> Path:
    """`splitting` is the name of the rules by which text is cut before merging."""
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, splitting)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_as_written(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokens() -> list[str]:
    return [*SPECIAL, *string.digits, *string.ascii_letters, *"+=?.!", SPACE, LINE, SPACE + SPACE, LINE + LINE]


def _add_tokenizer(writer: Any, splitting: str) -> None:
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in _tokens()]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(_tokens())
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{SPACE} {SPACE}", f"{LINE} {LINE}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def _as_written(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, Any]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:  # llama.cpp keeps the two halves of a rotary pair side by side
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name, tensor.contiguous().numpy()
