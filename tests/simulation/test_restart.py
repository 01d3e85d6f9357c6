"""The simulation of what failures cost: a pipeline that loses what it should lose, and no more."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from relax.simulation.restart import CHECKPOINT_EVERY, Job, Plan, main, productive_shares
from relax.simulation.violation import Violation

CALM = Plan(steps=20, failures=0.0, mean_s=5.0, sigma=0.1)
"""Training is all that takes time."""


def run(plan: Plan, *troubles: tuple[float, str]) -> Job:
    """A run in which certain hosts fail at certain times."""
    job = Job(plan)
    for at_s, host in troubles:
        job.timeline.after(at_s, _failing(job, host))
    job.run()
    return job


def _failing(job: Job, host: str) -> Callable[[], None]:
    return lambda: job._lose_host(host)


def test_without_failures_the_trainer_is_always_busy() -> None:
    job = run(CALM)
    assert job.gate.step == 20
    assert job.outcome.elapsed_s == pytest.approx(20 * 90.0, abs=20.0)
    assert (job.outcome.failures, job.outcome.lost_s) == (0, 0.0)


def test_a_trainer_that_fails_costs_its_step_so_far_and_its_restart() -> None:
    plan = replace(CALM, restart_s=30.0)
    calm = run(plan).outcome.elapsed_s
    job = run(plan, (500.0, "trainer"))
    assert 0 < job.outcome.lost_s < 90.0
    backoff_s = 0.2
    assert job.outcome.elapsed_s == pytest.approx(calm + job.outcome.lost_s + 30.0 + 0.1 + backoff_s)


@pytest.mark.parametrize("host", ["engine-0", "reward", "advantage", "rollout"])
def test_others_that_fail_cost_no_time_while_the_queue_lasts(host: str) -> None:
    plan = replace(CALM, restart_s=30.0)
    job = run(plan, (500.0, host))
    assert job.outcome.elapsed_s == pytest.approx(run(plan).outcome.elapsed_s)
    assert host in job.alive


def test_a_step_that_ends_while_the_controller_is_down_waits_for_it() -> None:
    plan = replace(CALM, restart_s=150.0)
    calm = run(plan).outcome.elapsed_s
    assert calm + 50.0 < run(plan, (500.0, "controller")).outcome.elapsed_s < calm + 151.0


def test_a_whole_job_goes_back_to_its_checkpoint() -> None:
    calm = run(CALM).outcome.elapsed_s
    job = run(replace(CALM, restart_s=30.0, checkpoint_every=10), (17.5 * 90.0, "reward"))
    # Seven and a half steps again, the restart, and the queue sampled anew.
    assert job.outcome.elapsed_s == pytest.approx(calm + 7.5 * 90.0 + 30.0, abs=40.0)
    assert job.gate.step == 20


def test_rule_rr6_a_role_that_keeps_failing_is_given_up_by_the_supervisor() -> None:
    with pytest.raises(Violation, match=r"\[RR6\].*reward.*6 times"):
        run(replace(CALM, restart_s=1.0), *((100.0 + 50.0 * number, "reward") for number in range(6)))


def test_a_role_alone_costs_less_than_the_whole_job_at_every_restart_time() -> None:
    shares = productive_shares(Plan(steps=100), (5.0, 300.0))
    for restart_s in (5.0, 300.0):
        alone, every_step, every_ten = (shares[restart_s, every] for every in (None, *CHECKPOINT_EVERY))
        assert 1.0 > alone > every_step > every_ten
    assert shares[5.0, None] > shares[300.0, None]


def test_the_command_prints_the_assumptions_before_the_table() -> None:
    out = io.StringIO()
    assert main(["--steps", "20", "--seeds", "1"], out) == 0
    lines = out.getvalue().splitlines()
    assert lines[0] == "Simulation, not a measurement. Assumed:"
    assert [line.split()[0] for line in lines[-4:]] == ["5", "30", "120", "300"]
