"""A server that is gone, silent, slow, wrong or somebody else's; cancelled requests; the key of the server (SE1)."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax.config.secret import Secret
from relax.core.completion import Sampling
from relax.core.error import EngineError, UserError
from relax.core.version import Version
from relax.engines.config import SglangEngineConfig
from relax.engines.refusal import RefusedError
from relax.engines.sglang.client import AnsweredError, Client, UnansweredError
from relax.engines.table import ENGINES
from tests.engines.setting import NO_STOP, ask, prompt
from tests.engines.sglang_server import serve
from tests.engines.sglang_setting import ProvenReader, sglang_engine

LENGTH = {"type": "length", "length": 4}
FOUR = [[-1.0, 5, None]] * 4


def answer(pairs: Any = FOUR, finish: Any = LENGTH, **changes: Any) -> dict[str, Any]:
    meta = {"finish_reason": finish, "output_token_logprobs": pairs, "weight_version": "v1", "completion_tokens": 4}
    return {"text": "", "output_ids": [5] * 4, "meta_info": {**meta, **changes}}


async def _four(engine: Any) -> Any:
    return await ask(engine, prompt(5), Sampling(1.0, 4, stop_ids=NO_STOP))


async def test_the_right_shape_is_taken(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        fake.faults["/generate"] = [answer()]
        assert (await _four(engine)).token_ids.tolist() == [5] * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("not JSON", "no meta_info"),
        ([], "no meta_info"),
        ({"text": "x"}, "no meta_info"),
        (answer(pairs=None), "expected a list"),
        (answer(pairs=[[-1.0, 5, None]] * 3), "3 have logprobs"),
        (answer(pairs=[[-1.0, 5, None]] * 5, completion_tokens=5), "at most 4"),
        (answer(pairs=[[None, 5, None]] * 4), "expected .logprob, token id"),
        (answer(pairs=[[-1.0, "5", None]] * 4), "expected .logprob, token id"),
        (answer(pairs=[[-1.0]] * 4), "expected .logprob, token id"),
        (answer(pairs=[[-1.0, 500_000, None]] * 4), "token id 500000"),
        (answer(finish=None), "finish_reason"),
        (answer(finish={"type": "tired"}), "finish_reason"),
        (answer(pairs=[], completion_tokens=0), "no token was sampled"),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(tmp_path: Path, wrong: Any, message: str) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        fake.faults["/generate"] = [wrong]
        with pytest.raises(EngineError, match=message) as caught:
            await _four(engine)
        assert "engine engine-0" in str(caught.value)
        assert len(await _four(engine)) == 4, "the engine goes on"


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (500, AnsweredError, "with 500: .*fault 500"),
        (503, AnsweredError, "with 503"),
        (302, AnsweredError, "with 302"),
        (400, RefusedError, "with 400: .*fault 400"),
        ("drop", UnansweredError, "whether it was done is not known"),
        ("cut", UnansweredError, "IncompleteRead"),
        ("hang", UnansweredError, "no answer within 1.5 s"),
    ],
)
async def test_a_request_that_fails_is_an_error_and_is_sent_once(
    tmp_path: Path, fault: Any, error: type[Exception], message: str
) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, request_s=1.5) as engine:
        sent, fake.faults["/generate"] = len(fake.asked("/generate")), [fault]
        with pytest.raises(error, match=message):
            await _four(engine)
        assert len(fake.asked("/generate")) == sent + 1
        async with asyncio.timeout(10):
            while not fake.asked("/abort_request"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        aborted = [body["rid"] for body in fake.asked("/abort_request")]
        assert aborted == [fake.asked("/generate")[-1]["rid"]], "what may still run there is told to end"
        assert len(await _four(engine)) == 4


async def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    async with serve() as fake:
        url = fake.url
    with pytest.raises(UnansweredError, match=r"POST /generate to http://127.*failed") as caught:
        await Client(url, "engine-0").post("/generate", {}, 1.0)
    assert not caught.value.sent


async def test_a_cancelled_request_is_aborted_on_the_server(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        asked = asyncio.create_task(ask(engine, prompt(5), Sampling(1.0, 5000, stop_ids=NO_STOP)))
        async with asyncio.timeout(10):
            while not fake.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            rid = next(iter(fake.runs))
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            while fake.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert [body["rid"] for body in fake.asked("/abort_request")] == [rid]
        assert (await engine.status()).running == 0


async def test_close_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, slots=1) as engine:
        asked = [asyncio.create_task(ask(engine, prompt(5), Sampling(1.0, 5000, stop_ids=NO_STOP))) for _ in range(2)]
        async with asyncio.timeout(10):
            while not fake.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await engine.close()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            while fake.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert all(isinstance(one, EngineError) and "closed" in str(one) for one in ended)
        await engine.close()


async def test_a_server_with_other_weights_is_found_out_and_fails_the_engine(tmp_path: Path) -> None:
    """Somebody started the server again: its label is its own, and so are its weights."""
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        fake.label, fake.weights = "default", 0
        with pytest.raises(EngineError, match="weight version default, loaded was v1"):
            await _four(engine)
        status = await engine.status()
        assert not status.accepting
        assert "started again" in str(status.failed)
        with pytest.raises(EngineError, match="load a version to restart it"):
            await _four(engine)
        await engine.load(Version(0, 1), ProvenReader())
        assert len(await _four(engine)) == 4


async def test_tokens_of_two_versions_in_one_answer_are_refused(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        spans = [{"version": "v0", "start": 0, "end": 2}, {"version": "v1", "start": 2, "end": 4}]
        fake.faults["/generate"] = [answer(weight_versions=spans)]
        with pytest.raises(EngineError, match="weight version v0, v1"):
            await _four(engine)


async def test_an_abort_by_somebody_else_hands_back_what_was_sampled(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        aborted = {"type": "abort", "message": "Aborted"}
        waiting = {"meta_info": {"finish_reason": aborted, "completion_tokens": 0}}
        fake.faults["/generate"] = [answer(FOUR[:3], aborted, completion_tokens=3), waiting]
        assert [len(one) for one in (await _four(engine), await _four(engine))] == [3, 0]
        fake.faults["/generate"] = [waiting]
        assert (await _four(engine)).stop_reason == "abort"


async def test_a_pause_that_the_server_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, call_s=1.5) as engine:
        asked = asyncio.create_task(ask(engine, prompt(5), Sampling(1.0, 400, stop_ids=NO_STOP)))
        async with asyncio.timeout(10):
            while not fake.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            fake.faults["/abort_request"] = ["hang"]
            with pytest.raises(EngineError, match=r"1\.5 s"):
                await engine.pause("recompute")
            assert (await engine.status()).accepting
            assert len(await asked) == 400


async def test_rule_se1_the_key_is_sent_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "hunter2")
    async with serve(api_key="hunter2") as fake, sglang_engine(fake, tmp_path, api_key="env:SERVER_KEY") as engine:
        assert len(await _four(engine)) == 4
        monkeypatch.setenv("SERVER_KEY", "hunter3")
        with pytest.raises(AnsweredError, match="env:SERVER_KEY") as caught:
            await _four(engine)
        assert "hunter" not in str(caught.value)
        client = Client(fake.url, "engine-0")
        with pytest.raises(AnsweredError, match="no key"):
            await client.post("/flush_cache", {}, 1.0)
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(UserError, match="SERVER_KEY is not set"):
            await Client(fake.url, "engine-0", Secret("SERVER_KEY")).post("/flush_cache", {}, 1.0)
    node = SglangEngineConfig(url="http://h:1", folder="f", api_key="env:SERVER_KEY")  # type: ignore[arg-type]
    assert node.model_dump(mode="json")["api_key"] == "env:SERVER_KEY"


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "https://server.example:443/", "http://[::1]:30000"])
def test_a_url_is_an_address(url: str) -> None:
    assert SglangEngineConfig(url=url, folder="f").url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:30000", "ftp://h:1", "http://", "http://h:x", "http://h:99999", "http://h:1/v1", "http://h:1?a=b", "http://h:1 x",
     "http://h:1\r\nX: y", "unix:///tmp/x"],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="write http://host:port"):
        SglangEngineConfig(url=url, folder="f")


def test_rule_se1_a_url_with_credentials_is_refused() -> None:
    with pytest.raises(ValidationError, match="holds credentials"):
        SglangEngineConfig(url="http://me:hunter2@h:1", folder="f")


def test_the_config_loads_without_torch_and_the_table_knows_the_engine() -> None:
    code = "import sys, relax.engines.config as c; c.SglangEngineConfig(url='http://h:1', folder='f'); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
    assert ENGINES.config_class("sglang") is SglangEngineConfig
    assert ENGINES.component("sglang").__name__ == "build_sglang_engine"
