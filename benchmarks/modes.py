"""One recipe colocated, separate and asynchronous: step times beside the bounds that stage times measured alone allow.

    python -m benchmarks.modes [--quick] [--steps N] [--runtime local|ray] [--only real|emulated] [--keep DIR]

Real part: the quickstart's RL with longer answers and a wider model, from one warm-up, each core standing for one device, equal
samples in every mode; placement, threads and `max_staleness` are all that differs. `--runtime` is where the asynchronous run is.
Emulated part: the same modes on 16 emulated devices by one assumed profile and its sweep; the speed-up stands beside the
published one. Last line: JSON.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml

from benchmarks.alone import StageSeconds, measure
from benchmarks.colocation import ASSUMED, MODES, SWEEP, Emulated, emulate_modes
from benchmarks.kill import ROOT, Process
from benchmarks.outcome import Aim, report
from relax.config.load import load_config
from relax.services.ledger import Ledger

RECIPE = ROOT / "recipes" / "quickstart.yaml"
RUN_TIMEOUT_S = 3600.0
WARM_STEPS = 20
"""First steps of a run, left out: the first evaluation and the filling of the pipeline."""
SHARED = {"trainer": "a", "engine": "a"}
WHOLE_STEPS = {"trainer": "a", "critic": "a", "engine": "b"}
"""A trainer that shares its device, here with a role that this run has not, waits for whole steps."""
LEARNING_RATE = 3e-5
"""A fraction of the recipe's: a step has an eighth of its prompts, and the model is wider. With 1e-4 the first steps undo what the
warm-up taught, and where a run ends is chance."""
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Some 3 million parameters. With the recipe's 0.4 million what the roles do around the model would be most of a step."""
DOTS = 64
"""Appended to each answer of three digits."""
REWARD = "benchmarks.long_answer:begins_right"
DOTS_STEPS, DOTS_GROUPS, DOTS_RATE = 150, 32, "5e-4"
"""The second part of the warm-up, which teaches the dots; in the first they would drown the digits. It unlearns the digits at first: with
fewer steps they do not come back, with twice as many there is nothing left for RL."""
MICROBATCH_TOKENS = 2048
"""In every mode; small enough that a step is several of them, which is what streaming needs."""
SLOTS = 64
"""All of a step's requests at a time: generating then takes about as long as training. Answers are of one length, so streaming has
nothing to do before the last of them; what it is worth is in the emulated part."""
ON_LOAD = "keep"
"""In every mode: requests go on with the keys and values they have."""
PUBLISHED = {"separate, streaming": 1.12, "asynchronous": 1.76}
"""Speed-ups over colocated of the reference system (Qwen3-4B on 16 H800; its stage times were not published)."""


@dataclass(frozen=True)
class Mode:
    """One way of placing the roles; `threads` are each role's, `bound` the step time that the stages alone allow."""

    name: str
    max_staleness: int
    threads: int
    devices: Mapping[str, str]
    bound: Callable[[StageSeconds], float]


@dataclass(frozen=True)
class Result:
    """`tokens` went through the trainer's forward pass per step; `samples` is how many groups were trained."""

    mode: str
    seconds: float
    bound: float
    accuracy: float
    samples: int
    tokens: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.bound


def modes(cores: int) -> list[Mode]:
    """`cores` bounds the threads that a colocated run is tried with."""
    counts = [count for count in (2, 4, 8) if count <= cores]
    colocated = [
        Mode(f"colocated, {count} threads", 0, count, SHARED, lambda stages: stages.in_turn) for count in counts
    ]
    return [
        Mode("colocated, 1 thread", 0, 1, SHARED, lambda stages: stages.in_turn),
        *colocated,
        Mode("separate, whole steps", 0, 1, WHOLE_STEPS, lambda stages: stages.in_turn),
        Mode("separate, streaming", 0, 1, {}, lambda stages: stages.streamed),
        Mode("asynchronous", 1, 1, {}, lambda stages: stages.overlapped),
    ]


# --- the real part -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Where and how much is run."""

    directory: Path
    steps: int
    groups: int
    warm_up: int
    records: int
    rounds: int

    def recipe(self, name: str, stage: str, dots: int = DOTS, **sections: Mapping[str, Any]) -> Path:
        """The quickstart with one stage; `sections` are laid over its own."""
        tree: dict[str, Any] = yaml.safe_load(RECIPE.read_text("utf-8"))
        tree["stages"] = [node for node in tree["stages"] if node["name"] == stage]
        quiet = {"samples": {"every": 0}, "timeline": {"every": 0}}
        tree["run"] = {**tree["run"], "name": name, "directory": str(self.directory), **quiet}
        tree["monitors"] = []
        tree["eval"] = {**tree["eval"], "every": 0}
        for source in (tree["data"]["sources"][0], tree["eval"]["sets"][0]["source"]):
            source |= {"function": "benchmarks.long_answer:addition", "args": {**source["args"], "dots": dots}}
        tree["tasks"]["addition"]["rewards"] = [{"type": REWARD, "in_process": True, "weight": 1}]
        tree["eval"]["sets"][0]["source"]["args"]["count"] = tree["eval"]["sets"][0]["max_records"] = self.records
        tree["rollout"]["sampling"]["max_tokens"] = dots + 3
        tree["rollout"] |= {"on_load": ON_LOAD, "engine": {"type": "torch", "slots": SLOTS}}
        tree["training"]["optimizer"]["lr"] = LEARNING_RATE
        tree["training"] = {**tree["training"], "microbatch_tokens": MICROBATCH_TOKENS}
        tree["training"]["checkpoint"] = {"every": 1_000_000, "keep_last": 1}
        for section, values in sections.items():
            tree[section] = {**tree[section], **values}
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree), "utf-8")
        return path

    def train(self, recipe: Path, *overrides: str) -> Path:
        """Run it in a process of its own; returns the run directory."""
        log = recipe.with_suffix(".log")
        with Process(["train", str(recipe), *overrides], log) as process:
            code = process.wait(RUN_TIMEOUT_S)
        if code != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise SystemExit(f"{recipe.stem} ended with {code}:\n{tail}")
        return self.directory / recipe.stem

    def start(self) -> dict[str, Any]:
        """The model section of every mode: the warmed-up policy."""
        shape = self.directory / "model"
        shutil.copytree(ROOT / "recipes" / "models" / "qwen3-char", shape)
        config = json.loads((shape / "config.json").read_text("utf-8"))
        config |= MODEL | {"layer_types": ["full_attention"] * int(MODEL["num_hidden_layers"])}
        (shape / "config.json").write_text(json.dumps(config), "utf-8")
        answers = self._supervised("answers", {"path": str(shape)}, 0, steps=self.warm_up, groups_per_step=128)
        steps = min(DOTS_STEPS, self.warm_up)
        sizes = {"steps": steps, "groups_per_step": DOTS_GROUPS, "optimizer.lr": DOTS_RATE}
        return self._supervised("dots", answers, DOTS, **sizes)

    def _supervised(self, name: str, model: Mapping[str, Any], dots: int, **stage: object) -> dict[str, Any]:
        recipe = self.recipe(name, "warm-up", dots, model=model)
        root = self.train(recipe, *[f"stages.warm-up.{key}={value}" for key, value in stage.items()])
        path = str(sorted((root / "checkpoints").glob("step-*"))[-1] / "model")
        return {"path": path, "tokenizer": path, "weights": "pretrained"}

    def mode_recipe(self, mode: Mode, model: Mapping[str, Any], runtime: str, *suffix: str) -> Path:
        name = "-".join([mode.name.replace(", ", "-").replace(" ", "-"), *suffix])
        where = {"type": runtime, "threads_per_role": mode.threads, "devices": dict(mode.devices)}
        return self.recipe(name, "rl", model=model, runtime=where, rollout={"max_staleness": mode.max_staleness})

    @property
    def sizes(self) -> list[str]:
        return [f"stages.rl.steps={self.steps}", f"stages.rl.groups_per_step={self.groups}"]

    def stages_alone(self, recipe: Path) -> StageSeconds:
        """At the mode's own number of threads, on the local runtime: nothing of a runtime is in it."""
        config = load_config([recipe], self.sizes)
        return asyncio.run(measure(config, self.directory / recipe.stem, self.rounds))

    def measure(self, mode: Mode, model: Mapping[str, Any], runtime: str) -> tuple[Result, list[StageSeconds]]:
        """Stage times are measured before and after the run: a machine's speed drifts by more than what a bound is compared within."""
        recipe, alone = self.mode_recipe(mode, model, runtime), self.mode_recipe(mode, model, "local", "alone")
        stages = [self.stages_alone(alone)]
        root = self.train(recipe, *self.sizes)
        stages.append(self.stages_alone(alone))
        with closing(Ledger(root / "ledger.sqlite", read_only=True)) as ledger:
            seconds = [value for step, value in ledger.metric("step/seconds") if step >= WARM_STEPS]
            tokens = [value for step, value in ledger.metric("training/tokens/forward") if step >= WARM_STEPS]
            # A step in which no group has a signal has no forward pass.
            trained = sum(tokens) / len(seconds)
            accuracy = ledger.metric("eval/heldout/reward")[-1][1]
            samples = ledger.counts()["trained"]
        bound = fmean(mode.bound(one.trained_on(trained)) for one in stages)
        return Result(mode.name, fmean(seconds), bound, accuracy, samples, trained), stages


def measure_real(bench: Bench, runtime: str, cores: int) -> tuple[list[Result], dict[int, list[StageSeconds]]]:
    """Every mode, one after the other; stage times alone by number of threads."""
    model = bench.start()
    alone: dict[int, list[StageSeconds]] = {}
    results: list[Result] = []
    for mode in modes(cores):
        one, stages = bench.measure(mode, model, runtime if mode.name == "asynchronous" else "local")
        results.append(one)
        alone.setdefault(mode.threads, []).extend(stages)
        print(
            f"{one.mode}: {one.seconds:.3f} s per step, bound {one.bound:.3f}, accuracy {one.accuracy:.3f}", flush=True
        )
    return results, alone


def real_aims(results: Sequence[Result]) -> list[Aim]:
    by_name = {result.mode: result for result in results}
    asynchronous, one = by_name["asynchronous"].seconds, by_name["colocated, 1 thread"].seconds
    best = min(result.seconds for result in results if result.mode.startswith("colocated"))
    spread = max(result.accuracy for result in results) - min(result.accuracy for result in results)
    python = "two cores carry the two devices and every other role as well; with cores for those the asynchronous run would be its bound"
    services = "controller, rollout and rewards run on the same two cores"
    early = "600 records have a standard error of 0.015, and two runs that train other groups differ by chance: repeat with more steps"
    return [
        Aim("colocated with one thread / asynchronous (limit 2)", one / asynchronous, 1.5, "higher", python, "x"),
        Aim("colocated with its best threads / asynchronous", best / asynchronous, 1.15, "higher", python, "x"),
        *(Aim(f"{one.mode}: step / bound", one.ratio, 1.1, "lower", services) for one in results),
        Aim("spread of final accuracy", spread, 0.03, "lower", early),
        Aim("modes with other than the equal number of samples", len({r.samples for r in results}) - 1, 0, "lower"),
    ]


def real_rows(results: Sequence[Result]) -> list[list[str]]:
    one = next(result.seconds for result in results if result.mode == "colocated, 1 thread")
    return [
        [
            *("real", r.mode, f"{r.seconds:.3f}", f"{r.bound:.3f}", f"{r.ratio:.3f}", f"{one / r.seconds:.2f}", "-"),
            f"{r.accuracy:.3f}",
        ]
        for r in results
    ]


# --- the emulated part -----------------------------------------------------------------------------------------------------


def measure_emulated(steps: int, quick: bool) -> list[Emulated]:
    results: list[Emulated] = []
    for assumed in (ASSUMED,) if quick else (ASSUMED, *SWEEP):
        for found in emulate_modes(assumed, steps):
            results.append(found)
            print(f"{assumed.name}, {found.mode}: {found.measured:.1f} s per step, bound {found.bound:.1f}", flush=True)
    return results


def emulated_rows(results: Sequence[Emulated]) -> list[list[str]]:
    rows = []
    for found in results:
        colocated = next(r.measured for r in results if (r.assumed, r.mode) == (found.assumed, MODES[0]))
        published = PUBLISHED.get(found.mode) if found.assumed == ASSUMED else None
        times = [f"{found.measured:.1f}", f"{found.bound:.1f}", f"{found.ratio:.3f}"]
        speed_up = f"{colocated / found.measured:.2f}"
        rows.append([found.assumed.name, found.mode, *times, speed_up, f"{published}" if published else "-", "-"])
    return rows


def emulated_aims(results: Sequence[Emulated]) -> list[Aim]:
    reason = "the bound knows of no queue before the reference, nor of the order in which groups may be taken (ST3)"
    worst = max(results, key=lambda found: abs(found.ratio - 1))
    name = f"emulated: distance from the bound, worst setting ({worst.assumed.name}, {worst.mode})"
    return [Aim(name, abs(worst.ratio - 1), 0.05, "lower", reason)]


def notes_of(alone: Mapping[int, Sequence[StageSeconds]], emulated: Sequence[Emulated]) -> list[str]:
    notes = []
    for threads, found in alone.items():
        names = ("generate", "trained", "update", "snapshot", "publish", "load")
        seconds = {name: [getattr(one, name) for one in found] for name in names}
        told = ", ".join(f"{name} {min(times):.3f} to {max(times):.3f} s" for name, times in seconds.items())
        tokens = f"{found[0].tokens:.0f} tokens"
        notes.append(
            f"Stages alone with {threads} thread{'s' * (threads > 1)}, for {tokens}, before and after the runs: {told}"
        )
    split = next((found.split for found in emulated if found.split is not None), None)
    if split is not None:
        notes.append(
            f"Emulated: the stage times are assumed, not published; 16 devices are split into {split.rollout} for rollout, "
            f"{split.reference} for the reference and {split.trainer} for the trainer where they are not shared"
        )
    return notes


HEADER = ("where", "mode", "s per step", "bound", "ratio", "speed-up", "published", "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps and settings: does it run?")
    parser.add_argument("--steps", type=int, default=120, help="RL steps of each real run")
    parser.add_argument("--runtime", choices=("local", "ray"), default="ray", help="of the asynchronous real run")
    parser.add_argument("--only", choices=("real", "emulated"), help="one of the two parts")
    parser.add_argument("--keep", type=Path, help="where the run directories are kept; default: a temporary folder")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    results: list[Result] = []
    alone: dict[int, list[StageSeconds]] = {}
    emulated: list[Emulated] = []
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.only != "emulated":
            directory = (arguments.keep or Path(temporary)).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            bench = Bench(directory, arguments.steps, 8, 340, 600, 5)
            if arguments.quick:
                bench = Bench(directory, WARM_STEPS + 4, 4, 20, 32, 1)
            cores = len(os.sched_getaffinity(0))
            results, alone = measure_real(bench, arguments.runtime, cores)
    if arguments.only != "real":
        emulated = measure_emulated(2 if arguments.quick else 24, arguments.quick)
    rows = [*(real_rows(results) if results else []), *emulated_rows(emulated)]
    for row in (HEADER, *rows):
        print("  ".join(f"{cell:>21}" for cell in row))
    aims = [*(real_aims(results) if results else []), *(emulated_aims(emulated) if emulated else [])]
    report(
        "modes",
        aims,
        quick=arguments.quick,
        notes=notes_of(alone, emulated),
        table={"header": HEADER, "rows": rows},
        runtime=arguments.runtime,
        real=[asdict(result) for result in results],
        alone={threads: [asdict(one) for one in stages] for threads, stages in alone.items()},
    )


if __name__ == "__main__":
    main()
