"""Stop strings of the embedded engine: the first token after which the decoded text holds one is the last, whatever tokens are."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relax.core.completion import Completion, GenerateInput, Sampling, resume
from relax.core.protocol import Decode
from relax.core.version import Version
from relax.engines.config import EmulatedEngineConfig
from relax.engines.emulated import EmulatedEngine
from relax.engines.refusal import RefusedError
from relax.engines.router import Router
from relax.engines.torch.stop import StopStrings
from relax.model.load import load_tokenizer
from tests.engines.clock import StepClock
from tests.engines.setting import (
    MODEL_PATH,
    NO_STOP,
    Reader,
    ask,
    ask_many,
    forced,
    prompt,
    session,
    torch_engine,
)

BIRD = "\N{DUCK}".encode()
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba\n",
    b" ",
    b"\n",
    *(BIRD[i : i + 1] for i in range(4)),
    "é".encode()[:1],
    "é".encode()[1:],
]
"""What token `id % 12` stands for: parts of words, several characters, and bytes that are no character alone."""


def pieced(ids: Sequence[int]) -> str:
    """As byte-level tokenizers decode."""
    return b"".join(PIECES[token % len(PIECES)] for token in ids).decode(errors="replace")


def run_wise(ids: Sequence[int]) -> str:
    """As byte-fallback decoders do: a run of lone bytes that is not valid as a whole becomes one sign for each."""
    text, run = "", b""
    for piece in [*(PIECES[token % len(PIECES)] for token in ids), b"\n"]:
        if not piece.isascii() and len(piece) == 1:
            run += piece
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run = b""
        text += piece.decode(errors="replace")
    return text[:-1]


def cut(completion: Completion, stop: Sequence[str], decode: Decode = pieced) -> int:
    """How many of the tokens of an endless completion there should be with stop strings."""
    ids = completion.token_ids.tolist()
    for count in range(1, len(ids) + 1):
        if any(string in decode(ids[:count]) for string in stop):
            return count
    return len(ids)


STOPS = [("ab",), ("b\n",), ("aab ", "\N{DUCK}"), ("é",), (" \n", "ba\nb"), ("zz",)]


@given(
    st.lists(st.integers(0, 11), max_size=80),
    st.sampled_from(STOPS),
    st.integers(0, 40),
    st.sampled_from([pieced, run_wise]),
)
@example([0] * 30 + [6, 7, 8, 9] * 6, ("\N{DUCK}" * 2,), 0, run_wise)
@example([6, 7, 8, 9] * 3 + [10, 11] * 2 + [5], ("é\n",), 0, run_wise)
@example([6, 7, 8, 9] * 20 + [0, 1], ("ab",), 7, run_wise)
def test_it_stops_where_the_whole_text_first_holds_a_string(
    ids: list[int], stop: tuple[str, ...], earlier: int, decode: Decode
) -> None:
    strings = StopStrings(stop, decode)
    for count in range(1, len(ids) + 1):
        whole = any(string in decode(ids[:count]) for string in stop)
        elsewhere = min(earlier, count - 1)
        assert strings.completed(ids[:elsewhere], ids[elsewhere:count]) == whole, ids[:count]
        if whole:
            return


async def test_case_e10_a_stop_string_ends_a_completion_as_stop_and_its_token_is_kept() -> None:
    async with torch_engine(decode=pieced) as engine:
        ended = 0
        for stop in STOPS:
            for number in range(4):
                free = await ask(engine, prompt(9, number), forced(60), session(number))
                stopped = await ask(engine, prompt(9, number), forced(60, stop=stop), session(number))
                count = cut(free, stop)
                np.testing.assert_array_equal(stopped.token_ids, free.token_ids[:count])
                np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:count])
                assert stopped.stop_reason == ("stop" if count < 60 else "length")
                ended += count < 60
    assert ended >= 8


async def test_case_e10_at_the_last_token_of_the_budget_the_string_is_the_reason() -> None:
    async with torch_engine(decode=pieced) as engine:
        free = await ask(engine, prompt(9), forced(60))
        count = cut(free, ("ab",))
        exact = await ask(engine, prompt(9), forced(count, stop=("ab",)))
        short = await ask(engine, prompt(9), forced(count - 1, stop=("ab",)))
    assert (exact.stop_reason, len(exact), short.stop_reason) == ("stop", count, "length")


async def test_requests_with_and_without_stop_strings_share_batches() -> None:
    requests = [
        (prompt(5, number), forced(50, stop=STOPS[number % 6] if number % 3 else ()), session(number))
        for number in range(12)
    ]
    async with torch_engine(decode=pieced, slots=5, burst=3) as engine:
        together = await ask_many(engine, requests)
        for request, completion in zip(requests, together, strict=True):
            alone = await ask(engine, *request)
            np.testing.assert_array_equal(completion.token_ids, alone.token_ids)
            assert completion.stop_reason == alone.stop_reason
    assert {completion.stop_reason for completion in together} == {"stop", "length"}


async def test_the_tokenizer_s_own_text_is_searched() -> None:
    tokenizer = load_tokenizer(MODEL_PATH)
    async with torch_engine(decode=lambda ids: tokenizer.decode(list(ids))) as engine:
        free = await ask(engine, prompt(9), forced(40))
        text = tokenizer.decode(free.token_ids.tolist())
        stopped = await ask(engine, prompt(9), forced(40, stop=(text[10:13],)))
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: text.index(text[10:13]) + 3])


async def test_case_a7_a_string_may_begin_in_what_another_engine_sampled() -> None:
    """Four tokens long; the request goes on after each of them, and after the token before."""
    tokenizer = load_tokenizer(MODEL_PATH)
    async with torch_engine(decode=lambda ids: tokenizer.decode(list(ids))) as engine:
        free = (await ask(engine, prompt(9), forced(40))).token_ids
        stop = tokenizer.decode(free[20:24].tolist())
        assert tokenizer.decode(free[:23].tolist()).find(stop) == -1
        for sampled in range(19, 24):
            longer = np.concatenate([prompt(9), free[:sampled]])
            rest = await ask(engine, longer, forced(40 - sampled, stop=(stop,)), resume(session(), sampled))
            np.testing.assert_array_equal(rest.token_ids, free[sampled:24])
            assert rest.stop_reason == "stop"
        # What the prompt says is no part of the completion.
        whole = await ask(engine, np.concatenate([prompt(9), free[:22]]), forced(2, stop=(stop,)), session())
        assert whole.stop_reason == "length"


@pytest.mark.parametrize("deterministic", [False, True])
async def test_case_a7_a_string_whose_tokens_two_engines_sampled_is_found(deterministic: bool) -> None:
    """Aborted after every few tokens, whichever side of the boundary a string lies on."""
    stop = ("aab ", "\N{DUCK}", "b\n")
    async with torch_engine(0, burst=1, decode=pieced, deterministic=deterministic) as engine:
        expected = []
        for number in range(6):
            free = await ask(engine, prompt(4, number), forced(80), session(number))
            expected.append(free.token_ids[: cut(free, stop)].tolist())
        assert {len(tokens) for tokens in expected} != {80}
        router = Router(StepClock(), max_resends=50)
        router.attach("a", engine, 6)
        router.set_live("a", 0)
        sampling = Sampling(max_tokens=80, stop_ids=NO_STOP, stop=stop)
        tasks = [
            asyncio.create_task(router.generate(GenerateInput(prompt(4, number)), sampling, session(number)))
            for number in range(6)
        ]
        for _ in range(8):
            until = (await engine.status()).sampled_tokens + 15
            while (await engine.status()).sampled_tokens < until and not all(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await engine.pause("abort")
            await engine.load(Version(0, 0), Reader())
            await engine.resume()
        completions = await asyncio.gather(*tasks)
    assert [completion.token_ids.tolist() for completion in completions] == expected
    assert sampling.stop == stop


async def test_a_stop_string_without_a_decoder_or_without_text_is_refused() -> None:
    async with torch_engine() as engine:
        with pytest.raises(RefusedError, match="without a decoder"):
            await ask(engine, prompt(4), forced(4, stop=("x",)))
    async with torch_engine(decode=pieced) as engine:
        with pytest.raises(RefusedError, match="a stop string is empty"):
            await ask(engine, prompt(4), forced(4, stop=("x", "")))


async def test_the_emulated_engine_accepts_stop_strings_and_has_no_text_to_find_them_in() -> None:
    clock = StepClock()
    engine = EmulatedEngine(EmulatedEngineConfig(vocabulary_size=112), clock, "engine-0")
    await clock.finish(engine.load(Version(), Reader(lambda _: {})))
    completion = await clock.finish(engine.generate(GenerateInput(prompt(4)), Sampling(stop=("a",)), session()))
    assert (len(completion), completion.stop_reason) == (16, "length")
