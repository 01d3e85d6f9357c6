"""TK5: facts of tokenizer and vocabulary, and what is refused at start."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config

from relax.core.error import UserError
from relax.model.load import load_model_config, load_tokenizer
from relax.model.vocabulary import read_vocabulary

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"


def make_tokenizer(*, adds_bos: bool = False, **tokens: str) -> PreTrainedTokenizerFast:
    """Ids 0-3 are letters, 4 `<s>`, 5 `</s>`, 6 the special `<image>`, 7 the ordinary added word `<video>`, 8 `<end>`."""
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate("abc?")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<image>")])
    tokenizer.add_tokens([AddedToken("<video>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def make_config(**changes: object) -> Qwen3Config:
    values = {"vocab_size": 12, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | changes
    return Qwen3Config(**values)


def test_rule_tk5_quickstart_model_allows_text_and_no_placeholder() -> None:
    tokenizer = load_tokenizer(QWEN3)
    vocabulary = read_vocabulary(tokenizer, load_model_config(QWEN3))
    names = ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>")
    assert set(vocabulary.placeholder_ids) == set(tokenizer.convert_tokens_to_ids(list(names)))
    assert not vocabulary.allowed[list(vocabulary.placeholder_ids)].any()
    assert not vocabulary.allowed[len(tokenizer) :].any()
    assert vocabulary.allowed.sum() == len(tokenizer) - 3
    assert vocabulary.allowed[list(vocabulary.stop_ids)].all()
    assert (vocabulary.size, vocabulary.pad_id) == (112, tokenizer.pad_token_id)
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.allowed[0] = False


def test_rule_tk5_ids_past_the_tokenizer_are_never_allowed() -> None:
    vocabulary = read_vocabulary(make_tokenizer(eos_token="</s>"), make_config())
    assert np.flatnonzero(~vocabulary.allowed).tolist() == [6, 9, 10, 11]
    assert any("3 of 12 logit columns" in note for note in vocabulary.notes)


def test_rule_mm4_placeholders_are_special_tokens_only() -> None:
    """`<video>` is an ordinary added word here, so the policy may write it; a config key makes it a placeholder."""
    assert read_vocabulary(make_tokenizer(), make_config()).placeholder_ids == (6,)
    config = make_config()
    config.video_token_id = 7
    assert read_vocabulary(make_tokenizer(), config).placeholder_ids == (6, 7)
    config.video_token_id = 1  # an ordinary letter, left over from a larger model's default
    assert read_vocabulary(make_tokenizer(), config).placeholder_ids == (6,)


def test_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="ids up to 8, but the model has only 8 logit columns"):
        read_vocabulary(make_tokenizer(), make_config(vocab_size=8))


def test_several_stop_tokens_are_all_kept_and_said(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 0]}')
    config = make_config(eos_token_id=[5, 8])
    config.name_or_path = str(tmp_path)
    vocabulary = read_vocabulary(make_tokenizer(eos_token="</s>"), config)
    assert vocabulary.stop_ids == (5, 8, 0)
    assert any("several stop tokens: '</s>', '<end>', 'a'" in note for note in vocabulary.notes)


@pytest.mark.parametrize("stop_id", [6, 11, 40])
def test_stop_token_that_cannot_be_sampled_is_refused(stop_id: int) -> None:
    with pytest.raises(UserError, match=f"stop id {stop_id}"):
        read_vocabulary(make_tokenizer(), make_config(eos_token_id=stop_id))


def test_missing_stop_token_is_said() -> None:
    vocabulary = read_vocabulary(make_tokenizer(), make_config())
    assert vocabulary.stop_ids == ()
    assert any("no stop token" in note for note in vocabulary.notes)


def test_missing_pad_falls_back_and_says_what_pads() -> None:
    assert read_vocabulary(make_tokenizer(pad_token="<end>"), make_config()).pad_id == 8
    configured = read_vocabulary(make_tokenizer(eos_token="</s>"), make_config(pad_token_id=3))
    assert configured.pad_id == 3
    assert any("id 3 of config.json pads" in note for note in configured.notes)
    fallback = read_vocabulary(make_tokenizer(eos_token="</s>"), make_config())
    assert fallback.pad_id == 5
    assert any("'</s>' (id 5) pads" in note for note in fallback.notes)
    assert read_vocabulary(make_tokenizer(), make_config()).pad_id == 0


def test_doubled_bos_is_detected() -> None:
    plain = make_tokenizer(bos_token="<s>")
    adding = make_tokenizer(adds_bos=True, bos_token="<s>")
    templated = make_tokenizer(adds_bos=True, bos_token="<s>")
    templated.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    refusing = make_tokenizer(adds_bos=True, bos_token="<s>")
    refusing.chat_template = "{{ raise_exception('system first') }}"
    facts = [read_vocabulary(tokenizer, make_config()) for tokenizer in (plain, adding, templated, refusing)]
    assert [fact.adds_bos for fact in facts] == [False, True, True, True]
    assert [fact.doubles_bos for fact in facts] == [False, False, True, False]
    assert {fact.bos_id for fact in facts} == {4}
