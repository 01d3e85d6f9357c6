"""What is asked of the server, what is taken from its answers, and where a completion ends (TK1, TK5, TK6)."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from relax.core.completion import GenerateInput, Sampling
from relax.core.error import EngineError, UserError
from relax.core.version import Version
from relax.engines.refusal import ContextError, RefusedError
from relax.engines.sglang.engine import build_sglang_engine
from relax.model.load import load_tokenizer
from tests.engines.setting import MODEL_PATH, NO_STOP, ask, prompt, session, vocabulary
from tests.engines.sglang_server import log_softmax, serve
from tests.engines.sglang_setting import ProvenReader, same, sglang_engine, weights_of


def decoder() -> object:
    decode = load_tokenizer(MODEL_PATH).decode
    return lambda ids: str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


async def test_rule_tk1_ids_and_logprobs_are_the_servers_own(tmp_path: Path) -> None:
    """Each logprob is that of the sampled token under softmax(logits / temperature) over the allowed vocabulary (TK5)."""
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        completion = await ask(engine, prompt(5), Sampling(0.7, 30, stop_ids=NO_STOP))
        sent = fake.asked("/generate")[-1]
    bias = dict.fromkeys(map(str, np.flatnonzero(~vocabulary().allowed)), -1e9)
    assert bias, "the vocabulary must forbid something, or this shows nothing"
    assert vocabulary().allowed[completion.token_ids].all()
    context = prompt(5).tolist()
    for token_id, logprob in zip(completion.token_ids.tolist(), completion.logprobs, strict=True):
        assert same(logprob, log_softmax(weights_of(1), context, 0.7, bias)[token_id])
        context.append(token_id)
    assert sent["input_ids"] == prompt(5).tolist()
    assert (completion.stop_reason, len(completion), set(completion.versions.tolist())) == ("length", 30, {1})


async def test_every_sampling_parameter_is_sent(tmp_path: Path) -> None:
    async with serve(decode=decoder()) as fake, sglang_engine(fake, tmp_path, decode=fake.decode) as engine:
        await ask(engine, prompt(4), Sampling(0.5, 3, 0.9, 7, (5, -1), ("zz",)), session(seed=2**40 + 11))
        await ask(engine, prompt(4), Sampling(0.0, 2))
        first, greedy = fake.asked("/generate")[-2:]
    assert set(first) == {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"}
    assert (first["return_logprob"], first["stream"]) == (True, False)
    params = first["sampling_params"]
    del params["logit_bias"]
    assert params == {
        "max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1, "sampling_seed": 11,
        "stop_token_ids": [5], "stop": ["zz"], "ignore_eos": False, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert greedy["sampling_params"]["temperature"] == 0
    assert greedy["sampling_params"]["top_k"] == -1
    assert greedy["sampling_params"]["stop_token_ids"] == list(vocabulary().stop_ids)


async def test_a_stop_id_ends_the_completion_and_is_its_last_token(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        free = await ask(engine, prompt(5), Sampling(1.0, 30, stop_ids=NO_STOP))
        assert fake.asked("/generate")[-1]["sampling_params"]["ignore_eos"] is True
        stop_id = int(free.token_ids[9])
        first = free.token_ids.tolist().index(stop_id)
        stopped = await ask(engine, prompt(5), Sampling(1.0, 30, stop_ids=(stop_id,)))
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    assert stopped.stop_reason == "stop"


async def test_a_stop_id_of_the_servers_own_does_not_end_the_completion(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        free = await ask(engine, prompt(5), Sampling(1.0, 20, stop_ids=NO_STOP))
        own = int(free.token_ids[4])
        named = next(int(one) for one in np.flatnonzero(vocabulary().allowed) if one not in free.token_ids)
        fake.eos = (own,)
        before = len(fake.asked("/generate"))
        completion = await ask(engine, prompt(5), Sampling(1.0, 20, stop_ids=(named,)))
        parts = len(fake.asked("/generate")) - before
    assert parts == 1 + free.token_ids[:-1].tolist().count(own)
    np.testing.assert_array_equal(completion.token_ids, free.token_ids)
    np.testing.assert_array_equal(completion.logprobs, free.logprobs)
    assert completion.stop_reason == "length"


@pytest.mark.parametrize("interrupted_after", [None, 7, 8, 12])
async def test_a_stop_string_ends_the_completion_also_across_an_interruption(
    tmp_path: Path, interrupted_after: int | None
) -> None:
    decode = decoder()
    async with serve(decode=decode) as fake, sglang_engine(fake, tmp_path, decode=decode) as engine:  # type: ignore[arg-type]
        free = await ask(engine, prompt(5), Sampling(1.0, 20, stop_ids=NO_STOP))
        string = decode(free.token_ids[7:9].tolist())  # type: ignore[operator]
        whole = Sampling(1.0, 20, stop_ids=NO_STOP, stop=(string,))
        if interrupted_after is None:
            stopped = await ask(engine, prompt(5), whole)
            assert stopped.token_ids.tolist() == free.token_ids[:9].tolist()
        else:
            begun = free.token_ids[:interrupted_after]
            rest = Sampling(1.0, 20 - interrupted_after, stop_ids=NO_STOP, stop=(string,))
            who = session(offset=interrupted_after)
            stopped = await ask(engine, np.concatenate([prompt(5), begun]).astype(np.int32), rest, who)
            # Whoever resumes after the stop string resumes what has ended: the next token is the last.
            assert (
                stopped.token_ids.tolist() == free.token_ids[interrupted_after : max(9, interrupted_after + 1)].tolist()
            )
    assert stopped.stop_reason == "stop"


async def test_a_stop_string_that_is_not_in_our_text_is_an_error(tmp_path: Path) -> None:
    """The server's tokenizer is another one, or its sampler found NaN and says so as a stop string."""
    decode = decoder()
    async with (
        serve(decode=lambda ids: "stop" if len(ids) > 3 else "") as fake,
        sglang_engine(fake, tmp_path, decode=decode) as engine,  # type: ignore[arg-type]
    ):
        with pytest.raises(EngineError, match="tokenizer is another one"):
            await ask(engine, prompt(5), Sampling(1.0, 9, stop_ids=NO_STOP, stop=("stop",)))
        fake.faults["/generate"] = [_answer([[-0.5, 3, None]], {"type": "stop", "matched": "NaN happened"})]
        with pytest.raises(EngineError, match="NaN happened"):
            await ask(engine, prompt(5), Sampling(1.0, 9, stop_ids=(3,)))


def _answer(pairs: object, finish: object, **changes: object) -> dict[str, object]:
    meta = {"finish_reason": finish, "output_token_logprobs": pairs, "weight_version": "v1"}
    return {"text": "", "meta_info": {**meta, **changes}}


async def test_what_it_cannot_do_is_refused_before_any_request(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, max_context_tokens=16) as engine:
        before = len(fake.log)
        medium: object = object()
        with pytest.raises(RefusedError, match="text only"):
            await engine.generate(GenerateInput(prompt(5), (medium,)), Sampling(), session())  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match="without a decoder"):
            await ask(engine, prompt(5), Sampling(stop=("a",)))
        with pytest.raises(ContextError):
            await ask(engine, prompt(16), Sampling())
        with pytest.raises(UserError, match="on_load"):
            await engine.pause("keep")
        assert len(fake.log) == before


def test_deterministic_runs_are_refused_when_it_is_built() -> None:
    with pytest.raises(UserError, match=r"run\.deterministic"):
        build_sglang_engine(
            None, model=None, vocabulary=None, compute=None, name="e", deterministic=True, clock=None  # type: ignore[arg-type]
        )  # fmt: skip


async def test_no_more_requests_than_slots_are_with_the_server(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, slots=2) as engine:
        asked = [asyncio.create_task(ask(engine, prompt(5, n), Sampling(1.0, 20, stop_ids=NO_STOP))) for n in range(5)]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, len(fake.runs))
            await asyncio.sleep(0.001)
        assert most == 2
        status = await engine.status()
        assert (status.running, status.waiting, status.sampled_tokens) == (0, 0, 100)
        assert status.busy_s > 0


async def test_an_interrupted_turn_samples_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """A pause and a reload of the same weights change no token: the stream goes on by position, the rest is prefilled again."""
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        whole = await ask(engine, prompt(5), Sampling(1.0, 40, stop_ids=NO_STOP))
        fake.tick_s = 0.005
        running = asyncio.create_task(ask(engine, prompt(5), Sampling(1.0, 40, stop_ids=NO_STOP)))
        while not any(len(run.tokens) > 5 for run in fake.runs.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.pause("recompute")
        assert not fake.runs, "nothing of ours is left on the server"
        await engine.load(Version(0, 1), ProvenReader())
        await engine.resume()
        again = await running
    np.testing.assert_array_equal(again.token_ids, whole.token_ids)
    np.testing.assert_array_equal(again.logprobs, whole.logprobs)
    assert [len(body["input_ids"]) for body in fake.asked("/generate")[-1:]] > [5]
