"""Case F10: whatever is done to a medium's content is done in a process or on a thread, and never on the event loop (MM2).

No time is measured here, machines being as busy as they are: who does the work is asked instead. `benchmarks/media.py` prints gaps.
"""

import asyncio
import builtins
import io
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relax.data.media.access as access
import relax.data.media.store as store
from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.message import Prompt, PromptKey, text_message
from relax.data.media import codec
from relax.runtime.pool import ProcessPool
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import run_episode
from tests.cases.media_chain import Chain, features
from tests.data import media_sample as sample
from tests.tasks import toy

COUNT = 64
DEADLINE_S = 60.0


class Watch:
    """Who called what: names of functions, each with the threads that it ran on in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.loop = threading.get_ident()
        self.threads: dict[str, set[int]] = defaultdict(set)
        self._patch, self._folder = patch, str(folder)

    def function(self, owner: Any, name: str, before: Callable[[], None] = lambda: None) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.threads[name].add(threading.get_ident())
            before()
            return plain(*args, **options)

        self._patch.setattr(owner, name, watched)

    def files(self) -> None:
        """Every file in the folder of media, and of the cache, that Python opens."""
        for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "replace")):
            plain = getattr(owner, name)

            def watched(path: Any, *args: Any, plain: Any = plain, name: str = name, **options: Any) -> Any:
                if str(path).startswith(self._folder):
                    self.threads[f"file {name}"].add(threading.get_ident())
                return plain(path, *args, **options)

            self._patch.setattr(owner, name, watched)


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    await pool.close()


class PatientEngine:
    """Answers after some turns of the event loop, as one whose work is on another thread."""

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        for _ in range(20):
            await asyncio.sleep(0)
        return toy.reply("yes")


async def play(number: int) -> None:
    prompt = Prompt(PromptKey("toy", number, 0), "task", (text_message("user", "hi"),))
    environment = SingleTurn(SingleTurnConfig())
    await run_episode(
        prompt, environment, toy.ToyRenderer(), PatientEngine(), Sampling(max_tokens=9), toy.sessions(), max_context_tokens=99
    )  # fmt: skip


def records(folder: Path) -> list[dict[str, Any]]:
    """Pictures as files, as bytes and as arrays, and beside every eighth a sound or a video; no two alike."""
    found: list[dict[str, Any]] = []
    for number in range(COUNT):
        picture = sample.picture(24, 16, seed=number)
        content = sample.encode_image(picture)
        (folder / f"{number}.png").write_bytes(content)
        form: Any = (f"{number}.png", {"bytes": content, "path": None}, picture, picture)[number % 4]
        found.append({"prompt": "<image>?", "images": [form]})
        if number % 16 == 0:
            sound = {"array": sample.tone(4000 + number), "sampling_rate": 16_000}
            found.append({"prompt": "<audio>?", "audios": [sound]})
        if number % 16 == 8:
            video = sample.encode_video(sample.clip(4, 32, 16), 2)
            found.append({"prompt": "<video>?", "videos": [{"bytes": video}]})
    return found


async def test_case_f10_nothing_is_decoded_on_the_event_loop_while_rollouts_run(
    tmp_path: Path, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features wait until every rollout has ended: if they, or a decode, held the loop, no rollout could end."""
    chain = Chain(tmp_path, pool=pool, cache=tmp_path / "cache", processes=2)
    prompts = chain.prompts(*records(tmp_path))
    loop, begun, played = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    late: list[bool] = []

    def wait_for_rollouts() -> None:
        loop.call_soon_threadsafe(begun.set)
        if threading.get_ident() != watch.loop:  # there it would wait for itself; that it is there is told below
            late.append(not played.wait(DEADLINE_S))

    watch = Watch(monkeypatch, tmp_path)
    watch.function(chain.family, "features", wait_for_rollouts)
    for module in codec.CODECS.values():  # in this process: a worker has modules of its own
        watch.function(module, "look")
        watch.function(module, "decode")
    for owner, name in (
        (store, "unpack_arrays"), (store, "narrow"), (store, "pack_media"), (store, "_is_finite"), (store, "_write"),
        (access, "embedded_bytes"), (access, "_digest"), (chain.store._cache, "get"), (chain.store._cache, "put"),
    ):  # fmt: skip
        watch.function(owner, name)
    watch.files()

    async def read(prompt: Any) -> int:
        prepared = await chain.preparer.prepare(prompt)
        return sum(features(await chain.preparer.load(prepared.messages[0].media)).values())

    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        reading = [group.create_task(read(prompt)) for prompt in prompts]
        await begun.wait()
        await asyncio.gather(*map(play, range(COUNT)))
        played.set()
    assert not any(late), "a rollout waited for features"
    assert sum(task.result() for task in reading) > COUNT
    assert chain.store.counts["decoded"] == len(prompts)
    on_loop = {name for name, threads in watch.threads.items() if watch.loop in threads}
    assert on_loop == set(), "these ran on the event loop's thread"
    expected = {"features", "look", "decode", "unpack_arrays", "narrow", "pack_media", "embedded_bytes", "_digest"}
    expected |= {"get", "put", "file open", "file replace"}
    assert expected <= watch.threads.keys(), "what is watched is what is called"


async def test_case_f10_bytes_of_a_file_are_decoded_in_another_process(
    tmp_path: Path, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that a record holds are numbers already; whatever a decoder would have to be trusted with leaves this process."""
    watch = Watch(monkeypatch, tmp_path)
    for module in codec.CODECS.values():
        watch.function(module, "look")
        watch.function(module, "decode")
    chain = Chain(tmp_path, pool=pool)
    content = sample.encode_image(sample.picture(24, 16))
    sound, video = sample.encode_sound(sample.tone(4000)), sample.encode_video(sample.clip(4, 32, 16), 2)
    record = {"prompt": "<image><audio><video>", "images": [content], "audios": [sound], "videos": [video]}
    _, encoded, media = await chain.row(record)
    assert chain.counts(encoded.token_ids) == features(media)
    assert watch.threads == {}
    await chain.row({"prompt": "<image>", "images": [np.zeros((16, 16, 3), np.uint8)]}, name="array")
    assert set(watch.threads) == {"look", "decode"}
    assert watch.loop not in watch.threads["look"] | watch.threads["decode"]
