"""The loop over turns, against a scripted engine."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from relax.core.completion import Completion, Sampling
from relax.core.error import DataError, EngineError, TaskError
from relax.core.message import Message, Prompt, PromptKey, TextPart, text_message
from relax.core.protocol import Step
from relax.core.trajectory import Trajectory
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import request_seed, run_episode

SAMPLING = Sampling(max_tokens=50)


async def _run(environment: Any, engine: toy.Scripted, **options: Any) -> Trajectory:
    renderer = options.pop("renderer", None) or toy.ToyRenderer()
    sampling = options.pop("sampling", SAMPLING)
    options = {"max_context_tokens": 500, "max_turns": 8} | options
    return await run_episode(
        options.pop("prompt", toy.prompt()), environment, renderer, engine, sampling, toy.sessions(), **options
    )


async def test_a_single_turn_is_prompt_and_reply() -> None:
    engine = toy.Scripted(toy.reply("yes"))
    trajectory = await _run(SingleTurn(SingleTurnConfig()), engine)
    shown = toy.ids(toy.USER, "hi", toy.END, toy.BREAK, toy.ASSISTANT)
    (segment,) = trajectory.segments
    assert engine.asked[0][0] == shown.tolist()
    assert segment.token_ids.tolist() == [*shown, *toy.ids("yes", toy.END)]
    assert segment.mask.tolist() == [False] * 6 + [True] * 4
    assert segment.logprobs.tolist() == [0.0] * 6 + [-1.0, -2.0, -3.0, -4.0]
    assert segment.versions.tolist() == [-1] * 6 + [3] * 4
    assert trajectory.response == "yes"
    assert trajectory.end == "done"
    assert (trajectory.turns[0].start, trajectory.turns[0].end) == (6, 10)
    assert trajectory.messages == (text_message("assistant", "yes"),)
    for array in (segment.token_ids, segment.mask, segment.logprobs, segment.versions, segment.mixed):
        assert not array.flags.writeable


async def test_rule_tk2_a_second_turn_continues_the_first_as_a_full_render_does() -> None:
    renderer, environment = toy.ToyRenderer(), toy.TwoTurn()
    trajectory = await _run(environment, toy.Scripted(toy.reply("one"), toy.reply("two", version=4)))
    (segment,) = trajectory.segments
    full = renderer.encode([*toy.prompt().messages, *trajectory.messages], generate=False).token_ids
    assert segment.token_ids.tolist() == full[:-1].tolist()  # all but the separator after the last turn
    sampled = [segment.token_ids[turn.start : turn.end].tolist() for turn in trajectory.turns]
    assert sampled == [toy.ids("one", toy.END).tolist(), toy.ids("two", toy.END).tolist()]
    assert segment.mask.sum() == 8
    assert segment.versions[segment.mask].tolist() == [3] * 4 + [4] * 4
    assert environment.replies == ["one", "two"]
    assert environment.closed == 1
    assert trajectory.info == {"branches": 0, "unstable": 0, "environment": [{"replies": 2}]}


async def test_rule_tk2_a_history_that_no_suffix_continues_branches() -> None:
    renderer = toy.ToyRenderer(strip_thoughts=True)
    engine = toy.Scripted(toy.reply("mm=one"), toy.reply("nn=two"))
    trajectory = await _run(toy.TwoTurn(), engine, renderer=renderer)
    first, second = trajectory.segments
    history = [*toy.prompt().messages, *trajectory.messages[:2]]
    render = renderer.encode(history).token_ids.tolist()
    assert engine.asked[1][0] == render
    assert second.token_ids.tolist() == [*render, *toy.ids("nn=two", toy.END)]
    assert second.mask.tolist() == [False] * len(render) + [True] * 7
    assert first.token_ids[first.mask].tolist() == toy.ids("mm=one", toy.END).tolist()
    assert [turn.segment for turn in trajectory.turns] == [0, 1]
    assert trajectory.info["branches"] == 1


async def test_rule_tk1_trained_ids_are_the_sampled_ones_even_if_the_text_encodes_otherwise() -> None:
    trajectory = await _run(SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("a?")))
    assert trajectory.segments[0].token_ids[-3:].tolist() == toy.ids("a?", toy.END).tolist()
    assert trajectory.info["unstable"] == 1


async def test_rule_tk3_the_mask_goes_by_position_not_by_token() -> None:
    """The prompt holds an assistant's turn with the same tokens, stop included."""
    shown = (text_message("user", "q"), text_message("assistant", "yes"), text_message("user", "again"))
    trajectory = await _run(
        SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("yes")), prompt=replace(toy.prompt(), messages=shown)
    )
    (segment,) = trajectory.segments
    assert segment.mask.nonzero()[0].tolist() == list(range(len(segment.mask) - 4, len(segment.mask)))


async def test_rule_tk6_the_turn_cap_ends_as_truncated_and_the_environment_is_not_stepped() -> None:
    environment = toy.TwoTurn()
    trajectory = await _run(environment, toy.Scripted(toy.reply("12345", "length")), sampling=Sampling(max_tokens=5))
    assert trajectory.end == "truncated"
    assert trajectory.response == "12345"
    assert environment.replies == []
    assert environment.closed == 1


async def test_case_e14_several_turns_may_together_exceed_the_cap_of_one() -> None:
    script = [toy.reply("12345678") for _ in range(3)]
    trajectory = await _run(toy.TwoTurn(turns=3), toy.Scripted(*script), sampling=Sampling(max_tokens=10))
    assert trajectory.end == "done"
    assert trajectory.num_sampled == 27


async def test_case_e14_a_prompt_longer_than_the_window_is_a_clean_truncation() -> None:
    engine = toy.Scripted()
    trajectory = await _run(toy.TwoTurn(), engine, max_context_tokens=6)
    assert trajectory.end == "truncated"
    assert trajectory.turns == ()
    assert trajectory.response == ""
    assert not trajectory.segments[0].mask.any()
    assert engine.asked == []


async def test_rule_tk6_budgets_of_trajectory_and_context_shrink_what_is_asked() -> None:
    engine = toy.Scripted(toy.reply("123"), toy.reply("45678", "length"))
    trajectory = await _run(toy.TwoTurn(turns=3), engine, max_sampled_tokens=9)
    assert [sampling.max_tokens for _, sampling, _ in engine.asked] == [9, 5]
    assert trajectory.end == "truncated"
    assert trajectory.num_sampled == 9
    engine = toy.Scripted(toy.reply("123"), toy.reply("12", "length"))
    await _run(toy.TwoTurn(turns=3), engine, max_context_tokens=24)
    # 6 tokens shown, 4 sampled, 12 for the separator and the tool's turn: 2 are left
    assert [sampling.max_tokens for _, sampling, _ in engine.asked] == [18, 2]


async def test_a_context_that_is_full_after_the_environments_reply_leaves_no_empty_tail() -> None:
    trajectory = await _run(toy.TwoTurn(turns=3), toy.Scripted(toy.reply("123")), max_context_tokens=22)
    (segment,) = trajectory.segments
    assert trajectory.end == "truncated"
    assert segment.mask[-1]
    assert len(segment.token_ids) == 10
    assert [message.role for message in trajectory.messages] == ["assistant", "tool"]


async def test_a_branch_without_room_leaves_no_segment() -> None:
    trajectory = await _run(
        toy.TwoTurn(turns=3),
        toy.Scripted(toy.reply("12345678=1")),
        renderer=toy.ToyRenderer(strip_thoughts=True),
        max_context_tokens=18,
    )
    assert trajectory.end == "truncated"
    assert len(trajectory.segments) == 1


async def test_the_last_allowed_turn_ends_as_truncated() -> None:
    trajectory = await _run(toy.TwoTurn(turns=9), toy.Scripted(toy.reply("a"), toy.reply("b")), max_turns=2)
    assert trajectory.end == "truncated"
    assert [turn.text for turn in trajectory.turns] == ["a", "b"]
    assert [message.role for message in trajectory.messages] == ["assistant", "tool"] * 2


async def test_case_a7_sampling_parameters_are_not_changed_across_turns() -> None:
    sampling = Sampling(temperature=0.5, max_tokens=50, top_p=0.9, stop_ids=(77,))
    engine = toy.Scripted(toy.reply("one"), toy.reply("two"))
    await _run(toy.TwoTurn(), engine, sampling=sampling)
    assert sampling == Sampling(temperature=0.5, max_tokens=50, top_p=0.9, stop_ids=(77,))
    assert [asked for _, asked, _ in engine.asked] == [replace(sampling, stop_ids=(77, toy.END))] * 2


async def test_rule_de1_each_turn_has_the_session_that_was_given_for_it() -> None:
    engine = toy.Scripted(toy.reply("one"), toy.reply("two"))
    await _run(toy.TwoTurn(), engine)
    assert [(session.turn, session.seed) for _, _, session in engine.asked] == [(0, 100), (1, 101)]


@pytest.mark.parametrize("turn", [0, 1])
async def test_case_a8_i7_an_abort_is_never_graded_as_an_answer(turn: int) -> None:
    environment = toy.TwoTurn()
    script = [toy.reply("one")] * turn + [toy.reply("the ans", "abort")]
    with pytest.raises(TaskError, match="aborted after 7 tokens"):
        await _run(environment, toy.Scripted(*script))
    assert len(environment.replies) == turn
    assert environment.closed == 1


def _broken(kind: str) -> Completion:
    good = toy.reply("yes")
    return {
        "lengths": replace(good, logprobs=good.logprobs[:-1]),
        "budget": toy.reply("x" * 60, "length"),
        "empty": replace(toy.reply("", "length")),
        "stop": replace(toy.reply("yes", "length"), stop_reason="stop"),
        "logprob": replace(good, logprobs=np.array([0, np.nan, 0, 0], np.float32)),
        "infinite": replace(good, logprobs=np.array([0, 0, 0, np.inf], np.float32)),
        "sentinel": replace(good, logprobs=np.array([0, -9999, 0, 0], np.float32)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lengths", "not as many logprobs"),
        ("budget", "60 tokens where 1 to 50"),
        ("empty", "0 tokens where 1 to 50"),
        ("stop", "which is no stop id"),
        ("logprob", "no finite logprob"),
        ("infinite", "no finite logprob"),
        ("sentinel", "no finite logprob"),
    ],
)
async def test_case_d2_a_broken_completion_is_refused(kind: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await _run(toy.TwoTurn(), toy.Scripted(_broken(kind)))


async def test_rule_mm4_a_sampled_placeholder_is_refused() -> None:
    allowed = np.ones(300, bool)
    await _run(SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("yes")), allowed=allowed)
    allowed[10 + ord("e")] = False
    with pytest.raises(EngineError, match=f"token {10 + ord('e')} is a media placeholder"):
        await _run(SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("yes")), allowed=allowed)
    with pytest.raises(EngineError, match="media placeholder or unknown"):
        await _run(SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("yes")), allowed=np.ones(50, bool))


@pytest.mark.parametrize("where", ["start", "step", "close", "nothing"])
async def test_a_failing_environment_is_a_task_error_and_is_closed(where: str) -> None:
    environment = toy.Broken(where)
    expected = "neither messages nor an end" if where == "nothing" else f"environment: {where} raised KeyError: 'lost'"
    with pytest.raises(TaskError, match=expected):
        await _run(environment, toy.Scripted(toy.reply("one")))
    assert environment.closed == 1


async def test_case_h10_an_engines_error_stays_an_engines_error() -> None:
    environment = toy.TwoTurn()
    with pytest.raises(EngineError, match="below the base version"):
        await _run(environment, toy.Scripted(EngineError("below the base version")))
    assert environment.closed == 1


async def test_cancellation_closes_the_environment() -> None:
    class Stuck(toy.Scripted):
        async def generate(self, *_: Any) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    environment = toy.TwoTurn()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await _run(environment, Stuck())
    assert environment.closed == 1


keys = st.builds(PromptKey, st.text(max_size=3), st.integers(0, 9), st.integers(0, 3), st.integers(0, 2))


@given(st.tuples(keys, st.integers(0, 9), st.integers(0, 9)), st.tuples(keys, st.integers(0, 9), st.integers(0, 9)))
def test_rule_de1_request_seeds_depend_on_identity_only(first: Any, second: Any) -> None:
    assert request_seed(1, *first) == request_seed(1, *first)
    assert (request_seed(1, *first) == request_seed(1, *second)) == (first == second)
    assert request_seed(1, *first) != request_seed(2, *first)


async def test_case_e1_two_turns_through_the_real_renderer_equal_a_full_render(
    tiny_tokenizer: Any, tiny_model_path: Any
) -> None:
    from transformers import AutoConfig

    from relax.data.renderer import TextRenderer
    from relax.model.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(tiny_tokenizer, AutoConfig.from_pretrained(tiny_model_path))
    renderer = TextRenderer(tiny_tokenizer, vocabulary)

    def sampled(text: str) -> Completion:
        token_ids = np.array([*tiny_tokenizer(text).input_ids, renderer.stops[0]], np.int32)
        zeros = np.zeros(len(token_ids))
        return Completion(token_ids, zeros.astype(np.float32), zeros.astype(np.int32), zeros.astype(bool), "stop")

    trajectory = await _run(
        toy.TwoTurn(), toy.Scripted(sampled("12+3"), sampled("15")), renderer=renderer, prompt=toy.prompt("1+2")
    )
    (segment,) = trajectory.segments
    full = renderer.encode([*toy.prompt("1+2").messages, *trajectory.messages], generate=False).token_ids
    assert segment.token_ids.tolist() == full[: len(segment.token_ids)].tolist()
    assert len(full) - len(segment.token_ids) <= 1
    assert trajectory.info["branches"] == 0
    assert segment.mask.sum() == 5 + 3


class Answering(toy.TwoTurn):
    """Gives what it was made with: as its start, or as its step. A callable is called, and may raise."""

    def __init__(self, where: str, answer: Any) -> None:
        super().__init__()
        self.where, self.answer = where, answer

    async def start(self, prompt: Prompt) -> Any:
        return self._answer() if self.where == "start" else await super().start(prompt)

    async def step(self, reply: Message) -> Any:
        return self._answer() if self.where == "step" else await super().step(reply)

    def _answer(self) -> Any:
        return self.answer() if callable(self.answer) else self.answer


def _raise(error: BaseException) -> Any:
    def answer() -> Any:
        raise error

    return answer


HELLO = text_message("user", "hello")


@pytest.mark.parametrize(
    ("where", "answer", "message"),
    [
        ("start", None, "start gave None; expected a tuple of messages"),
        ("start", (), "start gave no message"),
        ("start", "hello", "start gave a str; expected a tuple"),
        ("start", ("hello",), r"start gave a str among its messages; make one with text_message\(role, text\)"),
        ("start", (Message("user", "hello"),), "a user message whose parts are no tuple"),  # type: ignore[arg-type]
        ("start", (Message("user", (TextPart(5),)),), "a user message whose parts are no tuple"),  # type: ignore[arg-type]
        ("start", (text_message("bot", "hello"),), "role 'bot'; expected one of system"),  # type: ignore[arg-type]
        ("start", (text_message("user", "\ud83d"),), "half of a surrogate pair"),
        ("step", None, "step gave None; expected a Step"),
        ("step", ((HELLO,), None, {}), "step gave a tuple; expected a Step"),
        ("step", Step(done="finished!"), "step gave done='finished!'; expected None or one of done, truncated"),  # type: ignore[arg-type]
        ("step", Step(done=True), "step gave done=True"),  # type: ignore[arg-type]
        ("step", Step(done=["done"]), "step gave done="),  # type: ignore[arg-type]
        ("step", Step(("hello",)), "step gave a str among its messages"),  # type: ignore[arg-type]
        ("step", Step(None, "done"), "step gave None; expected a tuple of messages"),  # type: ignore[arg-type]
        ("step", Step(done="done", info=[1]), "step gave info that is a list; expected a mapping"),  # type: ignore[arg-type]
        ("step", Step(done="done", info={"board": object()}), "step gave info with an object, which is no JSON value"),
        ("step", Step(done="done", info={"huge": 10**400}), "an integer of 1329 bits"),
        ("step", _raise(SystemExit(3)), "step raised SystemExit: 3"),
        ("step", _raise(DataError("no")), "step raised DataError: no"),
        ("step", _raise(asyncio.CancelledError()), "step raised CancelledError"),
        ("start", _raise(asyncio.CancelledError()), "start raised CancelledError"),
    ],
)
async def test_what_an_environment_may_not_do_fails_its_trajectory_alone(where: str, answer: Any, message: str) -> None:
    environment = Answering(where, answer)
    with pytest.raises(TaskError, match=f"^environment: .*{message}"):
        await _run(environment, toy.Scripted(toy.reply("one"), toy.reply("two")))
    assert environment.closed == 1


async def test_an_environment_whose_method_is_absent_or_not_async_fails_its_trajectory_alone() -> None:
    class Absent:
        async def close(self) -> None: ...

    class Synchronous(Absent):
        def start(self, prompt: Prompt) -> Any:
            raise ValueError("early")

    for environment, message in [(Absent(), "start raised AttributeError"), (Synchronous(), "start raised ValueError")]:
        with pytest.raises(TaskError, match=message):
            await _run(environment, toy.Scripted())


async def test_a_persons_interrupt_is_not_an_environments_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        await _run(Answering("step", _raise(KeyboardInterrupt())), toy.Scripted(toy.reply("one")))


@pytest.mark.parametrize("turn", ["start", "step"])
async def test_messages_that_the_renderer_refuses_fail_the_trajectory_alone(turn: str) -> None:
    class Refusing(toy.ToyRenderer):
        def encode(self, messages: Any, generate: bool = True) -> Any:
            if turn == "start" or len(messages) > 1:
                raise DataError("the chat template refuses a conversation of tool")
            return super().encode(messages, generate)

    with pytest.raises(TaskError, match="environment: its messages cannot be shown to the policy: the chat template"):
        await _run(toy.TwoTurn(), toy.Scripted(toy.reply("one")), renderer=Refusing())


async def test_step_info_is_kept_as_plain_json() -> None:
    info = {"value": np.float32(0.5), "board": np.zeros(2), "lost": float("nan"), 3: (1, True)}
    trajectory = await _run(Answering("step", Step(done="done", info=info)), toy.Scripted(toy.reply("one")))
    plain = [{"value": 0.5, "board": [0.0, 0.0], "lost": None, "3": [1, True]}]
    assert json.loads(json.dumps(trajectory.info["environment"], allow_nan=False)) == plain
