"""Names and folders of a run on a machine: short, its own, and gone with it."""

import io
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.runtime import place as place_module
from relax.runtime.place import (
    MAX_SOCKET_PATH,
    VARIABLE,
    RunPlace,
    clean_leftovers,
    kill_marked,
    processes_of,
    run_id_of,
)

DEAD = "999999999/1"
"""An owner that no machine has."""


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of runs go into the test's own, short path."""
    root = Path("/tmp") / f"rp{os.getpid()}"
    root.mkdir()
    (root / "shm").mkdir()
    monkeypatch.setattr(place_module, "_ROOTS", {"socket": root, "shm": root / "shm"})
    return root


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    yield
    subprocess.run(["rm", "-rf", f"/tmp/rp{os.getpid()}"], check=True)


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: mark})


def test_a_run_id_is_the_same_for_the_same_directory_and_fits_every_socket(tmp_path: Path) -> None:
    directory = tmp_path / "A very long Name of a run, with (odd) characters"
    assert run_id_of(directory) == run_id_of(tmp_path / "x" / ".." / directory.name)
    assert run_id_of(directory) != run_id_of(tmp_path / "y" / directory.name)
    place = RunPlace(run_id_of(directory))
    assert place.run_id.startswith("a-very-lon-")
    assert len(place.socket("engine-1000")) <= MAX_SOCKET_PATH
    assert len(str(place.socket_folder / place_module._RAY_SOCKET)) <= MAX_SOCKET_PATH
    assert {place.socket_folder, place.shm_folder}.isdisjoint(
        {RunPlace("other").socket_folder, RunPlace("other").shm_folder}
    )
    with pytest.raises(ValueError, match=r"has \d+ bytes, at most 107"):
        place.socket("x" * 100)


def test_a_claim_owns_its_folders_until_it_is_released(roots: Path) -> None:
    place = RunPlace("t-00000001")
    claim = place.claim()
    assert place.owner == os.getpid()
    for folder in (place.socket_folder, place.shm_folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    with pytest.raises(FileExistsError, match=f"process {os.getpid()}, which is alive"):
        place.claim()
    claim.release()
    claim.release()
    assert not place.socket_folder.exists()
    assert not place.shm_folder.exists()
    assert place.owner is None


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user; where only root could, it looks like that."""
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534, follow_symlinks=False)
        return
    lstat = Path.lstat

    def look(path: Path) -> os.stat_result:
        found = lstat(path)
        return os.stat_result((*found[:4], 65534, *found[5:])) if path == folder else found

    monkeypatch.setattr(Path, "lstat", look)


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
@pytest.mark.parametrize("which", ["socket_folder", "shm_folder"])
def test_rule_se1_a_place_that_another_user_made_first_is_refused(
    roots: Path, monkeypatch: pytest.MonkeyPatch, which: str, kind: str
) -> None:
    place = RunPlace("t-00000010")
    taken: Path = getattr(place, which)
    elsewhere = roots / "elsewhere"
    elsewhere.mkdir()
    if kind == "folder":
        taken.mkdir()
        taken.chmod(0o777)
        (taken / "theirs").write_text("x")
    elif kind == "link":
        taken.symlink_to(elsewhere)
    else:
        taken.write_text("x")
    give_away(taken, monkeypatch)
    with pytest.raises(
        PermissionError, match=rf"{taken} belongs to user 65534, and must be a folder of user \d+: others"
    ):
        place.claim()
    assert taken.lstat(), "what is not ours is left alone"
    assert kind != "folder" or [path.name for path in taken.iterdir()] == ["theirs"]
    assert list(elsewhere.iterdir()) == []
    assert not {place.socket_folder, place.shm_folder} - {taken} & {*roots.rglob("*")}, "nothing of ours is left"
    assert place.owner is None


@pytest.mark.usefixtures("roots")
def test_rule_se1_a_link_of_our_own_is_no_place(tmp_path: Path) -> None:
    place = RunPlace("t-00000011")
    place.shm_folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link or a file, and must be a folder"):
        place.claim()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("roots")
def test_rule_se1_a_folder_of_ours_that_was_open_to_others_is_closed_and_emptied(tmp_path: Path) -> None:
    place = RunPlace("t-00000012")
    (tmp_path / "precious").write_text("x")
    for folder in (place.socket_folder, place.shm_folder):
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "owner").symlink_to(tmp_path / "precious")
        (folder / "ray").symlink_to(tmp_path)
    claim = place.claim()
    for folder in (place.socket_folder, place.shm_folder):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
        assert [path.name for path in folder.iterdir()] == ["owner"]
    claim.release()
    assert (tmp_path / "precious").read_text() == "x"
    assert not place.socket_folder.exists()


@pytest.mark.usefixtures("roots")
def test_rule_se1_cleaners_neither_read_nor_remove_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RunPlace("t-00000013")
    for folder in (place.socket_folder, place.shm_folder):
        folder.mkdir()
    (place.shm_folder / "owner").write_text(f"{place.run_id}/{DEAD}")
    os.mkfifo(place.socket_folder / "owner")  # nobody writes: to open it would take for ever
    give_away(place.socket_folder, monkeypatch)
    assert len(clean_leftovers(place.run_id)) == 1
    assert not place.shm_folder.exists()
    assert place.socket_folder.exists()


@pytest.mark.usefixtures("roots")
def test_leftovers_of_a_dead_run_are_found_by_its_id_and_cleaned() -> None:
    dead, alive = RunPlace("t-00000002"), RunPlace("t-00000003")
    claim = alive.claim()
    for folder in (dead.socket_folder, dead.shm_folder):
        folder.mkdir()
        (folder / "owner").write_text(f"{dead.run_id}/{DEAD}")
    left, spared = sleeper(f"{dead.run_id}/{DEAD}"), sleeper(claim.mark)
    try:
        assert clean_leftovers("t-00000004") == []
        assert clean_leftovers(alive.run_id) == []
        told = clean_leftovers(dead.run_id)
        assert told == ["run t-00000002 was left by a launcher that is gone: killed 1 processes, removed its folders"]
        assert left.wait() == -9
        assert not dead.socket_folder.exists()
        assert not dead.shm_folder.exists()
        assert clean_leftovers(dead.run_id) == []
        assert spared.poll() is None
        claim.release()
        assert spared.wait() == -9
    finally:
        for process in (left, spared):
            process.kill()
            process.wait()


@pytest.mark.usefixtures("roots")
def test_a_new_claim_cleans_what_the_dead_owner_left() -> None:
    place = RunPlace("t-00000005")
    place.shm_folder.mkdir()
    (place.shm_folder / "owner").write_text(f"{place.run_id}/{os.getpid()}/1")  # the same id, an earlier process
    (place.shm_folder / "weights").write_text("old")
    claim = place.claim()
    assert not (place.shm_folder / "weights").exists()
    claim.release()


def test_a_folder_that_names_no_owner_is_left_alone(roots: Path) -> None:
    folder = roots / "relax-t-00000006"
    folder.mkdir()
    (folder / "owner").write_text("somebody else's words")
    (roots / "relax-t-00000007").mkdir()
    assert clean_leftovers("t-00000006") == clean_leftovers("t-00000007") == []
    assert folder.exists()


def test_kill_marked_spares_other_runs() -> None:
    one, other = sleeper(f"t-00000008/{DEAD}"), sleeper(f"t-000000089/{DEAD}")
    try:
        assert kill_marked(RunPlace("t-00000008")) == 1
        assert one.wait() == -9
        assert other.poll() is None
    finally:
        for process in (one, other):
            process.kill()
            process.wait()


@pytest.mark.usefixtures("roots")
def test_agents_of_ray_are_known_by_the_files_they_hold_and_readers_of_those_are_spared() -> None:
    place = RunPlace("t-00000009")
    place.ray_folder.mkdir(parents=True)
    titled = ["ray::DashboardAgent", "600"]
    with (place.ray_folder / "agent.out").open("w") as file:
        agent = subprocess.Popen(titled, executable="/bin/sleep", stdout=file)
        reader = subprocess.Popen(["sleep", "600"], stdout=file)
        other = subprocess.Popen(
            titled, executable="/bin/sleep", stdout=file, env={VARIABLE: f"t-another/{os.getpid()}/1"}
        )
    try:
        assert processes_of(place) == [agent.pid]
        assert kill_marked(place) == 1
        assert agent.wait() == -9
        assert processes_of(place) == []
        assert reader.poll() is None
        assert other.poll() is None
    finally:
        for process in (agent, reader, other):
            process.kill()
            process.wait()


CLAIM = """
import sys, time
from relax.runtime.place import RunPlace
claim = RunPlace("{run_id}").claim().watch()
print(claim.mark, flush=True)
time.sleep(600)
"""


def test_the_sweeper_cleans_as_soon_as_the_owner_is_killed() -> None:
    place = RunPlace(f"t-{os.getpid():08d}")
    owner = subprocess.Popen(
        [sys.executable, "-c", CLAIM.format(run_id=place.run_id)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    left = sleeper(owner.stdout.readline().strip())
    try:
        assert place.owner == owner.pid
        owner.kill()
        owner.communicate()
        assert left.wait(timeout=60) == -9
        while place.socket_folder.exists() or place.shm_folder.exists():  # the test's own limit bounds it
            time.sleep(0.02)
    finally:
        left.kill()
        left.wait()


def test_the_sweeper_waits_for_an_owner_that_is_still_dying(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes a process's files, which is what the sweeper hears, before the process is gone."""
    place = RunPlace("dying")
    claim = place.claim()
    looks = [True, True, False]
    monkeypatch.setattr(place_module, "_is_alive", lambda mark: looks.pop(0) if looks else False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    place_module.sweep(claim.mark)
    assert looks == []
    assert not place.socket_folder.exists()
    assert not place.shm_folder.exists()
