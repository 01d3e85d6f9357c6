"""The folder of features: whole entries or none, bounded, shared by processes, never in the way."""

import errno
import os
import subprocess
import sys
import threading
import time
from hashlib import blake2b
from pathlib import Path

import pytest

from relax.data.media.cache import FeatureCache, feature_cache


def key_of(number: int) -> str:
    return blake2b(str(number).encode(), digest_size=20).hexdigest()


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_put_is_got(tmp_path):
    cache = FeatureCache(tmp_path / "new" / "folder", 1 << 20)
    assert cache.get(key_of(0)) is None
    cache.put(key_of(0), b"content")
    found = cache.get(key_of(0))
    assert bytes(found) == b"content"
    assert found.readonly
    cache.put(key_of(0), b"content")
    cache.put(key_of(1), b"")
    assert bytes(cache.get(key_of(1))) == b""
    assert cache.counts == {"misses": 1, "written": 3, "hits": 2}
    assert bytes(FeatureCache(tmp_path / "new" / "folder", 1 << 20).get(key_of(0))) == b"content"


def test_the_content_is_aligned(tmp_path):
    import numpy as np

    from relax.core.media import pack_arrays, unpack_arrays

    cache = FeatureCache(tmp_path, 1 << 20)
    cache.put(key_of(0), pack_arrays({"a": np.arange(5, dtype=np.float64)}))
    arrays, _ = unpack_arrays(cache.get(key_of(0)))
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["a"].flags.aligned


@pytest.mark.parametrize("key", ["", "../escape", "0" * 15, "G" * 32, "0" * 32 + "/", "0" * 129])
def test_keys_are_hexadecimal(tmp_path, key):
    cache = FeatureCache(tmp_path, 1 << 20)
    with pytest.raises(ValueError, match="is no key of a cache entry"):
        cache.put(key, b"x")
    with pytest.raises(ValueError, match="is no key of a cache entry"):
        cache.get(key)


def damages(content: bytes):
    yield b""
    yield content[:10]
    yield content[:-1]
    yield content + b"x"
    yield content[:-1] + bytes([content[-1] ^ 1])
    yield b"x" + content[1:]
    yield content[:20] + b"\xff" + content[21:]
    yield bytes(len(content))


def test_damaged_entries_are_ignored_and_removed(tmp_path, caplog):
    cache = FeatureCache(tmp_path, 1 << 20)
    cache.put(key_of(0), b"content" * 100)
    (path,) = files_in(tmp_path)
    content = path.read_bytes()
    for number, damaged in enumerate(damages(content), start=1):
        path.write_bytes(damaged)
        assert cache.get(key_of(0)) is None
        assert cache.counts["damaged"] == number
        assert not path.exists()
    assert "are damaged; they are removed" in caplog.text
    path.write_bytes(content)
    assert bytes(cache.get(key_of(0))) == b"content" * 100


def test_what_was_used_longest_ago_goes_first(tmp_path):
    size = 1000 + 64
    cache = FeatureCache(tmp_path, 4 * size)
    for number in range(4):
        cache.put(key_of(number), bytes([number]) * 1000)
        path = tmp_path / key_of(number)[:2] / key_of(number)
        os.utime(path, ns=(number * 10**9, number * 10**9))
    assert cache.get(key_of(0)) is not None  # used now
    cache.put(key_of(4), b"4" * 1000)
    kept = {path.name for path in files_in(tmp_path)}
    assert key_of(0) in kept
    assert key_of(4) in kept
    assert key_of(1) not in kept
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 4 * size
    assert cache.counts["removed"] == 2  # down to nine tenths, so that not every entry removes one


def test_the_limit_holds_through_many_entries_and_new_caches(tmp_path):
    for number in range(60):
        if number % 7 == 0:
            cache = FeatureCache(tmp_path, 10_000)
        cache.put(key_of(number), b"x" * (100 + 37 * (number % 20)))
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 10_000


def test_what_is_larger_than_the_cache_is_not_kept(tmp_path):
    cache = FeatureCache(tmp_path, 1000)
    cache.put(key_of(0), b"x" * 900)
    cache.put(key_of(1), b"x" * 1000)
    assert [path.name for path in files_in(tmp_path)] == [key_of(0)]


def test_other_files_in_the_folder_are_left_alone_and_old_leftovers_are_not(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fresh, old = tmp_path / ".writing-1-2-3", tmp_path / ".writing-4-5-6"
    for leftover in (fresh, old):
        leftover.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    FeatureCache(tmp_path, 1000).put(key_of(0), b"x")
    assert [path.name for path in files_in(tmp_path)] == sorted([".writing-1-2-3", key_of(0), "notes.txt"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_a_warning_once_and_no_error(tmp_path, monkeypatch, caplog, number):
    cache = FeatureCache(tmp_path, 1 << 20)
    cache.put(key_of(0), b"before")

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    cache.put(key_of(1), b"x")
    cache.put(key_of(2), b"x")
    assert cache.counts["failed"] == 2
    assert len([record for record in caplog.records if "takes no entry" in record.message]) == 1
    assert [path.name for path in files_in(tmp_path)] == [key_of(0)]
    assert bytes(cache.get(key_of(0))) == b"before"


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = FeatureCache(tmp_path / "file" / "media", 1 << 20)
    cache.put(key_of(0), b"x")
    assert cache.get(key_of(0)) is None
    assert cache.counts == {"failed": 1, "misses": 1}


def test_an_entry_that_is_removed_while_it_is_read_harms_nobody(tmp_path):
    cache = FeatureCache(tmp_path, 1 << 20)
    cache.put(key_of(0), b"content")
    found = cache.get(key_of(0))
    for path in files_in(tmp_path):
        path.unlink()
    assert bytes(found) == b"content"


HAMMER = """
import sys
from hashlib import blake2b
from pathlib import Path
from relax.data.media.cache import FeatureCache

cache = FeatureCache(Path(sys.argv[1]), 20_000)
for turn in range(150):
    number = (turn * int(sys.argv[2])) % 40
    key = blake2b(str(number).encode(), digest_size=20).hexdigest()
    expected = key.encode() * 20
    found = cache.get(key)
    assert found is None or bytes(found) == expected, number
    cache.put(key, expected)
print(cache.counts["hits"], cache.counts["damaged"], cache.counts["failed"])
"""


def test_processes_and_threads_share_it(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True)
        for step in (1, 3)
    ]
    failures = []

    def hammer(step):
        cache = FeatureCache(tmp_path, 20_000)
        for turn in range(150):
            key = key_of((turn * step) % 40)
            found = cache.get(key)
            if found is not None and bytes(found) != key.encode() * 20:
                failures.append(key)
            cache.put(key, key.encode() * 20)
        if cache.counts["damaged"] or cache.counts["failed"]:
            failures.append(dict(cache.counts))

    threads = [threading.Thread(target=hammer, args=(step,)) for step in (1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert failures == []
    assert [answer[1:] for answer in answers] == [["0", "0"], ["0", "0"]]
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 20_000 * 1.25
    assert not list(tmp_path.glob(".writing-*"))


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "named"))
    feature_cache(None, 1000).put(key_of(0), b"x")
    assert [path.relative_to(tmp_path).parts[:2] for path in files_in(tmp_path)] == [("named", "media")]
    feature_cache(str(tmp_path / "own"), 1000).put(key_of(0), b"x")
    assert (tmp_path / "own" / "media" / key_of(0)[:2] / key_of(0)).is_file()
    assert feature_cache(None, 0) is None
