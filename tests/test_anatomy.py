"""Step-time anatomy: the parts of a step add up, each kernel counts once and in its row, bad input is told plainly."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.perf.anatomy import anatomy, find_steps, partition, plot, read, table
from jaxscale.perf.categories import CATEGORIES, Kernel, classify, collective_kind
from jaxscale.perf.graph_names import programs
from jaxscale.perf.trace import Events, Trace

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "anatomy.py"
MODULE = "jit_train_step"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel on a stream, from `start` to `end` nanoseconds."""

    start: int
    end: int
    name: str
    hlo_op: str = ""
    op_name: str = ""
    stream: int = 7
    module: str = MODULE


# One step of 1000 ns. Computing: 0 - 600 and 700 - 800; the memset and the host's copy follow; idle: the rest.
STEP = (
    Launch(0, 300, "nvjet_sm90_tst_256x128", "custom-call.13", "jit(train_step)/jvp()/while/body/BSD/dot_general"),
    Launch(300, 400, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "dot_product_attention_fwd.3",
           "jit(train_step)/jvp()/while/body/shard_map/dot_product_attention_fwd"),
    Launch(400, 450, "loop_add_fusion_1", "loop_add_fusion.1", "jit(train_step)/transpose(jvp())/while/body/add_any"),
    Launch(450, 550, "gemm_fusion_dot_3", "gemm_fusion_dot.3", "jit(train_step)/jvp(loss)/while/body/TD/dot_general"),
    Launch(550, 600, "input_reduce_fusion", "input_reduce_fusion.2", "jit(train_step)/jvp(loss)/while/body/reduce_max"),
    Launch(700, 800, "loop_add_fusion_5", "loop_add_fusion.5", "jit(train_step)/optimizer/add"),
    Launch(800, 820, "Memset", "loop_broadcast_fusion.1", "broadcast.98"),
    # Half behind computing, half not.
    Launch(500, 700, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce-scatter-start.1", "jit(train_step)/x",
           stream=9),
    Launch(100, 350, "ncclDevKernel_AllGather_RING_LL", "all-gather-start.2", "jit(train_step)/y", stream=9),
    Launch(790, 840, "MemcpyH2D", stream=11, module=""),
)  # fmt: skip
PARTS = dict(
    gemm=300, attention=100, elementwise=50, loss_gemm=100, loss=50, optimizer=100, copy=20, communication_exposed=100,
    transfer=20, idle=160,
)  # fmt: skip


def moved(launches, by):
    return [
        dataclasses.replace(each, start=each.start + by, end=each.end + by) for each in launches
    ]


def steps(count, step=STEP):
    """`count` whole steps after the end of another and before the beginning of a next one."""
    whole = [launch for number in range(1, count + 1) for launch in moved(step, 1000 * number)]
    return (
        [x for x in step if x.start >= 600]
        + whole
        + moved([x for x in step if x.start < 400], 1000 * (count + 1))
    )


def write_trace(file, devices):
    """An .xplane.pb of {GPU: launches}, as CUPTI's collector writes it: strings by reference, lines by stream."""
    planes = [_plane(f"/device:GPU:{device}", launches) for device, launches in devices.items()]
    text = "\n".join([*planes, 'planes { id: 99 name: "/host:CPU" }'])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def _plane(name, launches):
    strings: dict[str, int] = {}

    def number(text):
        return strings.setdefault(text, len(strings) + 1)

    lines = []
    for stream in sorted({each.stream for each in launches}):
        events = []
        for each in (each for each in launches if each.stream == stream):
            stats = {
                "hlo_op": each.hlo_op,
                "name": each.op_name,
                "hlo_module": each.module,
                "tf_op": "XlaModule",
            }
            refs = "".join(
                f"stats {{ metadata_id: {number(key)} ref_value: {number(value)} }}"
                for key, value in stats.items()
                if value
            )
            events.append(
                f"events {{ metadata_id: {number(each.name)} offset_ps: {each.start * 1000}"
                f" duration_ps: {(each.end - each.start) * 1000} {refs} }}"
            )
        lines.append(
            f'lines {{ id: {stream} name: "Stream #{stream}(Compute)" timestamp_ns: 0 {" ".join(events)} }}'
        )
    # Another view of the same time, which must not count again.
    lines.append(
        f'lines {{ id: 900 name: "XLA Ops" events {{ metadata_id: {number("x")} duration_ps: 9000000 }} }}'
    )
    tables = "".join(
        f'{kind} {{ key: {key} value {{ id: {key} name: "{text}" }} }}\n'
        for text, key in strings.items()
        for kind in ("event_metadata", "stat_metadata")
    )
    return f'planes {{ id: 1 name: "{name}" {" ".join(lines)}\n{tables} }}'


def events_of(launches):
    kernels = list({Kernel(x.name, x.hlo_op, x.op_name, x.module): None for x in launches})
    launches = sorted(launches, key=lambda x: x.start)
    index = [kernels.index(Kernel(x.name, x.hlo_op, x.op_name, x.module)) for x in launches]
    return Events(
        tuple(kernels),
        np.array(index),
        np.array([x.start for x in launches], float),
        np.array([x.end for x in launches], float),
    )


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    """GPU 1 computes longest; GPU 0 waits in its reduce-scatter."""
    waiting = [dataclasses.replace(x, end=150) if x.name.startswith("nvjet") else x for x in STEP]
    file = tmp_path_factory.mktemp("trace") / "plugins" / "profile" / "2026" / "host.xplane.pb"
    return write_trace(file, {0: steps(3, waiting), 1: steps(3)})


@pytest.fixture(scope="module")
def cpu_profile(tmp_path_factory):
    """What jax.profiler records of 8 CPU devices that gather 8 x 64 x 32 float32 and sum 96 x 32."""
    folder = tmp_path_factory.mktemp("cpu")
    mesh = jax.make_mesh((8,), ("x",))

    def local(a):
        return jax.lax.all_gather(a, "x", tiled=True), jax.lax.psum(jnp.tile(a[:32], (3, 1)), "x")

    f = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P("x"), out_specs=(P(None), P(None)), check_vma=False
        )
    )
    a = jax.device_put(jnp.ones((8 * 64, 32), jnp.float32), NamedSharding(mesh, P("x")))
    jax.block_until_ready(f(a))
    with jax.profiler.trace(folder):
        jax.block_until_ready(f(a))
    return folder


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


def slower(events):
    """A nanosecond becomes a millisecond."""
    return Events(events.kernels, events.index_E, events.start_E * 1e6, events.end_E * 1e6)


def test_the_load_of_each_gpu_is_told(trace_file):
    trace = read(trace_file)
    step = anatomy(Trace("x", {n: slower(x) for n, x in trace.devices.items()}, {}))
    assert [load.device for load in step.loads] == [0, 1]
    assert [load.compute_seconds for load in step.loads] == pytest.approx([0.55, 0.7])
    # On GPU 0 the gather shows where nothing computes, from 150 to 300.
    assert [load.exposed_communication_seconds for load in step.loads] == pytest.approx([0.25, 0.1])
    assert "0: 550.00 + 250.00; 1: 700.00 + 100.00" in table(step)


GROUPS = ("gemm", "elementwise", "copy", "all-gather", "all-reduce", "transfer")


def divide_by_nanosecond(start_E, end_E, group_E, begin, end):
    """The rule, instant by instant."""
    time, hidden, idle = dict.fromkeys(GROUPS, 0.0), 0, 0
    for now in range(begin, end):
        running = [
            group for a, b, group in zip(start_E, end_E, group_E, strict=True) if a <= now < b
        ]
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
    kernels = tuple(Kernel(name, "", "", "") for name in GROUPS)
    events = Events(kernels, index_E, start_E.astype(float), end_E.astype(float))
    time, hidden, idle = partition(events, GROUPS, begin=0.0, end=200.0)
    expected = divide_by_nanosecond(start_E, end_E, [GROUPS[i] for i in index_E], 0, 200)
    assert (time, hidden, idle) == (pytest.approx(expected[0]), expected[1], expected[2])
    assert sum(time.values()) + idle == pytest.approx(200, rel=1e-12)


# Kernel, HLO operation and op name as XLA gives them for H100 (jax 0.11.2), and the row.
KINDS = {
    ("nvjet_sm90_tst_192x192_64x4_1x2", "custom-call.17", "jit(f)/jvp()/BSF,DF->BSD/dot_general"): "gemm",
    ("nvjet_tst_128x256", "dynamic_slice_fusion.3", ""): "gemm",
    ("gemm_fusion_dot_12_0", "gemm_fusion_dot.12", ""): "gemm",
    ("void cutlass::device_kernel<...>", "custom-call.4", ""): "gemm",
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "cublas-lt-matmul.9", ""): "gemm",
    ("void cublasLt::splitKreduce_kernel<32, 16>", "custom-call.1", ""): "gemm",
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "custom-call.2", ""): "attention",
    ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "", ""): "attention",
    ("void cudnn::fusion::convert_dq_to_16bits<true>", "", ""): "attention",
    ("Memset", "dot_product_attention_bwd.3", "jit(f)/shard_map/dot_product_attention_bwd"): "attention",
    ("loop_select_fusion_2", "loop_select_fusion.2", "jit(f)/jvp(attention)/select_n"): "attention",
    ("loop_add_fusion_3", "loop_add_fusion.3", "jit(f)/transpose(jvp())/checkpoint/add_any"): "elementwise",
    ("wrapped_convert", "wrapped_convert", "jit(f)/jvp()/shard_map/convert_element_type"): "elementwise",
    ("input_concatenate_fusion_1", "input_concatenate_fusion.1", "jit(f)/jvp()/concatenate"): "elementwise",
    ("fusion_215", "fusion.215", "jit(f)/jvp()/convert_element_type"): "elementwise",
    ("loop_dynamic_update_slice_fusion_4", "loop_dynamic_update_slice_fusion.4", "jit(f)/dynamic_update_slice"): "copy",
    ("loop_broadcast_fusion_8", "loop_broadcast_fusion.8", "broadcast.98"): "copy",
    ("wrapped_transpose", "wrapped_transpose", "jit(f)/transpose(jvp())/transpose"): "copy",
    ("MemcpyD2D", "copy.229", ""): "copy",
    ("MemcpyD2H", "", ""): "transfer",
    ("nvjet_tst_128x256", "custom-call.27", "jit(f)/transpose(jvp(loss))/while/body/dot_general"): "loss_gemm",
    ("input_reduce_fusion", "input_reduce_fusion", "loss/while/body/reduce_max"): "loss",
    ("loop_add_fusion", "loop_add_fusion", "jit(f)/(jvp(loss)/mul:transpose(jvp())/add)"): "loss",
    # XLA's annotations end a name at its first comma, here that of TD,DV->TV.
    ("nvjet_tst_128x256", "dynamic_slice_fusion.1", "jit(f)/jvp(loss)/shard_map/while/body/eval_jaxpr/TD"): "loss_gemm",
    ("loop_multiply_fusion", "loop_multiply_fusion", "jit(f)/lossy/my_loss/mul"): "elementwise",
    ("nvjet_tst_128x256", "custom-call.5", "jit(f)/optimizer/dot_general"): "optimizer",
    ("input_scatter_fusion", "input_scatter_fusion", "jit(f)/transpose(jvp(embedding))/scatter-add"): "embedding",
    ("ncclDevKernel_AllGather_RING_LL(Args<4096ul>)", "all-gather-start.5", "jit(f)/loss/x"): "communication",
    ("MemcpyD2D", "all_to_all.7.2", ""): "communication",
}  # fmt: skip


@pytest.mark.parametrize("names", KINDS)
def test_a_kernel_counts_in_its_row(names):
    name, hlo_op, op_name = names
    assert classify(Kernel(name, hlo_op, op_name, MODULE)) == KINDS[names]


@pytest.mark.parametrize(
    ("name", "hlo_op", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "", "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "psum.66.2", "all-reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter.15.1", "reduce-scatter"),
        ("ncclDevKernel_SendRecv", "all_to_all.7.2", "all-to-all"),
        ("ncclDevKernel_SendRecv", "ragged-all-to-all-start", "ragged-all-to-all"),
        ("ncclDevKernel_SendRecv", "ppermute.2", "collective-permute"),
        ("ncclDevKernel_SendRecv", "", "send and receive"),
        ("ncclNew", "", "other"),
    ],
)
def test_a_collective_is_told_by_its_operation_or_else_its_kernel(name, hlo_op, kind):
    assert classify(Kernel(name, hlo_op, "", MODULE)) == "communication"
    assert collective_kind(Kernel(name, hlo_op, "", MODULE)) == kind


def step_lengths(launches):
    return np.diff(find_steps(events_of(launches))[1]).tolist()


def test_runs_that_the_trace_cut_off_do_not_count():
    assert step_lengths(steps(3)) == [1000, 1000, 1000]
    # Only the ends are cut: two runs give the one step between them.
    assert step_lengths([*STEP, *moved(STEP, 1000)]) == [1000]


def test_the_time_until_the_next_run_belongs_to_the_step():
    assert step_lengths([*STEP, *moved(STEP, 1000), *moved(STEP, 5000)]) == [1000, 4000]


def test_one_run_lasts_from_its_first_kernel_to_the_end_of_its_last():
    assert step_lengths(STEP) == [820]  # the host's copy belongs to no program


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_microbatch_is_no_step(num_runs):
    """200 kernels four times, then 12 of the optimiser: of the kernels a microbatch has 94%."""
    body = [Launch(i, i + 1, f"loop_{i}", f"body.{i}") for i in range(200)]
    optimizer = [Launch(800 + i, 801 + i, f"loop_{i}", f"optimizer.{i}") for i in range(12)]
    run = [launch for number in range(4) for launch in moved(body, 200 * number)] + optimizer
    lengths = step_lengths(
        [launch for number in range(num_runs) for launch in moved(run, 1000 * number)]
    )
    assert lengths == ([812] if num_runs == 1 else [1000] * (num_runs - 1))


def test_runs_in_which_not_the_same_kernels_got_a_name_are_steps_all_the_same():
    """Of 20 kernels that a graph launches, the names are known in one run and unknown in the next."""
    kernels = [Kernel(f"loop_{i}", "", "", MODULE, "command_buffer_1") for i in range(20)]
    named = [
        dataclasses.replace(kernel, hlo_op=f"loop.{i}", op_name="a/b")
        for i, kernel in enumerate(kernels)
    ]
    start_E = np.arange(80.0)
    index_E = np.concatenate([np.arange(20) + 20 * (run % 2) for run in range(4)])
    assert np.diff(
        find_steps(Events((*kernels, *named), index_E, start_E, start_E + 1))[1]
    ).tolist() == [20, 20, 20]


def test_another_program_between_two_steps_costs_time_and_makes_no_step():
    evaluation = [Launch(900, 980, "nvjet_x", "custom-call.1", module="jit_eval_step")]
    step = anatomy(Trace("x", {0: events_of(steps(3, (*STEP, *evaluation)))}, {}))
    assert (step.module, step.num_steps) == (MODULE, 3)
    assert step.seconds["gemm"] == pytest.approx(380e-9)
    assert step.seconds["idle"] == pytest.approx(80e-9)


def test_without_op_names_kernels_are_told_by_their_own_and_the_table_says_so(tmp_path):
    """As the kernels of CUDA graphs are recorded; without the program the loss and the optimiser cannot be told."""
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


def test_equal_kernels_of_unrolled_layers_are_one_line():
    layers = [
        Launch(10 * i, 10 * i + 8, "nvjet_x", f"custom-call.{i}", "jit(f)/jvp()/dot_general")
        for i in range(8)
    ]
    run = [*layers, Launch(90, 95, "loop_add_fusion", "loop_add_fusion", "jit(f)/optimizer/add")]
    first, _ = anatomy(Trace("x", {0: events_of([*run, *moved(run, 100)])}, {})).kernels
    assert (first.calls, first.num_ops, first.seconds) == (8, 8, pytest.approx(64e-9))
    assert first.category == "gemm"


def test_the_sizes_of_messages_are_read_from_the_programs_in_a_trace(cpu_profile):
    (file,) = cpu_profile.rglob("*.xplane.pb")
    (program,) = (
        x for x in programs(file.read_bytes(), range(2**31)).values() if x.name == "jit_local"
    )
    assert set(program.message_bytes.values()) == {8 * 64 * 32 * 4, 96 * 32 * 4}


def test_known_sizes_give_bytes_of_a_step():
    sizes = {(MODULE, "all-gather-start.2"): 1000, (MODULE, "reduce-scatter-start.1"): 500}
    step = anatomy(Trace("x", {0: events_of(steps(3))}, sizes))
    assert [kind.bytes for kind in step.collectives] == [1000, 500]
    assert re.search(
        r"all-gather +1 +0.00 +0.00 +0.000 +4.0", table(step)
    )  # 1000 B in 250 ns: 4 GB/s


def rows(text):
    """{label: numbers} of the table's first part."""
    return {
        match[1].strip(): [
            float(x) for x in re.findall(r"[+-]?[\d,]+\.\d+", match[2].replace(",", ""))
        ]
        for match in re.finditer(r"^(\D{29,30}?)((?: *[+-]?[\d,.]+%?)+)$", text, re.MULTILINE)
    }


def test_two_traces_stand_side_by_side_with_their_difference():
    slow = [dataclasses.replace(x, start=x.start * 10**6, end=x.end * 10**6) for x in steps(3)]
    fast = [
        dataclasses.replace(x, start=x.start * 10**6 // 2, end=x.end * 10**6 // 2) for x in steps(3)
    ]
    text = table(
        [anatomy(Trace(name, {0: events_of(x)}, {})) for name, x in (("a", slow), ("b", fast))],
        top=2,
    )
    found = rows(text)
    assert found["matrix products"] == [300, 30, 150, 30, -150, -50]
    assert found["the step"] == [1000, 100, 500, 100, -500, -50]
    assert found["embedding"] == [0, 0, 0, 0, 0]
    assert "[1] a: jit_train_step on GPU 0 of 1, 3 steps of 1,000.00 to 1,000.00 ms" in text
    assert text.count("nvjet_sm90_tst_256x128") == 2  # --top lines of each


def test_a_picture_shows_every_trace_and_category(trace_file, tmp_path):
    from matplotlib import image

    trace = read(trace_file)
    plot(anatomy(trace), tmp_path / "one.png")
    plot([anatomy(trace), anatomy(trace, 0)], tmp_path / "two.png")
    one, two = (image.imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[1] > one.shape[1]
    colors = {
        tuple(color) for color in (one[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()
    }
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colors  # matplotlib's first three


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(
    trace_file, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxscale\[plot\]'"):
        plot(anatomy(read(trace_file)), tmp_path / "x.png")


def test_the_newest_trace_of_a_folder_counts(tmp_path):
    for age, name in ((10, "new"), (1000, "old")):
        file = write_trace(
            tmp_path / name / "host.xplane.pb", {0: steps(1 if name == "new" else 2)}
        )
        os.utime(file, (10**9 - age, 10**9 - age))
    assert anatomy(read(tmp_path)).num_steps == 1
    assert anatomy(read(tmp_path / "old")).num_steps == 2


def test_a_trace_of_a_cpu_is_refused_with_how_to_get_another(cpu_profile):
    with pytest.raises(ValueError, match=r"xplane.pb has no GPU.*--config.profile.steps=3"):
        read(cpu_profile)


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        read(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"holds no \*.xplane.pb"):
        read(tmp_path)
    (tmp_path / "x.xplane.pb").write_text("hello world")
    with pytest.raises(ValueError, match=r"x.xplane.pb is not a profile"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no kernels: CUPTI recorded none"):
        read(write_trace(tmp_path / "y.xplane.pb", {0: []}))


def script(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_script_prints_a_table_and_draws(trace_file, tmp_path):
    done = script(
        trace_file.parents[2], trace_file, "--top=3", "--device=0", f"--png={tmp_path / 'x.png'}"
    )
    assert done.returncode == 0, done.stderr
    assert "reduce-scatter" in done.stdout and "[2] - [1] ms" in done.stdout
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_prints_json(trace_file):
    done = script(trace_file, "--json", "--top=2")
    record = json.loads(done.stdout)
    assert record["exposed_communication_share"] == pytest.approx(0.1)
    assert sum(record["seconds"].values()) == pytest.approx(record["step_seconds"])
    assert len(record["kernels"]) == 2


@pytest.mark.parametrize(
    "arguments", [[], ["absent"], ["--device=7"]], ids=["none", "absent", "device"]
)
def test_the_script_tells_a_mistake_in_one_line(trace_file, arguments):
    done = script(*arguments, *[trace_file] * ("--device=7" in arguments))
    assert done.returncode == 2
    assert re.fullmatch(r"error: .+\n", done.stderr)
    assert done.stdout == ""
