"""Pipelines of 8B's width, compiled for 8 H100 that are not here: memory, messages, collectives."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from jaxscale.command_line import read_config
from jaxscale.compile import ahead
from jaxscale.compile.traffic import axes_of, collectives_of
from jaxscale.config import MeshConfig, PipelineConfig, PipelineSchedule, Remat
from jaxscale.parallel.schedules import Shape, buffers, timetable
from jaxscale.step.plan import plan_of_run

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_bodies"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
STAGES, LAYERS, TOKENS, DIM = 4, 8, 8192, 4096


class Update:
    """A compiled update, and what it sends: (axes, collective) pairs."""

    def __init__(self, compiled, *, sizes):
        self.hlo = ahead.text_of(compiled)
        self.temp_gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
        self.sent = [(axes_of(each.groups, sizes), each) for each in collectives_of(self.hlo)]

    def permutes(self):
        return [each for _, each in self.sent if each.operation == "collective-permute"]


@pytest.fixture(scope="module")
def compiled():
    """`compiled(num_microbatches, is_unrolled=..., chunks=..., **mesh)`: 1F1B, interleaved if there
    are chunks, over 4 stages of 2 GPUs unless the mesh says otherwise."""
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=8)

    def compile(
        num_microbatches: int, *, is_unrolled: bool = False, chunks: int = 1, **mesh
    ) -> Update:
        config = read_config([f"--config={CONFIG}"])
        config.model = dataclasses.replace(config.model, num_layers=LAYERS)
        config.data.max_documents_per_row = 8
        config.scan_unroll, config.remat = LAYERS if is_unrolled else 1, Remat.ATTENTION
        config.mesh = MeshConfig(**(dict(stage=STAGES, fsdp=2) | mesh))
        one = PipelineConfig(schedule=PipelineSchedule.ONE_F_ONE_B)
        several = PipelineConfig(schedule=PipelineSchedule.INTERLEAVED, chunks=chunks)
        config.pipeline = several if chunks > 1 else one
        config.grad_accumulation = num_microbatches
        config.batch_size = num_microbatches * 8 // config.mesh.stage  # a row a device
        sizes = dict(plan_of_run(config, devices=devices).mesh.shape)
        return Update(ahead.compile_update(config, devices), sizes=sizes)

    return compile


@pytest.fixture(scope="module")
def of_8(compiled):
    return compiled(8)


def test_memory_is_flat_in_the_number_of_microbatches(compiled, of_8):
    # 6.32 and 6.25 GiB (jax 0.11.2).
    assert compiled(32).temp_gib < 1.01 * of_8.temp_gib


def test_no_weight_leaves_its_stage(of_8):
    of_a_microbatch = TOKENS * DIM
    for axes, each in of_8.sent:
        if "stage" not in axes:
            continue
        # Activations and sums of scalars and vectors; what is gathered or scattered are weights.
        assert each.operation in ("all-reduce", "collective-permute"), each
        assert sum(math.prod(dims) for _, dims in each.arrays) <= of_a_microbatch, each
    of_weights = {axes for axes, each in of_8.sent if each.operation == "all-gather"}
    assert of_weights == {("fsdp",)}


@pytest.mark.parametrize(
    ("axis", "mesh"), [("data", dict(fsdp=1, data=2)), ("fsdp", dict(fsdp=2, zero=1))]
)
def test_gradients_of_rows_are_added_up_once_an_update(compiled, axis, mesh):
    sums = [each for axes, each in compiled(8, **mesh).sent if axes == (axis,)]
    assert {each.times for each in sums} == {1}
    kinds = {each.operation for each in sums}
    # In shards, where the optimiser's state is split; its new weights are gathered once.
    wanted = {"reduce-scatter", "all-gather"} if "zero" in mesh else set()
    assert kinds == wanted | {"all-reduce"}


def test_no_stash_is_copied_in_a_loop(of_8):
    # 2P - 1 microbatches of two layers' residuals.
    stash = rf"\w+\[{2 * STAGES - 1},{LAYERS // STAGES},[\d,]*\]"
    assert re.search(rf"%\S+ = {stash}", of_8.hlo)
    assert not re.search(rf"%\S+ = {stash}\S* copy\(", of_8.hlo)


@pytest.fixture(scope="module")
def of_chunks(compiled):
    """The text of a program of two stages with four chunks of a layer."""
    return compiled(8, is_unrolled=True, chunks=4, stage=2, fsdp=4).hlo


def test_none_is_copied_where_a_loop_has_several_blocks(of_chunks):
    """Of two stages with four chunks of 8B it was 31 GB in each turn of the loop."""
    interleaved = PipelineSchedule.INTERLEAVED
    shape = Shape(schedule=interleaved, num_stages=2, num_microbatches=8, num_chunks=4)
    num_slots = buffers(timetable(shape)).depth["residuals"]
    stash = rf"bf16\[{num_slots},1,{TOKENS},[\d,]*\]"
    assert re.search(rf"%\S+ = {stash}", of_chunks)
    assert not re.search(rf"%\S+ = {stash}\S* copy\(", of_chunks)


def test_a_chunk_is_cut_out_of_the_weights_where_it_is_another(of_chunks):
    """In loops of one turn or none, and not in each block."""
    computations = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \([^\n]*\{\n(.*?)^\}", of_chunks, re.M | re.S)
    )
    weight = r"\w+\[4,(?:1,)?1024,14336\]"
    cut = {
        name
        for name, text in computations.items()
        if re.search(rf"= {weight}\S* parameter", text)
        and "dynamic-slice(" in text
        and "dynamic-update-slice(" not in text
    }
    assert cut
    for text in computations.values():
        if not cut.isdisjoint(re.findall(r"calls=%([\w.-]+)", text)):
            # Nor does it wait for devices that take no turn.
            assert not re.search("custom-call|all-gather|all-reduce|collective-permute", text)


def test_gradients_of_unrolled_layers_are_added_where_their_products_are_made(compiled):
    hlo = compiled(8, is_unrolled=True, fsdp=1, data=2).hlo
    # Five products of each layer, in place, in each loop of the program.
    gradient = r"%\S+ = \(f32\[(?:4096|14336|6144),\d+\]\S* s8\S* custom-call\("
    products = re.findall(rf"{gradient}.*cublas.*", hlo)
    assert len(products) >= 5 * LAYERS // STAGES
    assert all('"beta":1' in each and "output_to_operand_aliasing" in each for each in products)


@pytest.mark.slow
def test_messages_are_sent_beside_the_products_of_unrolled_layers(compiled):
    permutes = compiled(8, is_unrolled=True).permutes()
    times = sum(each.times for each in permutes)
    beside = sum(each.times for each in permutes if each.work_beside)
    # 8 + P - 1 ticks each way; the first and the last have nothing to be beside.
    assert times == 2 * (8 + STAGES - 1) and beside >= times - 4, (times, beside)
