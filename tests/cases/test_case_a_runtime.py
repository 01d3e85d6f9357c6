"""Cases A7, A15 and G7, and rules SE1 and SE2, as facts about the whole package: what no file may do, so that the fault has nowhere to be.

Reads the source; a use that is right after all gets a line in the table that names who waits for it, and why.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax.core
from relax.config.control import ControlSection
from relax.core.error import InvariantError
from relax.runtime.wire_address import check_secret, parse_address

ROOT = Path(__file__).resolve().parents[2]

TASKS = {
    "relax/runtime/task.py": "TaskSet: what everything else uses",
    "relax/services/controller.py": "take: awaited before it returns",
    "relax/services/roles/reward.py": "the judges of a batch: awaited by the batch, which is a task of a set",
    "relax/services/cli/launch.py": "the run itself, awaited by the command; and its stop, whose end is looked at",
    "relax/services/sample_file.py": "the write under way, awaited by the next one and by close; it catches and tells every error",
    "relax/services/timeline.py": "the write under way, awaited by the next one and by close",
    "relax/engines/sglang/engine.py": "requests to the server: each is awaited where it starts; aborts: close awaits them",
    "relax/engines/torch/engine.py": "the loop that decodes: its end fails the requests, and close awaits it",
    "relax/engines/emulated.py": "a timer, awaited or cancelled where it was made",
    "relax/data/media/batch.py": "a process's worth of calls: what becomes of each is told to its caller, and close awaits the rest",
    "relax/data/media/flight.py": "one medium that many ask for: each caller awaits it, and close cancels and awaits what is left",
    "relax/data/media/download.py": "an exchange on a thread: awaited by its caller, and when that is cancelled its end is looked at",
    "relax/engines/router.py": "a timer, awaited or cancelled where it was made",
    "relax/runtime/device.py": "the move of a model between two turns: its end is an event of the turns, and close awaits it",
    "relax/runtime/turn_compute.py": "a turn: awaited or given back by the call that asked for it",
    "relax/runtime/turn_desk.py": "a request for a turn: its answer is told to who asked, and close awaits the rest",
    "relax/runtime/hosted.py": "a host's entry: its end is the answer of `run`",
    "relax/runtime/ray.py": "the life of an actor: `exit` awaits it",
    "relax/runtime/supervision.py": "what attends a process: awaited or cancelled by the task that made it",
    "relax/runtime/wire_client.py": "the connecting, whose end fails or sends the calls that wait; close awaits it",
    "relax/runtime/wire_server.py": "a call: its end is its caller's answer, and close awaits what is left",
    "relax/services/control/operator.py": "an operation: awaited by its task in a set, which keeps how it ended",
    "relax/services/control/server.py": "the server: its end ends the task that waits for it",
    "relax/services/beginning.py": "a part of the beginning, and the stop that may end it: both awaited where they were made",
    "relax/services/remote/attempt.py": "a question to an attempt at the run: awaited or cancelled where it was made",
    "relax/services/remote/site.py": "what follows from a lost connection: kept until it has ended; an error is logged by name",
    "relax/services/remote/trainer.py": "a capture that a thread waits for",
    "relax/services/remote/work.py": "the end of a stage: looked at or cancelled where it was made",
    "relax/weights/broadcast.py": "a round of sending: awaited by the next one and by close",
}
"""The only files that start a task of their own, and who waits for it."""

FORKS = {"relax/runtime/worker.py": "a worker process that has one thread, before each call"}
"""The only files that fork, or start processes through a library that may."""


def calls(names: set[str], source: str) -> Iterator[ast.Call]:
    """The calls of a source whose last name is one of `names`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in names:
                yield node


def sources() -> Iterator[tuple[str, str]]:
    """Every file that a run may load, and its text; the simulation is no part of a run."""
    for path in sorted((ROOT / "relax").rglob("*.py")):
        if "simulation" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def files_that_call(names: set[str]) -> set[str]:
    return {name for name, source in sources() if any(calls(names, source))}


STARTS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup"}


def test_case_a15_nobody_starts_a_task_that_nobody_waits_for() -> None:
    """SkyRL#1691, verl#5977: an exception in a forgotten task is never seen, and what it was to do is waited for for ever."""
    assert files_that_call(STARTS) == TASKS.keys()


def test_case_a15_no_task_is_started_and_thrown_away() -> None:
    for name, source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                assert not list(calls(STARTS, ast.unparse(node))), f"{name}:{node.lineno}"


FORKING = {"fork", "forkpty", "ProcessPoolExecutor", "get_context", "Process", "set_start_method"}


def test_case_g7_nothing_forks_a_process_with_threads() -> None:
    """SkyRL#1415. Data sets are read without worker processes: no call of a reader asks for any."""
    assert files_that_call(FORKING) == FORKS.keys()
    for name, source in sources():
        assert "multiprocessing" not in source, name
        for call in calls({"map", "filter", "DataLoader", "load_dataset", "load_from_disk"}, source):
            asked = {keyword.arg for keyword in call.keywords}
            assert not asked & {"num_proc", "num_workers"}, f"{name}:{call.lineno}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("asyncio.create_task(work())", 1),
        ("task = loop.create_task(work())", 1),
        ("x = os.fork()", 1),
        ("multiprocessing.get_context('fork').Pool(4)", 1),
        ("tasks.start('name', work())", 0),
    ],
)
def test_the_checks_see_what_they_are_for(source: str, found: int) -> None:
    assert len(list(calls(STARTS | FORKING, source))) == found


def boundary_types() -> dict[str, type]:
    """Every dataclass of core: what crosses between rooms."""
    modules = [
        importlib.import_module(f"relax.core.{found.name}") for found in pkgutil.iter_modules(relax.core.__path__)
    ]
    return {
        f"{module.__name__}.{name}": kind
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and dataclasses.is_dataclass(kind)
    }


OPEN = {
    "relax.core.protocol.LossInput": "made by the backend for one call of a loss, and seen by nobody else",
    "relax.core.protocol.LossOutput": "made by the loss for its caller, and seen by nobody else",
}


def test_case_a7_nothing_that_crosses_between_rooms_can_be_changed() -> None:
    """slime#2261, verl#7207: the parameters of a request are not changed by who serves its first turn."""
    found = boundary_types()
    assert {
        "relax.core.completion.Sampling",
        "relax.core.completion.Session",
        "relax.core.batch.TrainRow",
    } <= found.keys()
    assert {name for name, kind in found.items() if not kind.__dataclass_params__.frozen} == OPEN.keys()
    assert not {name for name, kind in found.items() if "__slots__" not in vars(kind)} - OPEN.keys()


UNPICKLES = {
    "relax/runtime/codec.py": "strict mode: what the same process has just pickled",
    "relax/runtime/worker.py": "a worker's calls: what its parent has pickled; answers go back as JSON or bytes",
}
"""The only files that unpickle, and who pickled it."""
LOADERS = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "torch", "marshal", "shelve"}


UNSAFE = {("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False)}


def unpickling(source: str) -> Iterator[ast.AST]:
    """Calls that may run what a file or a message holds."""
    for call in calls({"load", "loads", "Unpickler", "open"}, source):
        if (
            isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id in LOADERS
        ):
            yield call
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            yield from [node] * ((node.arg, node.value.value) in UNSAFE)


def test_rule_se2_nothing_is_unpickled_that_came_from_outside() -> None:
    assert {name for name, source in sources() if any(unpickling(source))} == UNPICKLES.keys()


PORTS = {
    "bind",
    "create_server",
    "start_server",
    "start_unix_server",
    "serve_forever",
    "HTTPServer",
    "ThreadingHTTPServer",
}


SERVERS = {
    "relax/runtime/wire_address.py": "Unix sockets of this user, or TCP with a secret",
    "relax/runtime/wire_server.py": "listens at what wire_address has bound",
    "relax/services/remote/reach.py": "keeps the controller's TCP port for the run; only the controller listens at it",
    "relax/services/control/server.py": "the control API: loopback, or an address for which a token was chosen",
}
"""The only files that open a port, and who can reach it."""


def test_rule_se1_only_these_files_open_a_port_and_none_that_anybody_may_use() -> None:
    assert files_that_call(PORTS) == SERVERS.keys()
    with pytest.raises(InvariantError, match="SE1"):
        check_secret(parse_address("tcp:127.0.0.1:0"), None)
    assert list(ControlSection(host="0.0.0.0").other_machines_need_a_token())
    assert not list(ControlSection(host="127.0.0.1").other_machines_need_a_token())


@pytest.mark.parametrize(
    "source",
    [
        "pickle.loads(data)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_check_sees_what_unpickles(source: str) -> None:
    assert list(unpickling(source))
    assert not list(
        unpickling("json.loads(text); np.load(path); AutoModel.from_pretrained(path, trust_remote_code=False)")
    )
