"""The command line as a person meets it: what it prints, its exit codes, and never a traceback for a mistake of theirs."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from relax.services import cli
from relax.services.cli.launch import SAME_S
from relax.services.ledger import Ledger
from tests.services import fake_run
from tests.services.command import Done, run_command
from tests.services.story import STEPS, story_config, story_directory, write_recipe, write_story

ROOT = Path(__file__).resolve().parents[2]


Relax = Callable[..., Done]


@pytest.fixture
def relax(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Relax:
    """Runs one command in this process, with a made-up run in place of training; FAKE_RUN says what it does."""
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: object, fake: str = "finish") -> Done:
        monkeypatch.setenv("FAKE_RUN", fake)
        return run_command(arguments, capfd)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the recipe's run lives."""
    return tmp_path / "runs" / "story"


def test_every_command_has_a_help_made_of_sentences(relax: Relax) -> None:
    commands = (
        ["train"],
        ["eval"],
        ["status"],
        ["show", "group"],
        ["show", "sample"],
        ["show", "step"],
        ["export"],
        ["config", "show"],
        ["config", "check"],
        ["config", "reference"],
        ["list"],
    )
    for command in commands:
        done = relax(*command, "--help")
        assert done.code == 0
        first = done.out.split("\n\n")[1].strip()
        assert first[0].isupper()
        assert first.endswith(".")


def test_the_version(relax: Relax) -> None:
    assert relax("--version").out == "relax 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["config", "reference"],
        ["config", "show", "RECIPE"],
        ["config", "check", "RECIPE"],
        ["train", "--help"],
    ],
)
def test_light_commands_load_no_torch(arguments: list[str], recipe: Path) -> None:
    script = (
        "import sys\nfrom relax.services.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(*(name for name in ('torch', 'transformers', 'matplotlib', 'tensorboard') if name in sys.modules), file=sys.stderr)"
    )
    given = [str(recipe) if argument == "RECIPE" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", script, *given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == []


def test_lists(relax: Relax) -> None:
    every = relax("list").out
    for kind in cli.component.KINDS:
        one = relax("list", kind).out
        assert one.strip()
        assert kind in every
        assert one.split()[0] in every
    assert "clipped policy gradient" in relax("list", "algorithms").out


def test_a_wrong_kind_gets_a_suggestion(relax: Relax) -> None:
    done = relax("list", "rewrds")
    assert done.code == 2
    assert "did you mean 'rewards'" in done.err


# --- config ---


def test_config_show_prints_the_whole_tree_with_overrides_in_any_order(relax: Relax, recipe: Path) -> None:
    first = relax("config", "show", recipe, "stages.rl.steps=7", "run.seed=3")
    assert relax("config", "show", "run.seed=3", recipe, "stages.rl.steps=7") == first
    import yaml

    tree = yaml.safe_load(first.out)
    assert (tree["stages"][1]["steps"], tree["run"]["seed"], tree["weights"]["keep"]) == (7, 3, 2)


def test_config_check_says_ok_and_warns(relax: Relax, recipe: Path) -> None:
    done = relax("config", "check", recipe)
    assert (done.code, done.err) == (0, "")
    assert "ok, no warnings. 60 steps: warm-up (supervised, 20 steps), rl (grpo, 40 steps)." in done.out
    done = relax("config", "check", recipe, "stages.rl.algorithm.old_logprobs=current")
    assert done.code == 0
    assert "[ST9]" in done.err


def test_every_problem_of_a_recipe_is_listed_at_once(relax: Relax, recipe: Path) -> None:
    done = relax("train", recipe, "rollout.max_stalenes=1", "training.optimizer.lr=-1", "run.sed=2")
    assert done.code == 2
    assert done.err.startswith("error: 3 problems in the configuration:\n- ")
    assert "did you mean 'max_staleness'" in done.err
    assert "training.optimizer.lr" in done.err


def test_what_is_no_recipe_is_refused(relax: Relax, recipe: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (["nowhere.yaml"], "no such configuration file"),
        (["run.seed=1"], "no recipe is given"),
        ([recipe, tmp_path], "is a folder"),
        ([tmp_path], "not a run directory"),
    ):
        done = relax("train", *arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err


def test_a_file_whose_name_holds_an_equals_sign_is_a_recipe(
    relax: Relax, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    recipe.rename("run.seed=7")
    assert "seed: 0" in relax("config", "show", "run.seed=7").out


# --- train ---


def test_an_override_may_be_longer_than_the_name_of_any_file(relax: Relax, recipe: Path) -> None:
    override = "data.chat_template_args={" + ", ".join(f"key_{number}: {number}" for number in range(100)) + "}"
    result = relax("config", "show", recipe, override)
    assert (result.code, "key_99: 99" in result.out) == (0, True)


def test_a_finished_run_prints_its_summary_its_curve_and_where_things_are(
    relax: Relax, recipe: Path, root: Path
) -> None:
    done = relax("train", recipe)
    assert done.code == 0
    assert f"run story in {root}: warm-up (supervised, 20 steps), rl (grpo, 40 steps)" in done.out
    for part in (
        "0.2000 when RL began, 0.9232 at the end",
        "filtered 4  balances",
        "^ RL begins (step 20)",
        "o heldout (evaluation)",
        str(root / "summary.json"),
    ):
        assert part in done.out
    assert json.loads((root / "summary.json").read_text())["steps"] == STEPS
    assert (root / "curve.png").exists()
    assert len((root / "metrics.jsonl").read_text().splitlines()) == STEPS


def test_the_configuration_of_a_run_is_kept_with_what_made_it(relax: Relax, recipe: Path, root: Path) -> None:
    relax("train", recipe, "run.seed=5")
    text = (root / "config.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert len(header) == 3
    assert "relax 0.1.0, python 3." in header[1]
    assert "torch 2.13" in header[1]
    assert "git commit" in header[2]
    assert relax("config", "show", root / "config.yaml").out == text.split("\n", 3)[3]
    assert "seed: 5" in text


def test_a_finished_run_is_not_run_again_unless_asked_for(relax: Relax, recipe: Path, root: Path) -> None:
    relax("train", recipe)
    (root / "mine.txt").write_text("")
    for extra in ([], ["--resume"]):
        done = relax("train", recipe, *extra)
        assert done.code == 2
        assert "is finished" in done.err
        assert "--overwrite" in done.err
    assert (root / "mine.txt").exists()
    assert relax("train", recipe, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.path=nowhere/at/all", "nowhere/at/all"),
        ("data.sources.add.function=tests.services.test_cli:no_such_function", "no_such_function"),
    ],
)
def test_nothing_is_deleted_for_a_run_that_cannot_begin(
    relax: Relax, recipe: Path, root: Path, override: str, told: str
) -> None:
    relax("train", recipe)
    before = sorted(path.name for path in root.iterdir())
    done = relax("train", recipe, "--overwrite", override)
    assert done.code == 2
    assert told in done.err
    assert "executing" not in done.out
    assert sorted(path.name for path in root.iterdir()) == before
    assert (root / "summary.json").exists()
    assert relax("status", root).code == 0


def test_only_what_a_run_wrote_is_deleted_and_the_rest_is_named(relax: Relax, recipe: Path, root: Path) -> None:
    relax("train", recipe, fake="error")
    kept = ("mine.txt", "notes/a.txt", "checkpoints/best/model.bin", "tensorboard/mine.txt", ".config.yaml.swp")
    ours = (
        "dumps/step-000001.npz", "evaluations/step-000030.json", "reference/rl.safetensors", "samples.jsonl", "stopped.json",
        "tensorboard/eval/events.out.tfevents.1", "quarantine.jsonl", ".summary.json.123",
    )  # fmt: skip
    for name in (*kept, *ours):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "checkpoints" / ".new-step-000031").mkdir()
    (root / "link").symlink_to(root / "notes")
    done = relax("train", recipe, "--overwrite", fake="user_error")
    assert "an earlier run in this directory was deleted" in done.err
    left = ".config.yaml.swp, checkpoints/best, link, mine.txt, notes, resumed, tensorboard/mine.txt"
    assert f"left in {root}, because no run writes it: {left}" in done.err
    again = relax("train", recipe, fake="user_error")
    assert "an earlier run trained no step" in again.err
    assert left in again.err
    assert all((root / name).exists() for name in kept)
    assert not any((root / name).exists() for name in ours)
    assert not (root / "dumps").exists()
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["best"]


def test_a_summary_names_the_most_frequent_reasons(
    relax: Relax, recipe: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from relax.services.cli.train import print_summary
    from relax.services.directory import RunDirectory

    assert "4 x filtered(zero_signal)" in relax("train", recipe).out
    summary = json.loads((root / "summary.json").read_text())
    summary["ledger"]["reasons"] = {"failed(a)": 1, "failed(b)": 7, "filtered(c)": 5, "dropped(d)": 3}
    print_summary(summary, RunDirectory(root))
    out = capfd.readouterr().out
    found = [line.removeprefix("not trained").strip() for line in out.splitlines() if " x " in line]
    assert found == ["7 x failed(b)", "5 x filtered(c)", "3 x dropped(d)"]


def test_a_failed_run_says_what_happened_where_to_look_and_what_to_do(relax: Relax, recipe: Path, root: Path) -> None:
    done = relax("train", recipe, fake="error")
    assert done.code == 1
    assert done.err.splitlines()[-3:] == [
        "error: the weather is bad; wait for sunshine",
        f"log:  {root / 'run.log'}",
        f"next: mend the cause, then relax train --resume {root} (goes on from step 30)",
    ]
    log = (root / "run.log").read_text()
    assert "Traceback" in log
    assert "the weather is bad" in log
    assert "the weather is bad; wait for sunshine" in relax("status", root).out
    (root / "ending").unlink()
    assert "ended" not in relax("status", root).out, "a run of an earlier version"


def test_an_unfinished_run_is_kept_and_resumed(relax: Relax, recipe: Path, root: Path) -> None:
    relax("train", recipe, fake="error")
    refused = relax("train", recipe)
    assert refused.code == 2
    found = r"30 of 60 steps, stage rl, newest checkpoint at step 30, written \d+ seconds? ago"
    assert re.search(f"is not finished: {found}; go on with `relax train --resume {re.escape(str(root))}`", refused.err)
    for arguments in ([recipe, "--resume"], ["--resume", root]):
        done = relax("train", *arguments, fake="error")
        assert re.search(f"going on with a run of {found}", done.err)
        assert (root / "resumed").read_text() == "True"
    assert relax("train", root, "--resume").code == 0


def test_evaluations_that_an_interruption_lost_are_told(relax: Relax, recipe: Path, root: Path) -> None:
    """Version 20 has a result, 30 is evaluated again by the run, which goes on from there, and 40 when it comes to it."""
    from contextlib import closing

    from relax.services.evaluation_book import NOTE
    from relax.services.ledger import Ledger

    relax("train", recipe, fake="error")
    with closing(Ledger(root / "ledger.sqlite")) as ledger:
        ledger.write([], {}, {NOTE: [20, 24, 25, 30, 40]})
    done = relax("train", "--resume", root, fake="error")
    assert f"of version 24, 25; `relax eval {root} --checkpoint STEP` scores a checkpoint" in done.err
    with closing(Ledger(root / "ledger.sqlite")) as ledger:
        ledger.write([], {}, {NOTE: []})
    assert "lost evaluations" not in relax("train", "--resume", root, fake="error").err


def test_a_resume_with_other_settings_is_refused_or_told(relax: Relax, recipe: Path, root: Path) -> None:
    relax("train", recipe, fake="error")
    before = (root / "config.yaml").read_text()
    for arguments in ([recipe, "--resume"], ["--resume", root]):
        refused = relax("train", *arguments, "stages.rl.steps=50", "run.seed=1")
        assert refused.code == 2
        assert "cannot go on with these settings:\n  run.seed: 0 -> 1 (every random choice" in refused.err
        assert "these may change:\n  stages.rl.steps: 40 -> 50 (a schedule that falls" in refused.err
        assert (root / "config.yaml").read_text() == before
        done = relax("train", *arguments, "stages.rl.steps=50", "run.grace_s=5", fake="error")
        assert "changed since the run began: stages.rl.steps: 40 -> 50 (" in done.err
        assert "changed since the run began: run.grace_s: 30.0 -> 5.0\n" in done.err
        assert "steps: 50" in (root / "config.yaml").read_text()
        (root / "config.yaml").write_text(before)


def test_rule_rr3_a_run_that_was_killed_while_it_made_its_ledger_goes_on_and_begins_again(
    relax: Relax, recipe: Path, root: Path
) -> None:
    import sqlite3
    from contextlib import closing

    relax("train", recipe, fake="user_error")
    for arguments in (["--resume", root], [recipe]):
        (root / "ledger.sqlite").unlink(missing_ok=True)
        with closing(sqlite3.connect(root / "ledger.sqlite")) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        assert (root / "ledger.sqlite").exists()
        done = relax("train", *arguments, fake="user_error")
        assert "model folder 'nowhere' does not exist" in done.err, "it has begun"


def test_settings_that_were_edited_in_the_runs_own_file_are_judged_like_others(
    relax: Relax, recipe: Path, root: Path
) -> None:
    """The ledger knows what the run was trained with."""
    from contextlib import closing

    from relax.services.ledger import CONFIG, Ledger

    relax("train", recipe, fake="error")
    before = (root / "config.yaml").read_text()
    with closing(Ledger(root / "ledger.sqlite")) as ledger:
        ledger.write([], {}, {CONFIG: before})
    (root / "config.yaml").write_text(before.replace("seed: 0", "seed: 1"))
    refused = relax("train", "--resume", root)
    assert refused.code == 2
    assert "cannot go on with these settings:\n  run.seed: 0 -> 1 (every random choice" in refused.err
    assert f"{root}/config.yaml was edited since the run was under way" in refused.err
    (root / "config.yaml").write_text(before.replace("grace_s: 30.0", "grace_s: 5.0"))
    assert (
        "changed since the run began: run.grace_s: 30.0 -> 5.0\n" in relax("train", "--resume", root, fake="error").err
    )


def test_a_snapshot_that_is_newer_than_every_checkpoint_is_what_a_resume_goes_on_from(
    relax: Relax, recipe: Path, root: Path
) -> None:
    from relax.training.checkpoint import CheckpointStore

    relax("train", recipe, fake="error")
    CheckpointStore(root / "snapshots").write(41, lambda folder: None, {"stage": 1})
    assert "newest snapshot at step 41, written" in relax("train", recipe).err
    refused = relax("train", "--resume", root, "stages.rl.steps=20")
    assert "stage rl: it would end at step 40, but step 41 is reached" in refused.err


def test_a_finished_run_goes_on_when_it_is_given_more_steps(relax: Relax, recipe: Path, root: Path) -> None:
    from relax.services.resume import RunState
    from relax.training.checkpoint import CheckpointStore

    relax("train", recipe)
    state = RunState(STEPS, 1, [("warm-up", 20), ("rl", 40)], 0, 0, {"register": {"outstanding": []}}, {}, {})
    CheckpointStore(root / "checkpoints").write(STEPS, lambda folder: None, state.to_json())
    refused = relax("train", "--resume", root)
    assert f"go on with more steps, e.g. `relax train --resume {root} stages.rl.steps=80`" in refused.err
    done = relax("train", "--resume", root, "stages.rl.steps=80", fake="error")
    assert "changed since the run began: stages.rl.steps: 40 -> 80" in done.err
    assert (root / "resumed").read_text() == "True"
    assert not (root / "summary.json").exists()


def test_a_disk_that_is_too_small_is_said_with_numbers_before_anything_is_loaded(
    relax: Relax, recipe: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    done = relax("train", recipe)
    assert (done.code, done.out) == (2, "")
    assert f"error: {root} has 97.7 KiB of free space; the run needs at least " in done.err
    assert not (root / "config.yaml").exists()


@pytest.mark.parametrize(
    ("fake", "words"),
    [("full", "the disk is full (No space left on device)"), ("ledger", "the ledger cannot be written")],
)
def test_a_disk_that_fills_up_during_the_run_is_one_message(
    relax: Relax, recipe: Path, root: Path, fake: str, words: str
) -> None:
    done = relax("train", recipe, fake=fake)
    assert done.code == 1
    assert f"error: {words}" in done.err
    assert "what was written before is untouched" in done.err
    assert done.err.splitlines()[-1] == f"next: mend the cause, then relax train --resume {root} (goes on from step 30)"


def test_a_log_that_a_full_disk_does_not_take_fills_no_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from relax.services.cli.logbook import logbook

    with logbook(Path("/dev/full")) as log:
        log.info("a line")
        log.info("another")
    assert capfd.readouterr().err == ""


def test_a_log_on_a_disk_that_hangs_keeps_no_word_from_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from relax.services.cli import logbook

    hangs, goes_on = threading.Event(), threading.Event()

    def emit(self: object, record: object) -> None:
        hangs.set()
        goes_on.wait()

    monkeypatch.setattr(logbook.LogFile, "emit", emit)
    with logbook.logbook(tmp_path / "run.log") as log:
        writer = threading.Thread(target=log.warning, args=("controller gave no sign of life",))
        writer.start()
        assert hangs.wait(30)
        said = capfd.readouterr().err
        goes_on.set()
        writer.join()
    assert said == "WARNING: controller gave no sign of life\n"


def test_the_best_checkpoint_needs_a_metric_that_the_run_has(relax: Relax, recipe: Path) -> None:
    for command in (["config", "check"], ["train"]):
        for metric in ("eval/helout/reward", "eval/heldout/rewrd", "nonsense"):
            done = relax(*command, recipe, f"training.checkpoint.keep_best.metric={metric}")
            assert done.code == 2
            assert f"keep_best.metric: this run has no metric '{metric}'" in done.err
    assert relax("config", "check", recipe, "training.checkpoint.keep_best.metric=eval/heldout/reward").code == 0


def test_a_run_that_trained_nothing_may_simply_begin_again(relax: Relax, recipe: Path, root: Path) -> None:
    done = relax("train", recipe, fake="user_error")
    assert done.code == 2
    assert "error: model folder 'nowhere' does not exist; make it" in done.err
    done = relax("train", recipe)
    assert done.code == 0
    assert "an earlier run trained no step" in done.err
    assert (root / "resumed").read_text() == "False"


def test_what_cannot_be_resumed(relax: Relax, recipe: Path, root: Path) -> None:
    for arguments, words in (
        ([recipe, "--resume"], "there is no run to resume"),
        ([recipe, "--resume", "--overwrite"], "choose one"),
        (["--resume", root], "is not a run directory"),
    ):
        done = relax("train", *arguments)
        assert done.code == 2
        assert words in done.err
    relax("train", recipe)
    assert f"relax train --resume {root}" in relax("train", root).err


def test_a_run_that_another_process_owns_is_refused(relax: Relax, recipe: Path, root: Path) -> None:
    from relax.services.directory import RunDirectory

    with RunDirectory(root):
        done = relax("train", recipe)
    assert done.code == 2
    assert f"is owned by process {os.getpid()}" in done.err


def test_a_bug_of_ours_is_called_one(relax: Relax, recipe: Path) -> None:
    done = relax("train", recipe, fake="invariant")
    assert done.code == 1
    assert "[AC1] two and two are five" in done.err
    assert "a bug in relax" in done.err


def test_an_unexpected_error_keeps_its_traceback(relax: Relax, recipe: Path, root: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        relax("train", recipe, fake="bug")
    assert "ZeroDivisionError: a bug" in (root / "run.log").read_text()
    assert "ZeroDivisionError: a bug" in relax("status", root).out
    relax("train", "--resume", recipe)
    assert "ended" not in relax("status", root).out


def test_ctrl_c_before_the_run_begins_is_one_line(relax: Relax, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax.services.cli import train

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "build_monitors", interrupted)
    done = relax("train", recipe)
    assert (done.code, done.err) == (130, "interrupted\n")
    monkeypatch.setitem(sys.modules, "relax.services.cli.application", Interrupted("application"))
    done = relax("--help")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


class Interrupted(ModuleType):
    """A module whose import Ctrl-C ends."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


# --- signals, in a process of their own ---

SCRIPT = """
import sys
from tests.services import fake_run
sys.modules["relax.services.run"] = fake_run
from relax.services.cli import main
main()
"""


def start(recipe: Path, fake: str, *overrides: str) -> "subprocess.Popen[str]":
    """A training process that has begun to execute."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", str(recipe), *overrides],
        cwd=ROOT, env={**os.environ, "FAKE_RUN": fake}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while "executing" not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_rule_rr6_a_signal_ends_with_a_checkpoint_and_says_how_to_go_on(
    recipe: Path, root: Path, number: int, code: int
) -> None:
    process = start(recipe, "wait")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "stopping at the next safe point" in err
    assert f"stopped, checkpoint at step 30; go on with `relax train --resume {root}`" in err
    assert (root / "stopped.json").exists()
    assert "Traceback" not in err


@pytest.mark.parametrize("is_resumed", [False, True])
def test_rule_rr6_a_run_that_had_not_begun_says_that_nothing_was_trained_and_what_stands(
    recipe: Path, root: Path, is_resumed: bool
) -> None:
    if is_resumed:
        process = start(recipe, "wait")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    process = start(recipe, "early", *(["--resume"] if is_resumed else []))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "safe point" not in err
    stands = " since it was resumed, and its checkpoint at step 30 stands" if is_resumed else ""
    assert f"stopped, nothing was trained{stands}; go on with `relax train --resume {root}`" in err
    assert (root / "ending").read_text() == f"stopped, nothing was trained{stands}"


def test_rule_rr6_a_run_that_ignores_the_stop_is_cancelled_after_the_grace_time(recipe: Path, root: Path) -> None:
    process = start(recipe, "stuck", "run.grace_s=0.1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "no safe point within run.grace_s (0.1 s)" in err
    assert "stopped, no checkpoint was written" in err


@pytest.mark.parametrize("fake", ["stuck", "busy"])
def test_rule_rr6_a_second_interrupt_ends_at_once_even_when_the_loop_is_busy(recipe: Path, fake: str) -> None:
    process = start(recipe, fake)
    process.send_signal(signal.SIGINT)
    if fake == "stuck":
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
    while process.poll() is None:  # two that come too close together are one to the kernel
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_rule_rr6_a_blocked_loop_says_at_once_and_a_second_signal_ends_it(recipe: Path, number: int, code: int) -> None:
    process = start(recipe, "busy")
    process.send_signal(number)
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():  # said by the handler: the loop never turns
        assert process.poll() is None
    time.sleep(SAME_S)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code


PRINTING = """
import os, signal, sys
from relax.services.cli import train
shown = train.print_curve
def print_curve(*arguments):
    os.kill(os.getpid(), {number})
    shown(*arguments)
train.print_curve = print_curve
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rule_rr6_a_signal_while_the_summary_is_printed_is_no_crash(recipe: Path, root: Path, number: int) -> None:
    script = PRINTING.format(number=int(number)) + SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(recipe)], env={**os.environ, "FAKE_RUN": "finish"},
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert "the run has ended, and what came of it follows" in done.stderr
    assert f"summary      {root / 'summary.json'}" in done.stdout
    assert "Traceback" not in done.stderr


def test_rule_rr6_a_run_that_a_second_signal_ended_says_so_afterwards(recipe: Path, root: Path, relax: Relax) -> None:
    process = start(recipe, "stuck")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(2 * SAME_S)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert "a second signal ended it at once" in " ".join(relax("status", root).out.split())


# --- looking at a run ---


@pytest.fixture
def told(tmp_path: Path, root: Path) -> Path:
    """A finished made-up run."""
    directory = story_directory(story_config(tmp_path))
    ledger = Ledger(directory.ledger)
    write_story(ledger)
    ledger.close()
    return root


def test_status_for_people_and_for_programs(relax: Relax, told: Path) -> None:
    done = relax("status", told)
    assert done.code == 0
    *table, last = done.out.splitlines()
    assert max(map(len, table[1:])) <= 80
    assert last == f"go on with: relax train --resume {told}"
    for part in ("60 of 60, stage rl", "0.9232 at step 60", "filtered(zero_signal) 4"):
        assert part in done.out
    status = json.loads(relax("status", told, "--json").out)
    assert (status["state"], status["step"], status["account"]["trained"]) == ("unfinished", 60, 120)
    watched = relax("status", told, "--watch")
    assert (watched.code, "60 of 60" in watched.out) == (0, True)


def test_status_names_a_spoilt_file(relax: Relax, told: Path) -> None:
    (told / "status.json").write_text("")
    done = relax("status", told)
    assert done.code == 0
    assert "status.json cannot be read" in " ".join(done.out.split())


def test_show_group(relax: Relax, told: Path) -> None:
    done = relax("show", "group", "g000050/1", "--run", told)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    text = " ".join(done.out.split())
    for part in (
        "trained at step 24", "admitted at version 23, due at step 24; oldest trained token: age 1",
        "mean 0.5000, standard deviation 0.7071 over 2 of 2 trajectories", "advantage -0.7000",
        "4 sampled; 3 by version 23, 1 by version 24", "1.0000 = exact 1 x 1", "text [251]", "reference 250",
    ):  # fmt: skip
        assert part in text
    assert "filtered (zero_signal)" in relax("show", "group", "g000042", "--run", told).out
    assert "evaluation set heldout" in relax("show", "group", "e000000", "--run", told).out


def test_show_takes_the_run_in_either_place(relax: Relax, told: Path) -> None:
    for command in (["group", "g000050"], ["sample", "g000050/1/0"], ["step", "24"]):
        assert relax("show", *command, told).out == relax("show", *command, "--run", told).out != ""
        for run in ([], [told, "--run", told]):
            done = relax("show", *command, *run)
            assert done.code == 2
            assert "give one run directory" in done.err


def test_show_sample_from_the_ledger(relax: Relax, told: Path) -> None:
    done = relax("show", "sample", "g000050/1", told)
    text = " ".join(done.out.split())
    for part in (
        "Sample g000050/1/0", "tokens 0 to 10 of its trajectory, 4 of them sampled", "advantage -0.7000 (mean", "text [251]",
        "the ledger alone:", "run.samples.every says how often", "3 by version 23, 1 by version 24",
    ):  # fmt: skip
        assert part in text
    assert json.loads(relax("show", "sample", "g000050/1/0", told, "--json").out)["tokens"] is None
    assert relax("show", "sample", "g000050", told).code == 2


def test_show_sample_token_by_token(relax: Relax, told: Path) -> None:
    from relax.services.sample_file import _schema, write_samples

    names = _schema().names
    row = dict.fromkeys(names) | {
        "trajectory": "g000050/1", "token_ids": list(range(10)), "mask": [False] * 6 + [True] * 4, "versions": [-1] * 6 + [23] * 4,
        "advantages": [0.0] * 6 + [-0.7] * 4, "spans": [[0, 10]],
    }  # fmt: skip
    write_samples(told / "samples", 24, [row])
    done = relax("show", "sample", "g000050/1", told)
    assert max(map(len, done.out.splitlines())) <= 80
    lines = [line.split() for line in done.out.splitlines() if line]
    assert ["at", "token", "text", "sampled", "version", "advantages"] in lines
    last = next(line for line in lines if line[:2] == ["9", "9"])
    assert (last[-3:], len(last)) == (["yes", "23", "-0.7000"], 6)
    assert "samples/step-000024.parquet" in "".join(done.out.split())
    (told / "samples" / "step-000024.parquet").unlink()
    long = {"token_ids": [1] * 1000, "mask": [True] * 1000, "versions": [23] * 1000, "advantages": [0.5] * 1000}
    with closing(sqlite3.connect(told / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE sample SET stop = 1000 WHERE id = 'g000050/1/0'")
    write_samples(told / "samples", 24, [row | long | {"spans": [[0, 1000]]}])
    done = relax("show", "sample", "g000050/1", told)
    assert "600 more" in done.out
    assert len(done.out.splitlines()) < 430


def test_show_step(relax: Relax, told: Path) -> None:
    done = relax("show", "step", "24", told)
    assert max(map(len, done.out.splitlines())) <= 80
    text = " ".join(done.out.split())
    for part in (
        "Step 24 stage rl groups 2, 16 tokens reward 0.5000, mean over groups", "step/seconds 2.000 s", "idle/trainer 40 %",
        "2 (12.5 %)", "14 (87.5 %)", "groups, in order of their ids", "g000050 0.5000 1 0 8 23 24 1 add 50", "train/loss 1.52",
    ):  # fmt: skip
        assert part in text
    assert json.loads(relax("show", "step", "24", told, "--json").out)["ages"] == {"0": 2, "1": 14}
    refused = relax("show", "step", "99", told)
    assert (refused.code, "has no step 99" in refused.err) == (2, True)


def test_a_step_whose_groups_no_snapshot_covers_says_so(relax: Relax, told: Path) -> None:
    with closing(sqlite3.connect(told / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE group_ SET step = NULL WHERE step = 24")
        connection.execute("INSERT INTO metric VALUES (24, 'train/groups', 2)")
    assert "2, which the ledger gets with the next snapshot" in relax("show", "step", "24", told).out


def test_export_says_what_it_wrote_or_what_there_is(relax: Relax, told: Path, tmp_path: Path) -> None:
    from relax.training.checkpoint import CheckpointStore

    assert "no complete checkpoint yet" in relax("export", told, tmp_path / "policy").err

    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            (folder / "model" / name).write_text("{}")

    CheckpointStore(told / "checkpoints").write(40, fill)
    CheckpointStore(told / "checkpoints").write(60, fill)
    assert "no checkpoint of step 7; it has 40, 60" in relax("export", told, tmp_path / "policy", "--step", 7).err
    done = relax("export", told, tmp_path / "policy", "--best")
    assert done.code == 0
    best = f"the policy of step 60 (the best of 40, 60 by eval/heldout/reward, 0.9232) is in {tmp_path / 'policy'}"
    assert done.out.splitlines()[0] == best
    assert (tmp_path / "policy" / "config.json").exists()
    assert "exists already" in relax("export", told, tmp_path / "policy").err
    assert "the policy of step 40 (as asked for)" in relax("export", told, tmp_path / "other", "--step", 40).out


def test_a_group_that_does_not_exist(relax: Relax, told: Path) -> None:
    done = relax("show", "group", "g999999", "--run", told)
    assert done.code == 2
    assert "try one of g000000" in done.err


def test_a_directory_that_is_no_run_is_refused_with_the_runs_there_are(relax: Relax, told: Path) -> None:
    for command in (["status", told.parent], ["show", "group", "g000000", "--run", told.parent], ["eval", told.parent]):
        done = relax(*command)
        assert done.code == 2
        assert f"is not a run directory: it has no config.yaml; there is {told}" in done.err


def test_a_ledger_that_cannot_be_read_is_no_traceback(relax: Relax, told: Path) -> None:
    for path in told.glob("ledger.sqlite*"):
        path.unlink()
    assert "does not exist" in relax("show", "group", "g000000", "--run", told).err
    (told / "ledger.sqlite").write_text("this is no database, but long enough to be taken for one" * 100)
    for command in (["show", "group", "g000000", "--run", told], ["status", told]):
        done = relax(*command)
        assert done.code == 2
        assert "cannot be read" in done.err


def test_eval_needs_a_checkpoint_and_a_set(relax: Relax, told: Path) -> None:
    assert "no complete checkpoint yet" in relax("eval", told).err
    from relax.training.checkpoint import CheckpointStore

    CheckpointStore(told / "checkpoints").write(20, lambda folder: None)
    assert "no checkpoint of step 7; it has 20" in relax("eval", told, "--checkpoint", 7).err
