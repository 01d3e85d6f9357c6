"""A text's ids are those of the tokenizer's own call, however it is set up and whoever else uses it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.data.text_encoder import TextEncoder
from tests.data.toy import bpe_tokenizer, char_tokenizer

TOKENIZERS = {"char": char_tokenizer(), "bpe": bpe_tokenizer(), "unmarked": bpe_tokenizer(unmarked=True)}
ENCODERS = {name: TextEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<think>", "<|", "|>", "\n", " ", "sum", "ab", "12+3", "é", "\ue000"]
    )
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, split=st.booleans(), name=st.sampled_from(sorted(TOKENIZERS)), before=st.booleans())
def test_the_ids_are_those_of_the_call(text: str, split: bool, name: str, before: bool) -> None:
    tokenizer, encoder = TOKENIZERS[name], ENCODERS[name]
    assert encoder._core is not None
    options = {"split_special_tokens": True} if split else {}
    expected = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    if before:
        tokenizer(["<|im_end|>", "a b c"], split_special_tokens=not split)
    assert encoder.ids(text, split) == expected


def test_what_another_call_left_on_is_off_again() -> None:
    tokenizer = TOKENIZERS["bpe"]
    expected = ENCODERS["bpe"].ids("the sum of seven")
    tokenizer.pad_token = "<|endoftext|>"
    assert len(tokenizer("the sum", max_length=1, truncation=True)["input_ids"]) == 1
    assert ENCODERS["bpe"].ids("the sum of seven") == expected
    assert len(tokenizer("the sum", max_length=30, padding="max_length")["input_ids"]) == 30
    assert ENCODERS["bpe"].ids("the sum of seven") == expected


def test_a_tokenizer_that_splits_special_tokens_by_itself_goes_on_doing_so() -> None:
    tokenizer = bpe_tokenizer()
    encoder = TextEncoder(tokenizer)
    whole = encoder.ids("<|im_end|>")
    tokenizer.split_special_tokens = True
    assert encoder.ids("<|im_end|>") == tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] != whole


@pytest.mark.parametrize("name", ["__call__", "_encode_plus", "_convert_encoding", "_switch_to_input_mode"])
def test_a_tokenizer_with_a_call_of_its_own_is_called(name: str) -> None:
    tokenizer = bpe_tokenizer()
    calls: list[str] = []

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(super(type(self), self), name, lambda: None)(*args, **kwargs)

    tokenizer.__class__ = type("Own", (type(tokenizer),), {name: own})
    encoder = TextEncoder(tokenizer)
    assert encoder._core is None
    assert encoder.ids("the sum") == ENCODERS["bpe"].ids("the sum")
    assert encoder.ids("<|im_end|>", split_special=True) == ENCODERS["bpe"].ids("<|im_end|>", split_special=True)
    assert calls


def test_anything_else_that_is_called_like_a_tokenizer_will_do() -> None:
    def tokenizer(text: str, add_special_tokens: bool, split_special_tokens: bool = False) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(text), split_special_tokens]}

    assert TextEncoder(tokenizer).ids("abc") == [3, False]
    assert TextEncoder(tokenizer).ids("abc", split_special=True) == [3, True]
