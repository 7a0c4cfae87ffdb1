"""A GPU's time is divided as instant by instant, into whole steps of one program."""

import dataclasses

import numpy as np
import pytest

from jaxscale.perf.categories import Launch
from jaxscale.perf.division import find_steps, partition
from jaxscale.perf.trace import Events
from tests.perf.traces import MODULE, STEP, Call, events_of, moved, steps

GROUPS = ("gemm", "elementwise", "copy", "all-gather", "all-reduce", "transfer")


def divide_by_nanosecond(calls, *, end):
    """The rule, instant by instant from 0 on; calls: (start, end, group)."""
    time, hidden, idle = dict.fromkeys(GROUPS, 0.0), 0, 0
    for now in range(end):
        running = [group for a, b, group in calls if a <= now < b]
        tiers = [
            [x for x in running if x in tier]
            for tier in (GROUPS[:2], GROUPS[2:3], GROUPS[3:5], GROUPS[5:])
        ]
        counted = next(filter(None, tiers), [])
        for group in counted:
            time[group] += 1 / len(counted)
        hidden += bool(tiers[2] and (tiers[0] or tiers[1]))
        idle += not running
    return time, hidden, idle


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_divided_as_instant_by_instant(seed):
    rng = np.random.default_rng(seed)
    start_E = np.sort(rng.integers(-20, 220, 25))
    end_E = start_E + rng.integers(1, 40, 25)
    index_E = rng.integers(0, len(GROUPS), 25)
    launches = tuple(Launch(name, "", "", "") for name in GROUPS)
    events = Events(launches, index_E, start_E.astype(float), end_E.astype(float))
    time, hidden, idle = partition(events, GROUPS, begin=0.0, end=200.0)
    calls = zip(start_E, end_E, [GROUPS[i] for i in index_E], strict=True)
    expected = divide_by_nanosecond(list(calls), end=200)
    assert (time, hidden, idle) == (pytest.approx(expected[0]), expected[1], expected[2])
    assert sum(time.values()) + idle == pytest.approx(200, rel=1e-12)


def step_lengths(calls):
    return np.diff(find_steps(events_of(calls))[1]).tolist()


def test_runs_that_the_trace_cut_off_do_not_count():
    assert step_lengths(steps(3)) == [1000, 1000, 1000]
    # Only the ends are cut: two runs give the one step between them.
    assert step_lengths([*STEP, *moved(STEP, 1000)]) == [1000]


def test_the_time_until_the_next_run_belongs_to_the_step():
    assert step_lengths([*STEP, *moved(STEP, 1000), *moved(STEP, 5000)]) == [1000, 4000]


def test_one_run_lasts_from_its_first_call_to_the_end_of_its_last():
    assert step_lengths(STEP) == [820]  # the host's copy belongs to no program


def test_steps_that_nothing_tells_apart_are_as_many_as_the_host_marked():
    """Of two runs of 20 launches each the profiler lost another quarter."""
    names = [f"loop_{i}" for i in range(20)]
    kept = [*names[:15], *names[5:]]
    calls = [Call(50 * i, 50 * i + 50, name, name) for i, name in enumerate(kept)]
    assert step_lengths(calls) == [1500]
    marked = dataclasses.replace(events_of(calls), num_marked=2)
    assert np.diff(find_steps(marked)[1]).tolist() == [750, 750]
    # Where a launch tells them apart it does.
    marked = dataclasses.replace(events_of(steps(3)), num_marked=2)
    assert np.diff(find_steps(marked)[1]).tolist() == [1000, 1000, 1000]


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_microbatch_is_no_step(num_runs):
    """200 launches four times, then 12 of the optimiser: of the launches a microbatch has 94%."""
    body = [Call(i, i + 1, f"loop_{i}", f"body.{i}") for i in range(200)]
    optimizer = [Call(800 + i, 801 + i, f"loop_{i}", f"optimizer.{i}") for i in range(12)]
    run = [call for number in range(4) for call in moved(body, 200 * number)] + optimizer
    lengths = step_lengths(
        [call for number in range(num_runs) for call in moved(run, 1000 * number)]
    )
    assert lengths == ([812] if num_runs == 1 else [1000] * (num_runs - 1))


def test_runs_in_which_not_the_same_launches_got_a_name_are_steps_all_the_same():
    """Of 20 launches of a graph, the names are known in one run and unknown in the next."""
    unnamed = [Launch(f"loop_{i}", "", "", MODULE, "command_buffer_1") for i in range(20)]
    named = [
        dataclasses.replace(launch, hlo_op=f"loop.{i}", op_name="a/b")
        for i, launch in enumerate(unnamed)
    ]
    start_E = np.arange(80.0)
    index_E = np.concatenate([np.arange(20) + 20 * (run % 2) for run in range(4)])
    events = Events((*unnamed, *named), index_E, start_E, start_E + 1)
    assert np.diff(find_steps(events)[1]).tolist() == [20, 20, 20]
