"""Names of what CUDA graphs launched: what the schedule tells is right, the rest has none."""

import random
import re

import pytest

from jaxscale.perf.anatomy import anatomy
from jaxscale.perf.categories import Launch
from jaxscale.perf.graph_names import follow, owners, with_names
from jaxscale.perf.programs import programs
from jaxscale.perf.trace import read

MODULE = "jit_train_step"
NUMBER = 2014


def encode(fields):
    """A protobuf message of {number: int, text, message, or a list of such}.

    Every length and number is below 2**21.
    """

    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    out = b""
    for number, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, tuple):  # packed numbers
                value = b"".join(map(varint, value))
            elif isinstance(value, dict):
                value = encode(value)
            elif isinstance(value, str):
                value = value.encode()
            if isinstance(value, int):
                out += varint(number << 3) + varint(value)
            else:
                out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def metadata(*modules):
    """The plane of a trace that holds the programs."""
    return {
        2: "/host:metadata",
        4: [{1: i, 2: {1: i, 5: {1: 1, 6: {1: each}}}} for i, each in enumerate(modules, 1)],
    }


def line(name, op_name="", *, opcode="fusion", **others):
    return (
        dict(
            name=name, op_name=op_name, opcode=opcode, target="", shared="", called=(), settings=""
        )
        | others
    )


def _instruction(x, *, number):
    return {
        1: x["name"],
        2: x["opcode"],
        7: {2: x["op_name"], 12: x["shared"]},
        28: x["target"],
        35: number,
        38: x["called"],
        43: x["settings"],
    }


def module(*computations, number=NUMBER, name=MODULE):
    """The first computation is the entry. Each lists its instructions in the reverse order."""
    instructions = [
        [_instruction(x, number=100 * c + i) for i, x in enumerate(lines)]
        for c, lines in enumerate(computations, 1)
    ]
    orders = [{1: c, 2: {1: tuple(x[35] for x in each)}} for c, each in enumerate(instructions, 1)]
    return {
        1: name,
        3: [{1: f"c{c}", 2: each[::-1], 5: c} for c, each in enumerate(instructions, 1)],
        5: number,
        6: 1,
        7: {1: orders},
    }


GEMM, FMHA = "__cublas$lt$matmul", "__cudnn$fmhaSoftmaxBackward"
ENTRY = (
    line("param.1", opcode="parameter"),
    line("input_gather_fusion", "jit(f)/jvp(embedding)/gather"),
    line("all-gather-start.1", opcode="async-start", called=(5,)),
    line(
        "custom-call.1", "jit(f)/jvp()/BSD,DF->BSF/dot_general", opcode="custom-call", target=GEMM
    ),
    line("loop_mul_fusion.1", "jit(f)/jvp()/mul", shared="loop_mul_fusion.1"),
    line("all-gather-done.1", opcode="async-done"),
    line(
        "custom-call.2", "jit(f)/jvp()/BSF,DF->BSD/dot_general", opcode="custom-call", target=GEMM
    ),
    line(
        "custom-call.3", "jit(f)/jvp()/BSD,DNH->BSNH/dot_general", opcode="custom-call", target=GEMM
    ),
    line("loop_mul_fusion.2", "jit(f)/jvp()/mul", shared="loop_mul_fusion.1"),
    line(
        "attention.1",
        "jit(f)/jvp(attention)/dot_product_attention_bwd",
        opcode="custom-call",
        target=FMHA,
    ),
    line("wrapped_slice.1", "jit(f)/jvp()/slice"),
    line(
        "while.1", opcode="while", called=(2, 3), settings='{"known_trip_count":{"n":"3"},"x":"0"}'
    ),
    line("dynamic_slice_fusion.1", called=(4,)),
    line("loop_sub_fusion", "jit(f)/optimizer/sub"),
)
BODY = (
    line(
        "custom-call.9",
        "jit(f)/jvp(loss)/while/body/TD,DV->TV/dot_general",
        opcode="custom-call",
        target=GEMM,
    ),
    line("fusion-start.3", opcode="async-start", called=(6,)),
    line("input_reduce_fusion.9", "jit(f)/jvp(loss)/while/body/reduce_max"),
)
CONDITION = (line("loop_compare_fusion", "jit(f)/jvp(loss)/while/cond/lt"),)
# A product that writes into its place of a larger array.
SLICED = (
    line("param.4", opcode="parameter"),
    line(
        "custom-call.4",
        "jit(f)/transpose(jvp())/TF,TD->FD/dot_general",
        opcode="custom-call",
        target=GEMM,
    ),
    line("bitcast.4", opcode="bitcast"),
)
GATHER = (line("all-gather.1", "jit(f)/jvp()/convert_element_type", opcode="all-gather"),)
COPY = (line("wrapped_copy.3", "jit(f)/jvp(loss)/while/body/dynamic_slice"),)
STEP = module(ENTRY, BODY, CONDITION, SLICED, GATHER, COPY)

TURN = (
    ("nvjet_v", "custom-call.9"),
    ("memcpy128", "wrapped_copy.3"),
    ("input_reduce_fusion_9", "input_reduce_fusion.9"),
)
# Name and instruction.
RUN = (
    ("input_gather_fusion", "input_gather_fusion"),
    ("Memset 0", "custom-call.1"),
    ("nvjet_a", "custom-call.1"),
    ("loop_mul_fusion_1", "loop_mul_fusion.1"),
    ("nvjet_a", "custom-call.2"),
    ("void cublasLt::splitKreduce_kernel<32>", "custom-call.2"),
    ("Memset 0", "custom-call.3"),
    ("nvjet_b", "custom-call.3"),
    ("loop_mul_fusion_1", "loop_mul_fusion.2"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention.1"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention.1"),
    ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention.1"),
    ("memcpy32_post", "wrapped_slice.1"),
    *TURN * 3,
    ("nvjet_c", "dynamic_slice_fusion.1"),
    ("loop_sub_fusion", "loop_sub_fusion"),
)
OP_NAMES = {x["name"]: x["op_name"] for x in (*ENTRY, *BODY, *COPY)} | {
    "dynamic_slice_fusion.1": SLICED[1]["op_name"]
}


def program(*modules):
    return programs(encode({1: [metadata(*modules or [STEP])]}), {NUMBER})[NUMBER]


def in_graph(name):
    return Launch(name, "", "", MODULE, graph="command_buffer_1")


def found(launches, step=None):
    """Instructions and op names of launches, some of which a graph hides."""
    step = step or program()
    owner = dict(owners(step, launches))
    return [
        (x.hlo_op, x.op_name)
        for x in (with_names(step, each, owner=owner.get(i)) for i, each in enumerate(launches))
    ]


def truth(run):
    return [(hlo_op, OP_NAMES[hlo_op]) for _, hlo_op in run]


def test_the_launches_of_a_graph_belong_to_the_instructions_of_the_schedule_in_order():
    run = RUN * 3
    assert found([in_graph(name) for name, _ in run]) == truth(run)


@pytest.mark.parametrize("seed", range(10))
def test_with_some_launches_outside_graphs_as_well(seed):
    rng = random.Random(seed)
    outside = {hlo_op for _, hlo_op in RUN if rng.random() < 0.5}
    run = RUN * 3
    launches = [
        Launch(name, op, "cut/off", MODULE) if op in outside else in_graph(name) for name, op in run
    ]
    assert found(launches) == truth(run)


@pytest.mark.parametrize("cut", range(len(RUN)))
def test_a_trace_may_begin_anywhere_in_a_step(cut):
    run = (RUN * 3)[cut:]
    known = next(
        i for i, (name, _) in enumerate(run) if "fusion_" in name or name.endswith("_fusion")
    )
    assert found([in_graph(name) for name, _ in run])[known:] == truth(run)[known:]


@pytest.mark.parametrize("seed", range(30))
def test_of_a_trace_that_lost_launches_what_is_named_is_named_right(seed):
    rng = random.Random(seed)
    run = [each for each in RUN * 4 if rng.random() < 0.9]
    names = [op_name for _, op_name in found([in_graph(name) for name, _ in run])]
    told = [(name, right) for name, (_, right) in zip(names, truth(run), strict=True) if name]
    assert told and all(name == right for name, right in told)


def test_where_calls_and_launches_are_not_equally_many_both_stay_unnamed():
    at = RUN.index(("nvjet_b", "custom-call.3"))
    run = (*RUN[:at], ("nvjet_extra", "custom-call.3"), *RUN[at:])
    names = found([in_graph(name) for name, _ in run * 2])[len(run) :]
    is_between = [at - 3 <= i <= at + 1 for i in range(len(run))]
    assert names == [
        ("", "") if between else each for each, between in zip(truth(run), is_between, strict=True)
    ]


def test_a_fill_that_may_be_an_instruction_of_its_own_stays_unnamed():
    zeros = line("loop_broadcast_fusion.1", "jit(f)/optimizer/broadcast_in_dim")
    step = program(module(ENTRY[:2] + (zeros,) + ENTRY[2:], BODY, CONDITION, SLICED, GATHER, COPY))
    names = found([in_graph(name) for name, _ in RUN * 2], step)
    assert names[: len(RUN)] == [("", "") if i == 1 else each for i, each in enumerate(truth(RUN))]


def test_a_fill_before_anything_but_a_call_of_a_library_stays_unnamed():
    at = RUN.index(("memcpy32_post", "wrapped_slice.1"))
    names = found([in_graph(name) for name, _ in (*RUN[:at], ("Memset 0", ""), *RUN[at:])])
    assert names == [*truth(RUN[:at]), ("", ""), *truth(RUN[at:])]


def test_a_launch_that_shows_no_place_has_the_op_name_that_all_its_instructions_share():
    fusions = [
        line(f"loop_fusion.{i}", f"jit(f)/layer_{i}/mul", shared="loop_fusion.1") for i in (1, 2)
    ]
    others = [
        line(f"loop_other.{i}", f"jit(f)/{scope}/mul", shared="loop_other.1")
        for i, scope in ((1, "a"), (2, "b"))
    ]
    step = program(module((*fusions, *others)))
    (hlo_op, op_name), unknown = (
        (x.hlo_op, x.op_name)
        for x in (
            with_names(step, in_graph(n), owner=None) for n in ("loop_fusion_1", "loop_other_1")
        )
    )
    assert (hlo_op, re.sub(r"\d", "", op_name)) == ("", "jit(f)/layer_/mul")
    assert unknown == ("", "")


def test_the_name_of_the_program_is_whole_where_the_trace_cuts_it():
    launch = Launch("nvjet_a", "custom-call.1", "jit(f)/jvp()/BSD", MODULE)
    named = with_names(program(), launch, owner=None)
    assert named.op_name == "jit(f)/jvp()/BSD,DF->BSF/dot_general"
    unknown = Launch("nvjet_a", "custom-call.77", "jit(f)/jvp()/BSD", MODULE)
    assert with_names(program(), unknown, owner=None) == unknown


def test_a_loop_of_unknown_length_leaves_its_further_turns_unnamed_and_the_rest_right():
    endless = tuple(x | {"settings": ""} for x in ENTRY)
    step = program(module(endless, BODY, CONDITION, SLICED, GATHER, COPY))
    names = found([in_graph(name) for name, _ in RUN * 3], step)
    right = truth(RUN * 3)
    assert all(name in ("", true) for (_, name), (_, true) in zip(names, right, strict=True))
    first_turn = len(RUN) - 2 - 3 * len(TURN)
    assert names[:first_turn] == right[:first_turn]


def test_a_step_is_followed_in_time_that_grows_with_its_length():
    """100 layers of one shape, 100 microbatches: ten thousand times the same launches."""
    cycle = ["begin", *["a", "b", "c"] * 10_000, "end"]
    seen = cycle * 2
    seen[100:103] = []
    (stretch,) = follow(cycle, seen)
    assert len(stretch) == 2 * len(cycle) - 3
    assert all(cycle[i % len(cycle)] == seen[j] for i, j in stretch)


def device_plane(*streams):
    """Of GPU 0: on each stream calls (name, HLO operation, program) of 10 ns each, in order."""
    names: dict[str, int] = {}

    def number(name):
        return names.setdefault(name, len(names) + 1)

    def event(i, call):
        name, op, program = call
        stats = [{1: number("hlo_op"), 7: number(op)}, {1: number("hlo_module"), 7: number(MODULE)}]
        return {
            1: number(name),
            2: 10_000 * i,
            3: 10_000,
            4: [*stats, {1: number("program_id"), 3: program}],
        }

    lines = [
        {1: n, 2: f"Stream #{n}(Compute)", 4: [event(i, each) for i, each in enumerate(launches)]}
        for n, launches in enumerate(streams, 1)
    ]
    tables = [{1: each, 2: {1: each, 2: name}} for name, each in names.items()]
    return {1: 1, 2: "/device:GPU:0", 3: lines, 4: tables, 5: tables}


def write(file, streams, *modules):
    file.write_bytes(
        encode({1: [metadata(*modules), device_plane(*streams), {1: 9, 2: "/host:CPU"}]})
    )
    return file


def test_the_scopes_of_a_step_in_graphs_are_told_from_its_program(tmp_path):
    # The last of a run is in no graph.
    launches = [(name, op if "sub" in op else "command_buffer_1", NUMBER) for name, op in RUN * 3]
    # The newest of the programs by this name is another, which did not run.
    other = module((line("loop_mul_fusion.1", "jit(f)/wrong/mul"),), number=77)
    step = anatomy(read(write(tmp_path / "x.xplane.pb", [launches], STEP, other)))
    assert (step.module, step.num_steps) == (MODULE, 2)
    parts = dict(
        gemm=50,
        attention=30,
        elementwise=20,
        copy=30,
        embedding=10,
        loss_gemm=30,
        loss=60,
        optimizer=10,
    )
    assert {key: round(value * 1e9) for key, value in step.seconds.items() if value} == parts
    assert step.unattributed_seconds == 0
    assert step.graph_seconds == pytest.approx(
        (sum(parts.values()) - parts["copy"] - parts["optimizer"]) * 1e-9
    )


def test_only_the_stream_that_computes_is_matched_with_the_schedule(tmp_path):
    launches = [(name, "command_buffer_1", NUMBER) for name, _ in RUN * 3]
    beside = [("nvjet_beside", "command_buffer_1", NUMBER)] * 4
    events = read(write(tmp_path / "x.xplane.pb", [beside, launches], STEP)).devices[0]
    named = [events.launches[i] for i in events.index_E]
    assert [(x.hlo_op, x.op_name) for x in named if x.name == "nvjet_beside"] == [("", "")] * 4
    assert [(x.hlo_op, x.op_name) for x in named if x.name != "nvjet_beside"] == truth(RUN * 3)


def test_two_programs_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    launches = [
        (name, "command_buffer_1", number) for number in (NUMBER, 77, 77) for name, _ in RUN
    ]
    again = module(ENTRY, BODY, CONDITION, SLICED, GATHER, COPY, number=77)
    step = anatomy(read(write(tmp_path / "x.xplane.pb", [launches], STEP, again)))
    assert (step.module, step.num_steps) == (f"{MODULE}(77)", 1)


def test_the_size_of_an_asynchronous_collective_is_that_of_its_larger_side():
    """bf16[2048,8] of an all-gather-start, and of a reduce-scatter the operand, f32[2048,2]."""

    def array(kind, *dims):
        return {2: kind, 3: dims}

    def both(*shapes):
        return {2: 13, 4: list(shapes)}

    instructions = [
        {1: "p.0", 2: "parameter", 3: array(16, 512, 8), 35: 1},
        {1: "p.1", 2: "parameter", 3: array(11, 2048, 2), 35: 2},
        {
            1: "all-gather-start.5",
            2: "all-gather-start",
            3: both(both(array(16, 512, 8)), array(16, 2048, 8)),
            35: 3,
            36: (1,),
        },
        {1: "reduce_scatter.6", 2: "reduce-scatter", 3: array(11, 512, 2), 35: 4, 36: (2,)},
        {1: "psum.7", 2: "all-reduce", 3: both(array(11), array(11, 3)), 35: 5, 36: (9,)},
    ]
    module = {1: "jit_f", 3: [{2: instructions}], 5: 7}
    assert programs(encode({1: [{2: "/host:CPU"}, metadata(module)]}), {7})[7].message_bytes == {
        "all-gather-start.5": 2048 * 8 * 2,
        "reduce_scatter.6": 2048 * 2 * 4,
        "psum.7": (1 + 3) * 4,
    }
