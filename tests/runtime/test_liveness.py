"""What roles say of themselves."""

import json

from relax.runtime.liveness import Beat, Pulse


def test_a_pulse_becomes_a_beat_and_crosses_as_json() -> None:
    pulse, told = Pulse(), list[str]()
    pulse.when_ready(lambda: told.append("ready"))
    rollout, reward = pulse.of("rollout"), pulse.of("reward")
    assert str(pulse.read()) == "rollout starting; reward starting"
    assert not pulse.read().is_waiting
    pulse.ready()
    assert told == ["ready"]
    assert pulse.read().is_waiting
    rollout.busy("12 episodes")
    rollout.advance(3)
    rollout.version = "v4"
    rollout.counters["tokens"] = 7.0
    reward.waits("trajectories")
    reward.advance()
    beat = pulse.read()
    assert str(beat) == "rollout busy 12 episodes; reward waiting for trajectories"
    assert (beat.progress, beat.is_waiting) == (4, False)
    rollout.advance()
    assert beat.roles["rollout"].progress == 3
    assert Beat.from_json(json.loads(json.dumps(beat.to_json()))) == beat
    assert pulse.of("rollout") is rollout


def test_one_role_needs_no_name() -> None:
    pulse = Pulse()
    pulse.of("trainer").waits("groups of step 4")
    assert str(pulse.read()) == "waiting for groups of step 4"
    assert str(Beat()) == ""
