"""Timetables of pipelines: whole, in order, with the bubbles of theory, and slots that hold."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxscale.config import PipelineSchedule
from jaxscale.parallel import blocks
from jaxscale.parallel.schedules import (
    COSTS,
    Kind,
    Op,
    Shape,
    buffers,
    explain,
    is_last_part,
    source,
    timetable,
)

GPIPE, ONE_F_ONE_B = PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B
INTERLEAVED, ZB_H1 = PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB_H1
SHAPES = [
    Shape(schedule, stages, microbatches, chunks, is_lean, is_training)
    for schedule, chunks in (
        (GPIPE, 1),
        (ONE_F_ONE_B, 1),
        (ZB_H1, 1),
        (INTERLEAVED, 2),
        (INTERLEAVED, 4),
    )
    for stages, microbatches in ((2, 2), (2, 5), (3, 6), (4, 4), (4, 7), (4, 16), (8, 17))
    for is_lean, is_training in ((False, True), (True, True), (False, False))
]


def name_of(shape):
    how = "lean" if shape.is_lean else "aligned" if shape.is_training else "forward"
    numbers = f"{shape.num_stages}-{shape.num_microbatches}-{shape.num_chunks}"
    return f"{shape.schedule.value}-{numbers}-{how}"


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=name_of)


@every_shape
def test_every_op_is_done_once_and_after_what_it_reads(shape):
    table = timetable(shape)
    sizes = shape.num_microbatches, shape.num_chunks, shape.num_stages
    kinds = {Kind.FORWARD}
    if shape.is_training:
        kinds |= {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}
    wanted = {Op(kind, *of) for kind in kinds for of in np.ndindex(*sizes)}
    assert {op for op in table.ticks if op.kind != Kind.BACKWARD} == wanted
    assert (table.kind != Kind.IDLE).sum() == len(shape.kinds) * np.prod(sizes)
    for op, tick in table.ticks.items():
        reads = source(op, shape)
        if reads is None and op.kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
            reads = op._replace(kind=Kind(op.kind - 1))
        if reads is not None and table.ticks[reads] != tick:
            assert table.ticks[reads] < tick, op
    if not shape.is_lean:
        assert all(len(set(row) - {Kind.IDLE}) == 1 for row in table.kind)


@every_shape
def test_no_slot_is_written_before_it_has_been_read(shape):
    """The table is run, with the ops themselves in the place of arrays."""
    table, slots = timetable(shape), buffers(timetable(shape))
    stages = range(shape.num_stages)
    held: dict[str, list[list[Any]]] = {
        name: [[None] * (depth + 1) for _ in stages] for name, depth in slots.depth.items()
    }
    of = {
        (tick, op.stage): op
        for op, tick in table.ticks.items()
        if op.kind == table.kind[tick, op.stage]
    }
    for tick in range(len(table.kind)):
        sent = {}
        for stage in stages:
            op = of.get((tick, stage))
            at = {name: held[name][stage][slots.reads[name][tick, stage]] for name in held}
            if op is None:
                if shape.is_lean or not shape.is_training:
                    continue
                if table.kind[tick].max() == Kind.FORWARD:
                    held["residuals"][stage][slots.reads["residuals"][tick, stage]] = "stale"
                else:
                    assert at["residuals"], "what is read may be anything, so it has to be written"
                continue
            mine = op.microbatch, op.chunk
            if op.kind == Kind.FORWARD:
                if source(op, shape):
                    assert at["forward"] == source(op, shape)
                held["residuals"][stage][slots.reads["residuals"][tick, stage]] = mine
            else:
                assert at["residuals"] == mine
                if op.kind == Kind.WEIGHT_GRADIENT:
                    assert at["crossing"] == mine
                elif is_last_part(op, shape):
                    assert at["loss"] == op._replace(kind=Kind.FORWARD)
                else:
                    assert at["backward"] == source(op, shape)
                if op.kind == Kind.INPUT_GRADIENT:
                    held["crossing"][stage][slots.reads["crossing"][tick, stage]] = mine
            kind = Kind.FORWARD if op.kind == Kind.FORWARD else Kind.INPUT_GRADIENT
            sent[op._replace(kind=kind)] = True
        arrive(held, slots, tick=tick, sent=sent, table=table)


def arrive(held, slots, *, tick, sent, table):
    shape = table.shape
    for op in table.ticks:
        if op.kind not in (Kind.FORWARD, Kind.INPUT_GRADIENT):
            continue
        inbox = "forward" if op.kind == Kind.FORWARD else "backward"
        reads = source(op, shape)
        if op.kind == Kind.INPUT_GRADIENT and is_last_part(op, shape):
            inbox, reads = "loss", op._replace(kind=Kind.FORWARD)
        if reads in sent:
            held[inbox][op.stage][slots.arrives[inbox][tick, op.stage]] = reads


@pytest.mark.parametrize("stages, microbatches", [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_bubbles_are_those_of_theory(stages, microbatches):
    idle = stages - 1
    one, forward = timetable(Shape(ONE_F_ONE_B, stages, microbatches)), COSTS[Kind.FORWARD]
    assert one.bubble() == pytest.approx(idle / (microbatches + idle))
    both = forward + COSTS[Kind.INPUT_GRADIENT]
    whole = microbatches * (both + COSTS[Kind.WEIGHT_GRADIENT])
    zero = timetable(Shape(ZB_H1, stages, microbatches))
    assert zero.bubble() == pytest.approx(idle * both / (whole + idle * both))
    for chunks in (2, 4):
        interleaved = timetable(Shape(INTERLEAVED, stages, microbatches, chunks))
        assert interleaved.bubble() == pytest.approx(idle / (chunks * microbatches + idle))


@pytest.mark.parametrize("schedule, chunks", [(ONE_F_ONE_B, 1), (ZB_H1, 1), (INTERLEAVED, 4)])
@pytest.mark.parametrize("is_lean", [False, True])
def test_the_stash_does_not_grow_with_the_microbatches(schedule, chunks, is_lean):
    few, many = (timetable(Shape(schedule, 4, n, chunks, is_lean)) for n in (16, 64))
    assert few.most_in_flight() == many.most_in_flight()


def test_a_lean_stage_keeps_as_many_microbatches_as_there_are_stages_after_it():
    assert timetable(Shape(ONE_F_ONE_B, 4, 16, is_lean=True)).most_in_flight() == 4
    assert timetable(Shape(ONE_F_ONE_B, 4, 16)).most_in_flight() == 7


@every_shape
def test_blocks_hold_every_tick_in_order(shape):
    if shape.is_lean:
        return
    table = timetable(shape)
    ticks = []
    for repeats, runs in blocks.program(table):
        for repeat in range(repeats):
            for run in runs:
                for turn in range(run.length):
                    for kind in run.signature.kinds:
                        row = run.rows[kind.name]
                        ticks.append((kind, *row["microbatch"][repeat, turn]))
    numbers = zip(table.kind.max(1), table.microbatch, strict=True)
    assert ticks == [(kind, *row) for kind, row in numbers]


@pytest.mark.parametrize("microbatches", [8, 6, 7])
def test_a_stage_is_told_when_its_chunk_is_another(microbatches):
    table = timetable(Shape(INTERLEAVED, 2, microbatches, 4))
    changes = blocks.columns(table)["is_other_chunk"]
    for stage, kind in itertools.product(range(2), table.shape.kinds):
        ticks = np.flatnonzero(table.kind[:, stage] == kind)
        chunks = [*table.chunk[ticks, stage]]
        is_other = [a != b for a, b in itertools.pairwise([-1, *chunks])]
        assert is_other == [*changes[ticks, stage]]
        # Two microbatches, of an odd number the last three, go through it before the next.
        assert sum(is_other) == 4 * (microbatches // 2), "or weights are cut out for each"
    assert not changes[table.kind == Kind.IDLE].any()


def test_what_recurs_is_rolled_into_one_loop():
    assert blocks.rolled([*"ab", *"cde" * 5, *"f"]) == [(0, 2, 1), (2, 3, 5), (17, 1, 1)]
    runs = [
        run for _, runs in blocks.program(timetable(Shape(INTERLEAVED, 2, 32, 4))) for run in runs
    ]
    assert len(runs) < 20, "so that compiling does not take longer with more microbatches"


def test_a_timetable_is_explained():
    text = explain(Shape(ONE_F_ONE_B, 2, 3))
    assert text.splitlines() == [
        "one_f_one_b: 2 stages, 3 microbatches, 8 ticks",
        "bubble 25.0%; residuals of 3 microbatches a stage; inboxes 1 + 1",
        "stage 0  F0 F1 .  F2 X0 .  X1 X2",
        "stage 1  .  F0 X0 F1 X1 F2 X2 .",
    ]
