"""Operations: idempotent, one after another for each subject, cancellable, with an error to read; none ends the run."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from relax.config.autoscale import AutoscaleSection
from relax.config.secret import Secret
from relax.core.error import EngineError, UserError
from relax.services.autoscale import Autoscaler, FleetLoad
from relax.services.control.autoscaling import autoscale
from relax.services.control.operation import (
    MAX_ENDED,
    MAX_PENDING,
    MAX_SAID,
    ConflictError,
    CrowdedError,
    OperationBook,
    UnknownError,
)
from relax.services.control.operator import Operator
from relax.services.control.request import (
    Attach,
    Checkpoint,
    Evaluate,
    Pause,
    Request,
    Restart,
    Resume,
    Scale,
    arguments_of,
)
from tests.engines.clock import StepClock
from tests.services.fake_control import FakeControl, broken


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
async def operator(control: FakeControl) -> AsyncIterator[Operator]:
    made = Operator(control, now=lambda: 5.0)
    running = asyncio.create_task(made.run())
    yield made
    assert not running.done(), "an operation ended the run"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_operation_is_carried_out(operator: Operator, control: FakeControl) -> None:
    operation = operator.submit(Scale({"rollout": 3}))
    assert (operation.id, operation.state, operation.plan) == (
        "scale-1",
        "pending",
        ("start rollout-1", "start rollout-2"),
    )
    await operator.wait(operation.id, 10)
    assert operation.to_json() == {
        "id": "scale-1", "kind": "scale", "arguments": {"replicas": {"rollout": 3}}, "state": "done", "cancelling": False,
        "plan": ["start rollout-1", "start rollout-2"], "progress": ["scale begins"], "result": {"rollout": 3, "reward": 1},
        "error": None, "timeout_s": 900.0, "created_at": 5.0, "started_at": 5.0, "ended_at": 5.0,
    }  # fmt: skip


async def test_one_id_is_one_operation(operator: Operator, control: FakeControl) -> None:
    first = operator.submit(Scale({"rollout": 3}), "mine")
    assert operator.submit(Scale({"rollout": 3}), "mine") is first
    await operator.wait("mine", 10)
    assert operator.submit(Scale({"rollout": 3}), "mine") is first
    await turns()
    assert len(control.performed) == 1
    with pytest.raises(
        ConflictError, match="operation 'mine' is to scale rollout to 3, this one is to scale rollout to 4; give"
    ):
        operator.submit(Scale({"rollout": 4}), "mine")


async def test_of_one_subject_one_runs_and_other_subjects_do_not_wait(operator: Operator, control: FakeControl) -> None:
    control.hold = True
    scale, restart, pause = (
        operator.submit(request) for request in (Scale({"rollout": 2}), Restart("trainer"), Pause())
    )
    await turns()
    assert [one.state for one in (scale, restart, pause)] == ["running", "pending", "running"]
    control.released.set()
    for one in (scale, restart, pause):
        assert (await operator.wait(one.id, 10)).state == "done"
    assert control.performed.index(scale.request) < control.performed.index(restart.request)


async def test_one_that_waits_is_cancelled_without_having_begun(operator: Operator, control: FakeControl) -> None:
    control.hold = True
    first, second = operator.submit(Scale({"rollout": 2})), operator.submit(Scale({"rollout": 5}))
    await turns()
    assert operator.cancel(second.id).state == "cancelled"
    assert operator.cancel(second.id).state == "cancelled"
    control.released.set()
    await operator.wait(first.id, 10)
    await turns()
    assert control.replicas["rollout"] == 2


async def test_one_that_runs_is_cancelled_and_goes_back(operator: Operator, control: FakeControl) -> None:
    control.hold = True
    first, second = operator.submit(Scale({"rollout": 2})), operator.submit(Scale({"reward": 3}))
    await turns()
    assert operator.cancel(first.id).is_cancelling
    await turns()
    assert (first.state, control.undone) == ("cancelled", [first.request])
    assert second.state == "running"
    control.released.set()
    await operator.wait(second.id, 10)
    with pytest.raises(ConflictError, match="is done already; ask for the opposite"):
        operator.cancel(second.id)


async def test_one_that_has_only_just_begun_is_cancelled(operator: Operator, control: FakeControl) -> None:
    control.hold = True
    operation = operator.submit(Pause())
    for _ in range(10):
        if operation.state == "pending":
            await asyncio.sleep(0)
    operator.cancel(operation.id)  # its task has not had its first step yet
    assert (await operator.wait(operation.id, 10)).state == "cancelled"


async def test_a_failure_is_kept_to_read(control: FakeControl) -> None:
    operator = Operator(broken())
    running = asyncio.create_task(operator.run())
    operation = await operator.wait(operator.submit(Checkpoint()).id, 10)
    assert (operation.state, operation.result) == ("failed", None)
    assert operation.error == "engine-1 takes no requests after 60 s: it is failed (no memory); see its log"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_bug_in_one_is_its_own_failure(operator: Operator, control: FakeControl) -> None:
    control.failure = ZeroDivisionError("oops")
    operation = await operator.wait(operator.submit(Evaluate()).id, 10)
    assert operation.state == "failed"
    assert "bug in relax: ZeroDivisionError: oops; the run goes on" in str(operation.error)


async def test_rule_rr7_one_that_takes_too_long_fails_with_what_it_did_last(
    operator: Operator, control: FakeControl
) -> None:
    control.hold = True
    operation = await operator.wait(operator.submit(Resume(), timeout_s=0.01).id, 10)
    assert (operation.state, control.undone) == ("failed", [operation.request])
    assert str(operation.error).startswith("resume did not end within 0.01 s; last: resume begins; ask again")


async def test_a_timeout_inside_is_not_taken_for_ours(operator: Operator, control: FakeControl) -> None:
    control.failure = TimeoutError("the disk")
    operation = await operator.wait(operator.submit(Checkpoint()).id, 10)
    assert "TimeoutError: the disk" in str(operation.error)


async def test_when_the_run_ends_what_was_under_way_says_so(control: FakeControl) -> None:
    operator = Operator(control)
    control.hold = True
    running = asyncio.create_task(operator.run())
    first, second = operator.submit(Scale({"rollout": 2})), operator.submit(Restart("trainer"))
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (first.state, second.state) == ("failed", "failed")
    assert "was interrupted: the run, or its controller, ended" in str(second.error)


async def test_a_restart_of_the_controller_is_done_when_the_controller_ends(control: FakeControl) -> None:
    operator = Operator(control)
    control.hold = True
    running = asyncio.create_task(operator.run())
    operation = operator.submit(Restart("controller"))
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (operation.state, operation.result, operation.error) == ("done", {"host": "controller"}, None)


async def test_what_cannot_be_done_is_refused_at_once(operator: Operator) -> None:
    with pytest.raises(UserError, match="role 'critic' has no replicas"):
        operator.submit(Scale({"critic": 2}))
    assert operator.book.all() == []
    with pytest.raises(UnknownError, match="no operation 'x'"):
        operator.cancel("x")


async def test_looking_waits_no_longer_than_asked(operator: Operator, control: FakeControl) -> None:
    control.hold = True
    operation = operator.submit(Pause())
    assert (await operator.wait(operation.id, 0.001)).state == "running"


def test_the_book_is_bounded() -> None:
    book = OperationBook()
    for _ in range(MAX_ENDED + 5):
        book.end(book.add(Pause(), None, (), 1, 0), "done", 1)
    assert len(book.all()) == MAX_ENDED
    assert book.all()[0].id == "pause-6"
    for _ in range(MAX_PENDING):
        book.add(Pause(), None, (), 1, 0)
    with pytest.raises(CrowdedError, match="32 operations wait already"):
        book.add(Pause(), None, (), 1, 0)
    operation = book.startable()[0]
    for number in range(MAX_SAID + 5):
        book.say(operation, str(number))
    assert operation.said == [str(number) for number in range(5, MAX_SAID + 5)]


def test_an_id_that_a_client_took_is_not_given_out() -> None:
    book = OperationBook()
    book.add(Pause(), "pause-1", (), 1, 0)
    assert book.add(Pause(), None, (), 1, 0).id == "pause-2"


def test_rule_se1_a_request_names_its_secret_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_ENGINE_LAB", "hunter2-hunter2")
    request = Attach("lab", "http://lab:8000", 4, Secret("RELAX_ENGINE_LAB"))
    assert arguments_of(request)["token"] == "env:RELAX_ENGINE_LAB"
    assert "hunter2" not in repr(request)


async def test_the_policy_asks_as_a_person_does_and_waits_for_its_turn(
    operator: Operator, control: FakeControl, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StepClock()
    config = AutoscaleSection(max=4, every_s=10, hold_s=10, cool_down_s=20)

    def look() -> FleetLoad:
        replicas = control.replicas["rollout"]
        return FleetLoad(clock.time(), replicas, replicas, queue_s=9.0, load=1.0, trainer_idle=0.6)

    policy = asyncio.create_task(autoscale(Autoscaler(config), look, operator, clock, config.every_s))
    control.hold = True
    await clock.advance(40)
    (operation,) = operator.book.all()  # the second and third look found it under way
    assert isinstance(operation.request, Scale)
    assert operation.request.replicas == {"rollout": 2}
    assert "the trainer waits for full engines" in operation.request.reason
    control.released.set()
    await operator.wait(operation.id, 10)
    control.failure = EngineError("no place")
    await clock.advance(40)
    assert [one.state for one in operator.book.all()][:2] == ["done", "failed"]
    control.plan = _refuse  # type: ignore[method-assign]
    await clock.advance(40)
    assert "autoscale wants 4 engines, but: there is no place" in caplog.text
    assert not policy.done()
    policy.cancel()
    await asyncio.gather(policy, return_exceptions=True)


def _refuse(request: Request) -> Sequence[str]:
    raise UserError("there is no place for it")
