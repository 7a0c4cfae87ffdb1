"""Made-up traces of GPUs, as CUPTI's collector writes them."""

import dataclasses

import numpy as np
from jax.profiler import ProfileData

from jaxscale.perf.categories import Launch
from jaxscale.perf.trace import Events

MODULE = "jit_train_step"


@dataclasses.dataclass(frozen=True)
class Call:
    """Of a launch on a stream, from `start` to `end` nanoseconds."""

    start: int
    end: int
    name: str
    hlo_op: str = ""
    op_name: str = ""
    stream: int = 7
    module: str = MODULE

    @property
    def launch(self) -> Launch:
        return Launch(self.name, self.hlo_op, self.op_name, self.module)


FORWARD, BACKWARD = (
    "jit(train_step)/jvp()/while/body",
    "jit(train_step)/transpose(jvp())/while/body",
)
LOSS = "jit(train_step)/jvp(loss)/while/body"
# One step of 1000 ns. Computing: 0 - 600 and 700 - 800; the memset and the host's copy follow; the
# rest is idle. Of the collectives one is half behind computing, the other wholly.
STEP = (
    Call(0, 300, "nvjet_sm90_tst_256x128", "custom-call.13", f"{FORWARD}/BSD/dot_general"),
    Call(
        300,
        400,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
        "dot_product_attention_fwd.3",
        f"{FORWARD}/shard_map/dot_product_attention_fwd",
    ),
    Call(400, 450, "loop_add_fusion_1", "loop_add_fusion.1", f"{BACKWARD}/add_any"),
    Call(450, 550, "gemm_fusion_dot_3", "gemm_fusion_dot.3", f"{LOSS}/TD/dot_general"),
    Call(550, 600, "input_reduce_fusion", "input_reduce_fusion.2", f"{LOSS}/reduce_max"),
    Call(700, 800, "loop_add_fusion_5", "loop_add_fusion.5", "jit(train_step)/optimizer/add"),
    Call(800, 820, "Memset", "loop_broadcast_fusion.1", "broadcast.98"),
    Call(
        500,
        700,
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
        "reduce-scatter-start.1",
        "jit(train_step)/x",
        stream=9,
    ),
    Call(
        100,
        350,
        "ncclDevKernel_AllGather_RING_LL",
        "all-gather-start.2",
        "jit(train_step)/y",
        stream=9,
    ),
    Call(790, 840, "MemcpyH2D", stream=11, module=""),
)
PARTS = dict(
    gemm=300,
    attention=100,
    elementwise=50,
    loss_gemm=100,
    loss=50,
    optimizer=100,
    copy=20,
    communication_exposed=100,
    transfer=20,
    idle=160,
)


def moved(calls, by):
    return [dataclasses.replace(each, start=each.start + by, end=each.end + by) for each in calls]


def steps(count, step=STEP):
    """`count` whole steps after the end of another and before the beginning of a next one."""
    whole = [call for number in range(1, count + 1) for call in moved(step, 1000 * number)]
    end_of_another = [call for call in step if call.start >= 600]
    return end_of_another + whole + moved([x for x in step if x.start < 400], 1000 * (count + 1))


def slower(events):
    """A nanosecond becomes a millisecond."""
    return Events(events.launches, events.index_E, events.start_E * 1e6, events.end_E * 1e6)


def events_of(calls):
    launches = list({call.launch: None for call in calls})
    calls = sorted(calls, key=lambda call: call.start)
    return Events(
        tuple(launches),
        np.array([launches.index(call.launch) for call in calls]),
        np.array([call.start for call in calls], float),
        np.array([call.end for call in calls], float),
    )


def write_trace(file, devices, *, num_marked=0):
    """An .xplane.pb of {GPU: calls}: strings by reference, lines by stream.

    num_marked: steps that the host marks.
    """
    planes = [_plane(f"/device:GPU:{device}", calls) for device, calls in devices.items()]
    text = "\n".join([*planes, _host(num_marked)])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def _host(num_marked):
    """Each step has its number, and a call within it that is no step."""
    events = [
        f"""events {{ metadata_id: 1 offset_ps: {1000 * step} duration_ps: 500
            stats {{ metadata_id: 3 int64_value: {step} }} }}
        events {{ metadata_id: 2 offset_ps: {1000 * step} duration_ps: 500 }}"""
        for step in range(num_marked)
    ]
    return f"""planes {{ id: 99 name: "/host:CPU" lines {{ name: "python" {" ".join(events)} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "train" }} }}
        event_metadata {{ key: 2 value {{ id: 2 name: "PjitFunction" }} }}
        stat_metadata {{ key: 3 value {{ id: 3 name: "step_num" }} }} }}"""


def _plane(name, calls):
    strings: dict[str, int] = {}

    def number(text):
        return strings.setdefault(text, len(strings) + 1)

    def event(call):
        stats = {
            "hlo_op": call.hlo_op,
            "name": call.op_name,
            "hlo_module": call.module,
            "tf_op": "XlaModule",
        }
        refs = "".join(
            f"stats {{ metadata_id: {number(key)} ref_value: {number(value)} }}"
            for key, value in stats.items()
            if value
        )
        return (
            f"events {{ metadata_id: {number(call.name)} offset_ps: {call.start * 1000}"
            f" duration_ps: {(call.end - call.start) * 1000} {refs} }}"
        )

    lines = []
    for stream in sorted({call.stream for call in calls}):
        events = " ".join(event(call) for call in calls if call.stream == stream)
        name_of_line = f"Stream #{stream}(Compute)"
        lines.append(f'lines {{ id: {stream} name: "{name_of_line}" timestamp_ns: 0 {events} }}')
    # Another view of the same time, which must not count again.
    again = f"events {{ metadata_id: {number('x')} duration_ps: 9000000 }}"
    lines.append(f'lines {{ id: 900 name: "XLA Ops" {again} }}')
    tables = "".join(
        f'{kind} {{ key: {key} value {{ id: {key} name: "{text}" }} }}\n'
        for text, key in strings.items()
        for kind in ("event_metadata", "stat_metadata")
    )
    return f'planes {{ id: 1 name: "{name}" {" ".join(lines)}\n{tables} }}'
