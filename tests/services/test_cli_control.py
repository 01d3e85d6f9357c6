"""The commands that change a run under way, as a person meets them: what they print, and their exit codes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax.services.cli import stop
from relax.services.directory import RunDirectory
from relax.training.checkpoint import CheckpointStore
from tests.services.command import Done, run_command
from tests.services.fake_control import FakeControl, broken, served
from tests.services.story import story_config, story_directory

Relax = Callable[..., Done]


@pytest.fixture
def relax(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Relax:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Done:
        return run_command(arguments, capfd)

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return story_directory(story_config(tmp_path)).root


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def run(root: Path, control: FakeControl) -> Iterator[Path]:
    """A run under way that can be controlled."""
    with RunDirectory(root) as directory, served(control, directory):
        yield root


def test_scale(relax: Relax, run: Path, control: FakeControl) -> None:
    done = relax("scale", run, "rollout=3", "reward=2", "--wait", "--id", "mine")
    assert (done.code, done.out, done.err) == (0, "mine done: 3 engines and 2 reward processes\n", "scale begins\n")
    assert control.replicas == {"rollout": 3, "reward": 2}
    assert (
        relax("scale", run, "rollout=3", "reward=2", "--id", "mine").out
        == "mine done: 3 engines and 2 reward processes\n"
    )
    assert len(control.performed) == 1


def test_scale_without_waiting_says_what_will_be_done_and_where_to_look(
    relax: Relax, run: Path, control: FakeControl
) -> None:
    control.hold = True
    done = relax("scale", run, "rollout=2")
    first, second = done.out.splitlines()
    assert first == "will start rollout-1"
    assert second in {
        f"scale-1 is {state}; see it with `relax operations {run} scale-1`" for state in ("pending", "running")
    }
    assert "running" in relax("operations", run).out
    assert relax("operations", run, "scale-1", "--cancel").code == 0
    shown = json.loads(relax("operations", run, "scale-1", "--json").out)
    assert (shown["kind"], shown["arguments"]) == ("scale", {"replicas": {"rollout": 2}})


def test_a_dry_run(relax: Relax, run: Path, control: FakeControl) -> None:
    assert relax("scale", run, "rollout=3", "--dry-run").out == "would start rollout-1\nwould start rollout-2\n"
    assert relax("scale", run, "rollout=1", "--dry-run").out == "nothing would change\n"
    assert relax("engine", "drain", run, "engine-0", "--dry-run").out == "would drain engine-0\n"
    assert relax("restart", run, "trainer", "--dry-run").out == "would restart\n"
    assert control.performed == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout"], "'rollout' is no target; write ROLE=NUMBER"),
        (["rollout=-1"], "is no target"),
        (["rollout=0"], "at least 1 is needed; `relax pause`"),
        (["rollout=1", "rollout=2"], "rollout is given twice"),
        (["critic=2"], "role 'critic' has no replicas; roles that have: reward, rollout"),
    ],
)
def test_a_wrong_target_is_one_sentence(relax: Relax, run: Path, arguments: list[str], said: str) -> None:
    done = relax("scale", run, *arguments) if arguments != ["rollout=-1"] else relax("scale", run, "--", *arguments)
    assert done.code == 2
    assert said in done.err


def test_pause_resume_and_the_rest(relax: Relax, run: Path, control: FakeControl) -> None:
    assert relax("operations", run).out == "nothing was asked for since the controller of the run started\n"
    assert relax("pause", run).out == "pause-1 done: nothing new begins; `relax resume` lets the run go on\n"
    assert control.paused
    assert relax("resume", run).out == "resume-2 done: the run goes on\n"
    assert not control.paused
    assert relax("checkpoint", run, "--wait").out == "checkpoint-3 done: written at step 7\n"
    assert (
        relax("restart", run, "trainer", "--wait").out
        == "restart-4 done: trainer is ready again; its log is trainer.2.log\n"
    )
    assert "there is no role 'nobody'" in relax("restart", run, "nobody").err
    table = [line for line in relax("operations", run).out.splitlines() if not line.startswith(" ")]
    assert [line.split()[:2] for line in table[1:]] == [
        ["pause-1", "done"], ["resume-2", "done"], ["checkpoint-3", "done"], ["restart-4", "done"],
    ]  # fmt: skip
    assert table[3].rstrip().endswith("checkpoint: written at step 7")


def test_engines(relax: Relax, run: Path, control: FakeControl) -> None:
    done = relax("engine", "attach", run, "lab", "http://10.0.0.7:8000", "--capacity", 4, "--wait")
    assert (done.code, done.out) == (0, "attach-1 done: 2 engines now\n")
    table = [line.split() for line in relax("engine", "list", run).out.splitlines()]
    assert table == [
        ["engine", "state", "version", "capacity", "whose", "note"],
        ["engine-0", "live", "v7", "8", "own"],
        ["lab", "joining", "-", "4", "http://10.0.0.7:8000"],
    ]
    assert relax("engine", "drain", run, "lab", "--wait").out == "detach-2 done: 2 engines left\n"
    what = "attach lab at http://10.0.0.7:8000, for 4 requests at a time"
    assert what in " ".join(relax("operations", run).out.split())
    done = relax("engine", "attach", run, "lab", "http://user:hunter2@10.0.0.7:8000")
    assert done.code == 2
    assert "hunter2" not in done.out + done.err


def test_a_failure_is_told_and_read(relax: Relax, root: Path) -> None:
    with RunDirectory(root) as directory, served(broken(), directory):
        done = relax("scale", root, "rollout=2", "--wait")
        assert done.code == 1
        assert "scale-1 failed: engine-1 takes no requests after 60 s" in done.err
        assert "(no memory)" in " ".join(relax("operations", root).out.split())


def test_a_run_that_is_not_under_way_says_so(relax: Relax, root: Path, tmp_path: Path) -> None:
    for arguments in (["scale", root, "rollout=2"], ["pause", root], ["engine", "list", root], ["operations", root]):
        done = relax(*arguments)
        assert done.code == 2
        assert f"run {root} is not under way; go on with it by `relax train --resume" in done.err
    (root / "summary.json").write_text("{}")
    assert f"run {root} is finished: nothing of it can be changed" in relax("pause", root).err
    assert relax("pause", tmp_path / "nowhere").code == 2
    assert "needs the ID" in relax("operations", root, "--cancel").err


# --- stop ---

OWNER = textwrap.dedent(
    """
    import signal, sys, time
    from pathlib import Path
    from relax.services.directory import RunDirectory
    with RunDirectory(Path(sys.argv[1])):
        if sys.argv[2] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif sys.argv[2] == "slow":  # as `relax train`: a second signal ends it at once
            asked = []
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3) if asked else asked.append(number))
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        print("owns", flush=True)
        time.sleep(60)
    """
)


@pytest.fixture
def owner(root: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a process that owns the run: `polite`, `slow` or `deaf` to SIGTERM."""
    started: list[subprocess.Popen[str]] = []

    def start(manner: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(root), manner], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "owns\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def cleaned(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which runs were cleaned up."""
    found: list[Path] = []

    def clean_up(directory: RunDirectory) -> list[str]:
        found.append(directory.root)
        return ["run story was left by a launcher that is gone: killed 2 processes, removed its folders"]

    monkeypatch.setattr(stop, "clean_up", clean_up)
    return found


def test_stop(relax: Relax, root: Path, owner: Callable[..., "subprocess.Popen[str]"], cleaned: list[Path]) -> None:
    CheckpointStore(RunDirectory(root).checkpoints).write(20, lambda folder: None)
    process = owner("polite")
    done = relax("stop", root)
    assert (done.code, process.wait(10)) == (0, 0)
    assert done.out.splitlines()[0] == f"asked process {process.pid} to stop; it has 45 s"
    assert "removed its folders" in done.out
    assert done.out.splitlines()[-1].startswith("stopped, ")
    assert cleaned == [root]
    assert RunDirectory(root).owner is None


def test_stop_says_what_the_process_says_of_its_end(
    relax: Relax, root: Path, owner: Callable[..., "subprocess.Popen[str]"], cleaned: list[Path]
) -> None:
    owner("polite")
    RunDirectory(root).ending.write_text("stopped, nothing was trained")
    assert relax("stop", root).out.splitlines()[-1].startswith("stopped, nothing was trained; go on with `relax train")


def test_stop_of_a_run_that_does_not_listen(
    relax: Relax,
    root: Path,
    owner: Callable[..., "subprocess.Popen[str]"],
    cleaned: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "MARGIN_S", -39.9)  # of the 45 s
    monkeypatch.setattr(stop, "CLOSE_S", 10.0)
    process = owner("deaf")
    done = relax("stop", root)
    assert done.code == 1
    assert "`relax stop" in done.err
    assert "--kill`: the run can go on from its journal" in done.err
    assert (cleaned, process.poll()) == ([], None)
    done = relax("stop", root, "--kill")
    assert (done.code, process.wait(10)) == (0, -signal.SIGKILL)
    assert f"process {process.pid} did not stop and was killed" in done.out
    assert cleaned == [root]


def test_stop_asked_twice_does_not_end_a_run_that_is_stopping(
    relax: Relax,
    root: Path,
    owner: Callable[..., "subprocess.Popen[str]"],
    cleaned: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "MARGIN_S", -39.9)  # of the 45 s
    monkeypatch.setattr(stop, "CLOSE_S", 10.0)
    process = owner("slow")
    for said in ("asked process", "was asked to stop already"):
        done = relax("stop", root)
        assert (done.code, process.poll()) == (1, None)
        assert said in done.out
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 3


def test_stop_of_a_run_that_is_not_under_way_cleans_up(relax: Relax, root: Path, cleaned: list[Path]) -> None:
    done = relax("stop", root)
    assert (done.code, cleaned) == (0, [root])
    assert done.out.splitlines()[-1] == f"run {root} is not under way"


def test_stop_of_a_process_elsewhere_is_one_sentence(
    relax: Relax, root: Path, cleaned: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr(RunDirectory, "owner", process.pid)  # its number is nobody's here
    done = relax("stop", root)
    assert done.code == 2
    assert f"process {process.pid}, which owns the run, is not on this machine" in done.err


def test_stop_does_not_touch_a_process_that_took_the_number(
    relax: Relax, root: Path, cleaned: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [os.getpid(), None]
    monkeypatch.setattr(RunDirectory, "owner", property(lambda self: answers.pop(0) if answers else None))
    done = relax("stop", root)
    assert done.code == 0
    assert "asked process" not in done.out


def test_clean_up_asks_for_this_run_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax.runtime import place

    asked: list[str | None] = []

    def clean_leftovers(run_id: str | None = None) -> list[str]:
        asked.append(run_id)
        return []

    monkeypatch.setattr(place, "clean_leftovers", clean_leftovers)
    assert stop.clean_up(RunDirectory(root)) == []
    assert asked == [place.run_id_of(root)]
