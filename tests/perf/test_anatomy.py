"""The anatomy of a step: its parts add up, and collectives, loads and launches are told apart."""

import dataclasses
import re

import pytest

from jaxscale.perf.anatomy import anatomy
from jaxscale.perf.anatomy_table import table
from jaxscale.perf.categories import CATEGORIES
from jaxscale.perf.trace import Trace, read
from tests.perf.traces import (
    MODULE,
    PARTS,
    STEP,
    Call,
    events_of,
    moved,
    slower,
    steps,
    write_trace,
)


def test_a_step_is_divided_among_the_categories(trace_file):
    step = anatomy(read(trace_file))
    assert {key: round(value * 1e9, 6) for key, value in step.seconds.items()} == dict.fromkeys(
        CATEGORIES, 0
    ) | PARTS
    assert step.hidden_communication_seconds == pytest.approx(350e-9)
    assert step.exposed_communication_share == pytest.approx(0.1)
    assert (step.module, step.num_steps, len(step.loads)) == (MODULE, 3, 2)
    assert (
        step.step_seconds
        == step.fastest_step_seconds
        == step.slowest_step_seconds
        == pytest.approx(1e-6)
    )


@pytest.mark.parametrize("device", [0, 1])
def test_the_parts_add_up_to_the_step(trace_file, device):
    step = anatomy(read(trace_file), device)
    assert sum(step.seconds.values()) == pytest.approx(step.step_seconds, rel=1e-12)
    assert sum(kind.exposed_seconds for kind in step.collectives) == pytest.approx(
        step.seconds["communication_exposed"]
    )


def test_the_gpu_that_computes_longest_is_looked_at_unless_one_is_named(trace_file):
    trace = read(trace_file)
    assert anatomy(trace).device == 1
    assert anatomy(trace, 0).seconds["gemm"] == pytest.approx(150e-9)
    with pytest.raises(ValueError, match=r"device=2 is not in .*host.xplane.pb, which holds 0, 1"):
        anatomy(trace, 2)


def test_collectives_are_listed_by_kind_with_what_nothing_hid(trace_file):
    gather, scatter = anatomy(read(trace_file)).collectives
    assert (gather.kind, scatter.kind) == ("all-gather", "reduce-scatter")
    assert (gather.calls, gather.seconds, gather.exposed_seconds) == (1, pytest.approx(250e-9), 0)
    assert (scatter.calls, scatter.seconds, scatter.exposed_seconds) == (
        1,
        pytest.approx(200e-9),
        pytest.approx(100e-9),
    )
    assert gather.bytes is scatter.bytes is None


def test_what_a_collective_takes_on_the_fastest_gpu_is_transfer_and_the_rest_is_waiting(tmp_path):
    """GPU 1 starts the reduce-scatter last: the 110 ns that it takes there are the transfer."""
    late = [dataclasses.replace(x, start=590) if "ReduceScatter" in x.name else x for x in STEP]
    trace = read(write_trace(tmp_path / "x.xplane.pb", {0: steps(3), 1: steps(3, late)}))
    gather, scatter = anatomy(trace, 0).collectives
    assert (scatter.seconds, scatter.transfer_seconds) == (
        pytest.approx(200e-9),
        pytest.approx(110e-9),
    )
    assert gather.transfer_seconds == pytest.approx(gather.seconds)
    assert anatomy(trace, 1).collectives[1].transfer_seconds == pytest.approx(110e-9)
    text = table(anatomy(Trace("x", {n: slower(x) for n, x in trace.devices.items()}, {}), 0))
    assert re.search(r"transfer ms +waiting ms\n", text)
    assert re.search(r"reduce-scatter +1 +200.00 +100.00 +- +- +110.00 +90.00\n", text)


@pytest.mark.parametrize("lost", [1500, 2500, 3500])
def test_waiting_is_unknown_where_the_trace_has_one_gpu_or_lost_a_call(lost):
    one = anatomy(Trace("x", {0: events_of(steps(3))}, {})).collectives[1]
    fewer = [x for x in steps(3) if not (x.start == lost and "ReduceScatter" in x.name)]
    trace = Trace("x", {0: events_of(steps(3)), 1: events_of(fewer)}, {})
    gather, scatter = anatomy(trace, 0).collectives
    assert one.transfer_seconds is scatter.transfer_seconds is None
    assert gather.transfer_seconds == pytest.approx(250e-9)
    assert re.search(r"reduce-scatter +1 .* - +-\n", table(anatomy(trace, 0)))
    assert "waiting" not in table(anatomy(Trace("x", {0: events_of(steps(3))}, {})))


def test_the_steps_that_the_host_marked_are_read(tmp_path):
    file = write_trace(tmp_path / "x.xplane.pb", {0: STEP, 1: STEP}, num_marked=2)
    assert [events.num_marked for events in read(file).devices.values()] == [2, 2]
    assert anatomy(read(file)).num_steps == 2


def test_the_load_of_each_gpu_is_told(trace_file):
    trace = read(trace_file)
    step = anatomy(Trace("x", {n: slower(x) for n, x in trace.devices.items()}, {}))
    assert [load.device for load in step.loads] == [0, 1]
    assert [load.compute_seconds for load in step.loads] == pytest.approx([0.55, 0.7])
    # On GPU 0 the gather shows where nothing computes, from 150 to 300.
    assert [load.exposed_communication_seconds for load in step.loads] == pytest.approx([0.25, 0.1])
    assert "0: 550.00 + 250.00; 1: 700.00 + 100.00" in table(step)


def test_another_program_between_two_steps_costs_time_and_makes_no_step():
    evaluation = [Call(900, 980, "nvjet_x", "custom-call.1", module="jit_eval_step")]
    step = anatomy(Trace("x", {0: events_of(steps(3, (*STEP, *evaluation)))}, {}))
    assert (step.module, step.num_steps) == (MODULE, 3)
    assert step.seconds["gemm"] == pytest.approx(380e-9)
    assert step.seconds["idle"] == pytest.approx(80e-9)


def test_without_op_names_launches_are_told_by_their_own_and_the_table_says_so(tmp_path):
    """As CUDA graphs are recorded; without the program loss and optimiser cannot be told."""
    bare = [dataclasses.replace(x, hlo_op="", op_name="", module="") for x in STEP]
    step = anatomy(read(write_trace(tmp_path / "a.xplane.pb", {0: steps(3, bare)})))
    seconds = {key: round(value * 1e9, 6) for key, value in step.seconds.items() if value}
    moves = dict(gemm=400, elementwise=200)
    assert (
        seconds
        == {k: v for k, v in PARTS.items() if k not in ("loss", "loss_gemm", "optimizer")} | moves
    )
    assert step.num_steps == 3
    assert step.unattributed_seconds == pytest.approx(700e-9)
    text = table(step)
    assert "kernels of 70.0% of the step have no op name" in text
    assert "no kernel is under a jax.named_scope 'loss' or 'optimizer'" in text


def test_equal_launches_of_unrolled_layers_are_one_line():
    layers = [
        Call(10 * i, 10 * i + 8, "nvjet_x", f"custom-call.{i}", "jit(f)/jvp()/dot_general")
        for i in range(8)
    ]
    run = [*layers, Call(90, 95, "loop_add_fusion", "loop_add_fusion", "jit(f)/optimizer/add")]
    first, _ = anatomy(Trace("x", {0: events_of([*run, *moved(run, 100)])}, {})).launches
    assert (first.calls, first.num_ops, first.seconds) == (8, 8, pytest.approx(64e-9))
    assert first.category == "gemm"


def test_known_sizes_give_bytes_of_a_step():
    sizes = {(MODULE, "all-gather-start.2"): 1000, (MODULE, "reduce-scatter-start.1"): 500}
    step = anatomy(Trace("x", {0: events_of(steps(3))}, sizes))
    assert [kind.bytes for kind in step.collectives] == [1000, 500]
    assert re.search(
        r"all-gather +1 +0.00 +0.00 +0.000 +4.0", table(step)
    )  # 1000 B in 250 ns: 4 GB/s
