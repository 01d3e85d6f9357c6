"""Cases of section E (tokenisation) that the renderer answers."""

import numpy as np
import pytest

from relax.core.message import text_message
from tests.data.toy import (
    CHATML,
    LISTS_ONLY,
    MERGING,
    THINK_STRIPPING,
    bpe_tokenizer,
    char_renderer,
    char_tokenizer,
    renderer_of,
    sampled,
)

USER = text_message("user", "ab ab?")
TOOL = text_message("tool", "the sum")
STOPS = ("<|im_end|>",)


def extend(renderer, history, ids, answer=TOOL):
    context = renderer.encode(history[:-1]).token_ids.tolist() + ids
    suffix = renderer.extend(history, np.array(context, np.int32), [answer])
    return context, None if suffix is None else suffix.token_ids.tolist()


def test_case_e1_separator_after_the_stop_token_is_there():
    tokenizer = bpe_tokenizer()
    renderer = renderer_of(tokenizer, stops=STOPS)
    history = [USER, text_message("assistant", "twelve")]
    context, suffix = extend(renderer, history, sampled(tokenizer, "twelve<|im_end|>"))
    assert suffix[0] == sampled(tokenizer, "\n")[0]
    assert context + suffix == renderer.encode([*history, TOOL]).token_ids.tolist()


def test_case_e3_ids_that_encode_otherwise_are_kept_and_counted():
    tokenizer = bpe_tokenizer()
    renderer = renderer_of(tokenizer, stops=STOPS)
    assert len(sampled(tokenizer, " ab")) == 1
    ids = [*sampled(tokenizer, " a"), *sampled(tokenizer, "b"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    history = [USER, text_message("assistant", " ab")]
    context, suffix = extend(renderer, history, ids)
    assert not renderer.is_stable(np.array(ids, np.int32))
    assert renderer.is_stable(np.array(sampled(tokenizer, " ab<|im_end|>"), np.int32))
    assert context[-len(ids) :] == ids
    assert tokenizer.decode(context + suffix) == tokenizer.decode(renderer.encode([*history, TOOL]).token_ids)
    assert renderer.counts["unstable"] == 1
    assert renderer.counts["merged"] == 0


def test_case_e4_stripped_thinking_branches():
    tokenizer = bpe_tokenizer(THINK_STRIPPING)
    renderer = renderer_of(tokenizer, stops=STOPS)
    history = [USER, text_message("assistant", "<think>five</think>twelve")]
    _, suffix = extend(renderer, history, sampled(tokenizer, "<think>five</think>twelve<|im_end|>"))
    assert suffix is None
    assert renderer.counts["branched"] == 1
    again = renderer.encode([*history, TOOL]).token_ids
    assert "<think>" not in tokenizer.decode(again)


def test_case_e5_boundary_inside_a_merged_token_goes_by_rule_and_is_counted():
    tokenizer = bpe_tokenizer(MERGING)
    renderer = renderer_of(tokenizer, stops=STOPS)
    newline = sampled(tokenizer, "\n")
    assert len(sampled(tokenizer, "\n\n")) == 1
    history = [USER, text_message("assistant", "the\n")]
    context, suffix = extend(renderer, history, sampled(tokenizer, "the\n"), text_message("tool", "\nthe sum"))
    assert context[-1:] == newline
    assert suffix[:1] == newline
    assert renderer.counts["merged"] == 1


def test_case_e7_template_arguments_reach_every_render():
    template = "{{ '' if brief else 'Explain. ' }}" + CHATML
    tokenizer = bpe_tokenizer(template)
    renderer = renderer_of(tokenizer, {"brief": True}, stops=STOPS)
    assert "Explain" not in tokenizer.decode(renderer.encode([USER]).token_ids)
    assert "Explain" in tokenizer.decode(renderer_of(tokenizer, stops=STOPS).encode([USER]).token_ids)
    history = [USER, text_message("assistant", "ab")]
    context, suffix = extend(renderer, history, sampled(tokenizer, "ab<|im_end|>"))
    assert context + suffix == renderer.encode([*history, TOOL]).token_ids.tolist()
    assert char_renderer(plain=True).encode([USER]).token_ids.tolist() == sampled(char_tokenizer(), "ab ab?")


@pytest.mark.parametrize(
    "template",
    [LISTS_ONLY, "{% if messages[0].content is string %}{{ raise_exception('parts only') }}{% endif %}" + LISTS_ONLY],
    ids=["renders text to nothing", "raises"],
)
def test_case_e7_template_that_rejects_text_gets_a_list_of_parts(template):
    renderer = renderer_of(bpe_tokenizer(template), stops=STOPS)
    assert renderer.encode([USER]).token_ids.tolist() == (
        renderer_of(bpe_tokenizer(CHATML), stops=STOPS).encode([USER]).token_ids.tolist()
    )


def test_case_f12_one_role_may_want_parts_and_another_text():
    mixed = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}"
    )
    conversation = [USER, text_message("assistant", ""), TOOL]
    encoded = renderer_of(bpe_tokenizer(mixed), stops=STOPS).encode(conversation)
    assert (
        encoded.token_ids.tolist() == renderer_of(bpe_tokenizer(), stops=STOPS).encode(conversation).token_ids.tolist()
    )


def test_case_e10_the_end_of_turn_of_the_template_is_a_stop():
    tokenizer = bpe_tokenizer()
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id != end_of_turn
    renderer = renderer_of(tokenizer, stops=("<|endoftext|>",))
    assert renderer.stops == (tokenizer.eos_token_id, end_of_turn)
    assert renderer.decode(np.array([*sampled(tokenizer, "ab"), end_of_turn], np.int32)) == "ab"


def test_case_e15_earlier_assistant_turns_are_part_of_the_prompt():
    renderer = char_renderer()
    conversation = [USER, text_message("assistant", "12"), text_message("user", "and 3?")]
    text = (
        "<|im_start|>user\nab ab?<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\nand 3?<|im_end|>\n"
    )
    assert renderer.encode(conversation).token_ids.tolist() == sampled(
        char_tokenizer(), text + "<|im_start|>assistant\n"
    )


def test_case_f3_the_words_of_a_placeholder_are_ordinary_text():
    tokenizer = bpe_tokenizer()
    renderer = renderer_of(tokenizer, stops=STOPS)
    prose = text_message("user", "Use the <image> tag or <|image_pad|> here.")
    ids = renderer.encode([prose]).token_ids
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") not in ids
    assert prose.text in tokenizer.decode(ids)
