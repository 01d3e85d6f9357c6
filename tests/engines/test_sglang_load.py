"""Loads: the files, the proof, and what is held when the server refuses, dies or is late (WS3, WS4, WS5)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.completion import Sampling
from relax.core.error import EngineError, TransportError
from relax.core.version import Version
from relax.engines.sglang.folder import ServerFolder
from relax.model.load import load_model
from relax.model.name import published_tensors
from relax.weights.proof import check_proof, probe_gap
from relax.weights.updater import EngineUpdater
from tests.engines.setting import MODEL_PATH, NO_STOP, Reader, ask, model_of, prompt
from tests.engines.sglang_server import Run, expected_logprobs, serve
from tests.engines.sglang_setting import PROBE, ProvenReader, sglang_engine, weights_of

V2 = Version(0, 2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def _versions(engine: Any) -> set[int]:
    return set((await ask(engine, prompt(5), Sampling(1.0, 3, stop_ids=NO_STOP))).versions.tolist())


async def test_a_version_on_the_disk_is_a_model_that_others_load(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "engine-0", load_model(MODEL_PATH, "random", "float32", 99))
    path = folder.write(await ProvenReader().fetch(Version(1, 3)))
    assert path == str(tmp_path / "engine-0" / "0001-00000003")
    loaded = published_tensors(load_model(path, "pretrained", "float32"))
    expected = published_tensors(model_of(3))
    assert loaded.keys() == expected.keys()
    assert all((loaded[name] == value).all() for name, value in expected.items())
    assert json.loads((Path(path) / "config.json").read_text())["model_type"] == "qwen3"


async def test_a_version_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ServerFolder(tmp_path, load_model(MODEL_PATH, "random", "float32", 99))

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    weights = await ProvenReader().fetch(V2)
    monkeypatch.setattr("relax.engines.sglang.folder._flush", fail)
    with pytest.raises(OSError, match="No space"):
        folder.write(weights)
    assert names(tmp_path) == []


async def test_rule_ws4_a_load_is_proved_by_the_server_and_the_older_files_go(tmp_path: Path) -> None:
    reader = ProvenReader()
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        await engine.pause("recompute")
        report = await engine.load(V2, reader)
        await engine.resume()
        manifest = (await reader.fetch(V2)).manifest
        assert check_proof("engine-0", manifest, report) < 1e-5
        assert names(tmp_path / "engine-0") == ["0000-00000002"]
        assert fake.asked("/update_weights_from_disk")[-1] == {
            "model_path": str(tmp_path / "engine-0" / "0000-00000002"), "weight_version": "v2", "flush_cache": True,
        }  # fmt: skip
        assert await _versions(engine) == {2}
        assert not (await engine.status()).failed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("original", [False, True])
async def test_rule_tk5_a_server_that_tells_untempered_logprobs_fails_the_proof(
    tmp_path: Path, temperature: float, original: bool
) -> None:
    reader = ProvenReader(temperature=temperature)
    async with serve(original_logprobs=original) as fake, sglang_engine(fake, tmp_path, None) as engine:
        report = await engine.load(V2, reader)
    gap = probe_gap("engine-0", (await reader.fetch(V2)).manifest, report)
    assert (gap < 1e-4) is (not original or temperature == 1.0)


async def test_the_server_may_see_the_folder_elsewhere(tmp_path: Path) -> None:
    seen = tmp_path / "mounted"
    seen.symlink_to(tmp_path / "own")
    async with (
        serve() as fake,
        sglang_engine(fake, tmp_path / "own", folder_on_server=f"{seen}/") as engine,
    ):
        assert fake.asked("/update_weights_from_disk")[0]["model_path"] == f"{seen}/engine-0/0000-00000001"
        assert await _versions(engine) == {1}


async def test_a_load_waits_until_nothing_runs_on_the_server(tmp_path: Path) -> None:
    """A load that finds a request kills the server: it cannot flush its cache."""
    async with serve() as fake, sglang_engine(fake, tmp_path, call_s=5.0) as engine:
        await engine.pause("abort")
        fake.runs["of somebody"] = Run()
        load = asyncio.create_task(engine.load(V2, ProvenReader()))
        await asyncio.sleep(0.5)
        assert len(fake.asked("/update_weights_from_disk")) == 1
        del fake.runs["of somebody"]
        await load
        assert not fake.crashed


async def test_a_server_that_is_never_idle_keeps_its_version(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, call_s=1.5) as engine:
        await engine.pause("abort")
        fake.runs["of somebody"] = Run()
        with pytest.raises(EngineError, match=r"was not idle within 1\.5 s"):
            await engine.load(V2, ProvenReader())
        fake.runs.clear()
        await engine.resume()
        assert await _versions(engine) == {1}


@pytest.mark.parametrize("goes_back", [True, False])
async def test_rule_ws5_a_refused_load_leaves_the_old_version_only_if_the_probe_finds_it(
    tmp_path: Path, goes_back: bool
) -> None:
    async with (
        serve(goes_back=goes_back) as fake,
        sglang_engine(fake, tmp_path / "own") as engine,
    ):
        await engine.pause("recompute")
        engine._server._folder._seen_as = str(tmp_path / "a folder that the server does not see")  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="Rolling back"):
            await engine.load(V2, ProvenReader())
        status = await engine.status()
        await engine.resume()
        if goes_back:
            assert (status.version, status.failed) == (Version(0, 1), None)
            assert await _versions(engine) == {1}
        else:
            assert status.version is None
            assert status.failed is not None
            assert not status.accepting
            with pytest.raises(EngineError, match="has failed"):
                await _versions(engine)


@pytest.mark.parametrize("fault", ["hang", "drop", "cut", {"success": False, "message": "no"}, "ok", 500])
async def test_rule_ws5_an_engine_whose_load_ended_nobody_knows_how_has_failed(tmp_path: Path, fault: Any) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, load_s=1.5) as engine:
        await engine.pause("recompute")
        fake.faults["/update_weights_from_disk"] = [fault]
        fake.faults["/generate"] = [500]  # nor can it be asked what it holds
        with pytest.raises(EngineError):
            await engine.load(V2, ProvenReader())
        status = await engine.status()
        assert (status.version, status.accepting) == (None, False)
        fake.faults.clear()
        await engine.load(V2, ProvenReader())
        await engine.resume()
        assert await _versions(engine) == {2}


async def test_rule_ws5_an_unanswered_load_fails_the_engine_even_if_the_old_weights_are_still_there(
    tmp_path: Path,
) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path, load_s=1.5) as engine:
        await engine.pause("recompute")
        fake.faults["/update_weights_from_disk"] = ["hang"]
        with pytest.raises(EngineError, match="whether it was done is not known"):
            await engine.load(V2, ProvenReader())
        assert (await engine.status()).version is None, "the server may swap a moment later"
        assert len(fake.asked("/update_weights_from_disk")) == 2, "and it is not asked again"


async def test_rule_ws5_a_cancelled_load_fails_the_engine(tmp_path: Path) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        await engine.pause("recompute")
        fake.faults["/update_weights_from_disk"] = ["hang"]
        load = asyncio.create_task(engine.load(V2, ProvenReader()))
        async with asyncio.timeout(10):
            while len(fake.asked("/update_weights_from_disk")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert (await engine.status()).version is None


@pytest.mark.parametrize(
    "wrong", [{}, [], [{"meta_info": {"weight_version": "v2"}}] * 5, [{"meta_info": {"weight_version": "v1"}}] * 5]
)
async def test_a_probe_that_is_answered_wrongly_fails_the_load(tmp_path: Path, wrong: Any) -> None:
    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        await engine.pause("recompute")
        fake.faults["/generate"] = [wrong]
        with pytest.raises(EngineError, match="answers the probe"):
            await engine.load(V2, ProvenReader())
        assert (await engine.status()).version is None


async def test_rule_ws3_weights_that_do_not_fit_never_reach_the_server(tmp_path: Path) -> None:
    def short(number: int) -> dict[str, Any]:
        return dict(list(published_tensors(model_of(number)).items())[:-1])

    async with serve() as fake, sglang_engine(fake, tmp_path) as engine:
        await engine.pause("recompute")
        with pytest.raises(TransportError, match="missing"):
            await engine.load(V2, Reader(short))
        await engine.resume()
        assert await _versions(engine) == {1}
        assert len(fake.asked("/update_weights_from_disk")) == 1


async def test_the_updater_takes_it_from_version_to_version_and_refuses_a_false_one(tmp_path: Path) -> None:
    """WS4, WS5 end to end: a running request goes on, a version whose proof fails is not served, the next one is."""

    class Lying(ProvenReader):
        async def fetch(self, version: Version) -> Any:
            weights = await super().fetch(version)
            if version.number == 3:
                weights.manifest.probe.logprobs.flags.writeable = True  # type: ignore[union-attr]
                weights.manifest.probe.logprobs[2] += 0.01  # type: ignore[union-attr]
            return weights

    told: list[str] = []
    async with serve(tick_s=0.005) as fake, sglang_engine(fake, tmp_path, None) as engine:
        updater = EngineUpdater(
            "engine-0", engine, Lying(), on_failed=lambda name, reason, final: told.append(reason), budget=0
        )
        running = asyncio.create_task(updater.run())
        updater.notify(Version(0, 1))
        await updater.wait_live(Version(0, 1), 20)
        turn = asyncio.create_task(ask(engine, prompt(5), Sampling(1.0, 60, stop_ids=NO_STOP)))
        while not any(len(run.tokens) > 5 for run in fake.runs.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        updater.notify(V2)
        await updater.wait_live(V2, 20)
        assert set((await turn).versions.tolist()) == {1, 2}
        updater.notify(Version(0, 3))
        with pytest.raises(EngineError, match=r"given up.*\[WS4\]"):
            await updater.wait_live(Version(0, 3), 20)
        assert len(told) == 1
        updater.notify(Version(0, 4))
        await updater.wait_live(Version(0, 4), 20)
        assert await _versions(engine) == {4}
        assert fake.weights == weights_of(4)
        np.testing.assert_allclose(
            engine._proof[1], expected_logprobs(weights_of(4), PROBE), atol=1e-5  # type: ignore[index]
        )  # fmt: skip
        updater.close()
        await running
