"""Cases of section E (tokenisation) that the renderer answers."""

import numpy as np
import pytest

from relax.core.completion import Completion, Sampling, Session
from relax.core.error import DataError
from relax.core.id import group_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import run_episode
from tests.data.toy import (
    CHATML,
    LISTS_ONLY,
    MERGING,
    THINK_STRIPPING,
    bpe_tokenizer,
    char_renderer,
    char_tokenizer,
    problems,
    renderer_of,
    sampled,
    source_config,
    write_lines,
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


def test_case_e7_template_arguments_reach_the_measurement_of_prompts_and_of_the_system_prompt(tmp_path):
    """The same arguments decide whether a record is too long and what the policy is shown."""
    template = "{{ '' if brief else 'Explain each step of the sum. ' }}" + CHATML
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(2))))
    messages = [text_message("system", "Be brief."), text_message("user", "0+0=")]

    def lengths(args):
        renderer = renderer_of(bpe_tokenizer(template), args, stops=STOPS)
        length = len(renderer.encode(messages).token_ids)
        for limit, expected in ((length, 2), (length - 1, 0)):
            quarantine = Quarantine()
            rules = PromptRules(limit, system_prompt="Be brief.")
            try:
                found = len(read_prompts(config, renderer=renderer, rules=rules, quarantine=quarantine))
            except DataError:
                found = 0
            assert found == expected
        return length

    assert lengths({"brief": True}) < lengths({"brief": False}) == lengths({})


def test_case_e7_a_template_that_rejects_an_empty_conversation_or_a_lone_system_prompt():
    strict = (
        "{% if not messages or messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}" + CHATML
    )
    renderer = renderer_of(bpe_tokenizer(strict), stops=("<|endoftext|>",))
    plain = renderer_of(bpe_tokenizer(), stops=("<|endoftext|>",))
    conversation = [text_message("system", "Be brief."), USER]
    assert renderer.encode(conversation).token_ids.tolist() == plain.encode(conversation).token_ids.tolist()
    assert renderer.stops == plain.stops
    for refused, roles in (([], "no message: "), ([text_message("system", "Be brief.")], "system: no question")):
        with pytest.raises(DataError, match=f"the chat template refuses a conversation of {roles}"):
            renderer.encode(refused)


def test_case_e7_a_template_without_a_role_refuses_that_record_alone(tmp_path):
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    records = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}], "reference": 1}]
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(2), *records)))
    quarantine = Quarantine()
    renderer = renderer_of(bpe_tokenizer(no_system), stops=STOPS)
    assert len(read_prompts(config, renderer=renderer, rules=PromptRules(64), quarantine=quarantine)) == 2
    assert quarantine.reasons("toy") == {"cannot be rendered": 1}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["JSON text", "mapping"])
def test_case_e8_tool_calls_are_refused_in_either_form_and_never_dropped(tmp_path, arguments):
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2"},
    ]
    record = {"messages": messages, "reference": "2"}
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(1), record)))
    quarantine = Quarantine()
    assert len(read_prompts(config, renderer=char_renderer(), rules=PromptRules(64), quarantine=quarantine)) == 1
    assert quarantine.reasons("toy") == {"unknown message key": 1}


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


@pytest.mark.parametrize("turn", ["the last reply", "an earlier reply", "the question", "a tool's answer"])
@pytest.mark.parametrize("stray", [False, True], ids=["", "sampled otherwise"])
def test_case_e11_a_history_that_was_edited_branches(turn, stray):
    """Also when the sampled ids are not those of a render, so that ids alone tell nothing."""
    tokenizer = bpe_tokenizer()
    renderer = renderer_of(tokenizer, stops=STOPS)
    first = [*sampled(tokenizer, " a"), *sampled(tokenizer, "b")] if stray else sampled(tokenizer, " ab")
    end = sampled(tokenizer, "<|im_end|>")
    history = [USER, text_message("assistant", " ab"), TOOL, text_message("assistant", "twelve")]
    context = renderer.encode(history[:1]).token_ids.tolist() + first + end
    context += renderer.extend(history[:2], np.array(context, np.int32), [TOOL]).token_ids.tolist()
    context += sampled(tokenizer, "twelve<|im_end|>")
    answer = [text_message("user", "the end")]
    assert renderer.extend(history, np.array(context, np.int32), answer) is not None
    position = {"the question": 0, "an earlier reply": 1, "a tool's answer": 2, "the last reply": 3}[turn]
    edited = list(history)
    edited[position] = text_message(history[position].role, "five")
    renderer.counts.clear()
    assert renderer.extend(edited, np.array(context, np.int32), answer) is None
    assert renderer.counts["branched"] == 1


async def test_case_e15_earlier_assistant_turns_are_not_trained():
    tokenizer = bpe_tokenizer()
    renderer = renderer_of(tokenizer, stops=STOPS)
    ids = np.array(sampled(tokenizer, "the sum<|im_end|>"), np.int32)
    reply = Completion(
        ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), np.zeros(len(ids), bool), "stop"
    )

    class Engine:
        async def generate(self, input, sampling, session):
            return reply

    conversation = (USER, text_message("assistant", "the sum"), text_message("user", "and 3?"))
    prompt = Prompt(PromptKey("toy", 0, 0), "sum", conversation, reference="15")
    trajectory = await run_episode(
        prompt,
        SingleTurn(SingleTurnConfig()),
        renderer,
        Engine(),
        Sampling(temperature=1.0, max_tokens=8, stop_ids=renderer.stops),
        lambda turn: Session(group_id(0), 0, turn, 0, 0),
        max_context_tokens=256,
    )
    [segment] = trajectory.segments
    length = len(renderer.encode(conversation).token_ids)
    assert segment.mask.tolist() == [False] * length + [True] * len(ids)


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
