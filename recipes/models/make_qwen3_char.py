"""Writes `recipes/models/qwen3-char`: a 0.4 M-parameter Qwen3 configuration and a character tokenizer, no weights; and
`recipes/models/qwen3-char-large`, the configuration alone of a larger model with the same tokens, for a teacher.

Run `python recipes/models/make_qwen3_char.py` to make the committed files again. Recipes use the folder with
`model.weights: random`; the tokenizer has one token for each printable ASCII character, ChatML's special tokens and media
placeholders (which no policy may sample), and one token for each role name. `chat_template_args: {plain: true}` joins the
messages' texts without any markup, which keeps tiny tasks tiny.
"""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
]  # fmt: skip
ROLES = ["system", "user", "assistant", "tool"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if plain -%}{{ message.content }}"
    "{%- else -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt and not plain -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    printable = string.digits + string.ascii_letters + string.punctuation + " \n"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted({byte_level.pre_tokenize_str(character)[0][0] for character in printable})
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ROLES)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config(tokenizer: PreTrainedTokenizerFast, width: int = 128, layers: int = 2) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


if __name__ == "__main__":
    folder = Path(__file__).parent / "qwen3-char"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)
    make_config(tokenizer, width=192, layers=2).save_pretrained(folder.with_name("qwen3-char-large"))
