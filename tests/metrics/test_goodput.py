"""Where the wall time of a run goes; its phases sum to it."""

import json

import pytest

from jaxscale.metrics.goodput import PHASES, Goodput, read


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def step(seconds, *, waited=0.0, skipped=0):
    return {"step_seconds": seconds, "data_wait_seconds": waited, "skipped": skipped}


def test_the_phases_sum_to_the_wall_time_and_steps_alone_are_good():
    clock = Clock()
    goodput = Goodput(clock=clock)
    clock.now += 10
    goodput.add("compile", 6.0)
    goodput.begin_steps()
    clock.now += 8
    goodput.add_step(step(4.0, waited=1.0))
    goodput.add_step(step(2.0, skipped=1))
    goodput.add("checkpoint", 1.5)
    record = goodput.record()
    assert record["wall_seconds"] == 18 == sum(record[f"{phase}_seconds"] for phase in PHASES)
    assert (record["start_up_seconds"], record["compile_seconds"]) == (4, 6)
    assert (record["steps_seconds"], record["data_seconds"], record["skipped_seconds"]) == (3, 1, 2)
    assert record["other_seconds"] == 0.5 and record["goodput"] == pytest.approx(3 / 18)
    assert goodput.describe().startswith("goodput 16.7%: 3.0 s of steps in 18.0 s; compile 6.0 s,")


def test_a_restart_costs_the_time_since_the_checkpoint_that_it_goes_on_from(tmp_path):
    clock = Clock()
    first = Goodput(clock=clock)
    clock.now += 5
    first.add_step(step(5.0))
    lines: list[dict[str, object]] = [{"step": 3, **first.record()}]
    clock.now += 5
    first.add_step(step(5.0))
    lines += [
        {"step": 4, "loss": 1.0},
        {"step": 6, **first.record()},
        {"goodput": "?"},
        {"step": 2},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"goodput": [\n')
    before = read(path, step=5)
    assert before is not None and before["step"] == 3
    clock.now = 1100.0
    second = Goodput(before=before, clock=clock)
    clock.now += 2
    record = second.record()
    assert (record["steps_seconds"], record["restart_seconds"]) == (5, 95)
    assert record["wall_seconds"] == 102 and record["other_seconds"] == 2
    assert read(path, step=2) is None and read(tmp_path / "none", step=9) is None


def test_a_clock_that_was_set_back_makes_no_time_negative():
    clock = Clock()
    before = Goodput(clock=clock).record() | {"time": 5000.0}
    goodput = Goodput(before=before, clock=clock)
    clock.now -= 500
    goodput.begin_steps()
    assert min(goodput.record()[f"{phase}_seconds"] for phase in PHASES) == 0.0


def test_steps_that_the_run_went_back_over_are_lost():
    clock = Clock()
    goodput = Goodput(clock=clock)
    clock.now += 6
    goodput.add_step(step(6.0))
    goodput.lose_steps(4.0)
    record = goodput.record()
    assert (record["steps_seconds"], record["restart_seconds"]) == (2, 4)
