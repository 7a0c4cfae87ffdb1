"""The real 8B update, compiled for 8 H100 that are not here, does what its speed rests on.

8 of its 32 layers: the layers are scanned, so the program is the same but for the loop's count.
"""

import collections
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxscale.command_line import read_config
from jaxscale.compile import ahead, fit
from jaxscale.compile.traffic import collectives_of, computations, groups_over, traffic_of
from jaxscale.config import AsyncTensor, Attention, Dtype, MeshConfig, Remat, rows_of_group
from jaxscale.kernels import hopper
from jaxscale.ops import loss
from jaxscale.step.plan import Plan, plan_of_run
from jaxscale.step.update import update
from jaxscale.xla import targets
from tests.compile import bodies
from tests.compile.calls import attention_calls

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_bodies"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
H200 = "NVIDIA H200"
LAYERS, VOCAB, DIM, CHUNK = 8, 128_256, 4096, 2048
OWN_CHUNK = loss.CHUNK_TOKENS


@pytest.fixture(scope="module")
def config_8b():
    """`config_8b(**changes)`: configs/llama3_8b.py as its comment has it for H100s.

    With 8 layers, scanned and gathered twice.
    """

    def make(**changes):
        config = read_config([f"--config={CONFIG}"])
        config.model = dataclasses.replace(config.model, num_layers=LAYERS)
        config.data.max_documents_per_row = 8
        config.mesh.reshard_after_forward = True
        for key, value in (dict(scan_unroll=1) | changes).items():
            setattr(config, key, value)
        return config

    return make


@pytest.fixture(scope="module")
def devices():
    return ahead.devices_of("h100", hosts=1, gpus_per_host=8)


@pytest.fixture(scope="module")
def compile_8b(config_8b, devices):
    """`compile_8b(**changes)`: that config's compiled update."""

    def compile(**changes):
        # Not the model's 4096, so that a chunk's logits are told from the tables.
        patch.setattr(loss, "CHUNK_TOKENS", CHUNK)
        return ahead.compile_update(config_8b(**changes), devices)

    with pytest.MonkeyPatch.context() as patch:
        yield compile


@pytest.fixture(scope="module")
def compiled(compile_8b):
    return compile_8b()


@pytest.fixture(scope="module")
def hlo(compiled) -> str:
    return ahead.text_of(compiled)


@pytest.fixture(scope="module")
def compile_unrolled(config_8b):
    """`compile_unrolled(mesh)`: as it runs on 4 H200, unrolled, with the autotune entries shipped.

    The text, and the mesh of devices.
    """
    devices = ahead.devices_of("h200", hosts=1, gpus_per_host=4)

    def compile(mesh: MeshConfig) -> tuple[str, Mesh]:
        config = config_8b(scan_unroll=LAYERS, mesh=mesh)
        # What `ahead` sets is for where nothing has been timed.
        is_timed = targets.recorded_autotune(devices[0].device_kind)
        options = None if is_timed else ahead.COMPILER_OPTIONS
        # The tests' own precision would be part of what a product is known by.
        with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision(None):
            patch.setattr(loss, "CHUNK_TOKENS", OWN_CHUNK)
            plan = plan_of_run(config, devices=devices)
            compiled = fit.compile_only(update, plan, compiler_options=options)
            return ahead.text_of(compiled), plan.mesh

    return compile


@pytest.fixture(scope="module")
def unrolled_hlo(compile_unrolled) -> str:
    """With FSDP, weights gathered once."""
    return compile_unrolled(MeshConfig(fsdp=-1, reshard_after_forward=False))[0]


def outside_fusions(hlo: str) -> list[str]:
    """The instructions that have buffers: not those inside a fusion."""
    fused = set(re.findall(r"fusion\(.*?calls=%([\w.-]+)", hlo))
    return [
        line for name, lines in computations(hlo).items() if name not in fused for line in lines
    ]


def results_of(hlo: str, operation: str) -> list[str]:
    """Types of what an operation makes, such as 'bf16[4096,14336]'.

    With those of its operands where it is asynchronous.
    """
    lines = re.findall(rf"= (.*?) {operation}\(", hlo)
    return [shape for line in lines for shape in re.findall(r"\w+\[[\d,]*\]", line)]


def product_dtypes(hlo: str) -> collections.Counter[str]:
    """How many matrix products have results of each dtype."""
    lines = [line for line in hlo.splitlines() if 'custom_call_target="__cublas' in line]
    return collections.Counter(re.findall(r"= \(?(\w+)\[", "\n".join(lines)))


def test_flash_attention_runs_once_forward_and_once_backward_a_layer(hlo):
    assert attention_calls(hlo) == (1, 1)


def test_without_its_saved_statistics_it_would_run_twice(compile_8b):
    assert attention_calls(ahead.text_of(compile_8b(remat=Remat.FULL))) == (2, 1)


def test_no_float32_logits_are_held(hlo):
    lines = [line.partition(" = ")[2].partition("(%")[0] for line in outside_fusions(hlo)]
    held = {shape for line in lines for shape in re.findall(r"f32\[([\d,]+)\]", line)}
    # The tables, their gradients and the optimiser's state have the model's axis, whole or its part
    # of 8 GPUs.
    assert {VOCAB} < {int(size) for shape in held for size in shape.split(",")}
    tables = {frozenset({VOCAB, DIM}), frozenset({VOCAB, DIM // 8})}
    logits = [
        shape
        for shape in held
        if VOCAB in (sizes := frozenset(map(int, shape.split(",")))) and sizes not in tables
    ]
    assert not logits


def test_weights_are_gathered_in_bfloat16_a_layer_at_a_time(hlo):
    gathered = results_of(hlo, "all-gather-start")
    assert gathered and {shape.split("[")[0] for shape in gathered} <= {"bf16", "s32"}
    whole_stacks = [shape for shape in gathered if re.match(rf"bf16\[{LAYERS},\d+,\d+", shape)]
    assert not whole_stacks


def test_gradients_are_scattered_not_summed_whole(hlo):
    assert {shape.split("[")[0] for shape in results_of(hlo, "reduce-scatter-start")} == {
        "bf16",
        "f32",
    }
    for shape in results_of(hlo, "all-reduce") + results_of(hlo, "all-reduce-start"):
        sizes = [int(size) for size in re.findall(r"\d+", shape.partition("[")[2])]
        # Norm scales and scalars only.
        assert max(sizes, default=1) <= 4 * DIM and len(sizes) <= 1, shape


def test_every_large_collective_overlaps(hlo):
    counts = ahead.count_calls(hlo)
    assert not {"all-gather", "reduce-scatter"} & set(counts), counts
    # The embedding's, forward: nothing else can run yet. 0.1 ms of NVLink for Llama-3-8B and 16,384
    # tokens.
    assert counts["all-to-all"] <= 1 and counts["all-to-all-start"] >= 1, counts


def test_gradients_summed_in_float32_send_more_and_compute_the_same(
    compiled, hlo, config_8b, compile_8b
):
    wide = compile_8b(mesh=dataclasses.replace(config_8b().mesh, reduce_dtype=Dtype.FLOAT32))
    wide_hlo = ahead.text_of(wide)
    assert {shape.split("[")[0] for shape in results_of(wide_hlo, "reduce-scatter-start")} == {
        "f32"
    }
    assert not {"all-gather", "reduce-scatter"} & set(ahead.count_calls(wide_hlo))
    assert sorted(results_of(wide_hlo, "all-gather-start")) == sorted(
        results_of(hlo, "all-gather-start")
    )
    products, wide_products = product_dtypes(hlo), product_dtypes(wide_hlo)
    # Of qkv, out, gate, up and down: their gradients are not rounded before the sum either.
    assert wide_products["f32"] == products["f32"] + 5
    assert wide_products.total() == products.total()
    # 0.11 GiB more on jax 0.11.2, the gradient in flight, and none on 0.10.2; a layer's weights in
    # float32 would be 0.8.
    assert fit.predicted_memory_gib(wide) < fit.predicted_memory_gib(compiled) + 0.2


@pytest.mark.skipif(jax.__version_info__ < hopper.JAX, reason="this jax is too old for kernels")
def test_the_program_around_our_kernels_is_the_same_whatever_they_do(compiled, compile_8b):
    """What the tests of this folder rest on, most of whose kernels do nothing."""
    with bodies.kernels_with_bodies():
        whole = compile_8b()
    code, empty_code = (
        len(each.as_text()) - len(ahead.text_of(each)) for each in (whole, compiled)
    )
    # 0.4 MB a call, that is
    assert code > 5 * empty_code > 0
    # But for the first line, which has a fingerprint of what was compiled.
    assert ahead.text_of(whole).splitlines()[1:] == ahead.text_of(compiled).splitlines()[1:]
    assert fit.predicted_memory_gib(whole) == fit.predicted_memory_gib(compiled)


def test_the_predicted_memory_is_within_bounds(compiled):
    # 8 layers on 8 GPUs, a row each; 15.5 GiB on jax 0.10.2 and 0.11.2
    assert 14 < fit.predicted_memory_gib(compiled) < 17


def test_xla_plans_for_the_memory_that_jax_has_of_the_card(hlo, config_8b, monkeypatch):
    assert not fit.RECOMPUTED.search(hlo)
    # 9.5 of its 79 GiB: without being told, XLA would plan for 63.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.12")
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=8)
    plan = plan_of_run(config_8b(), devices=devices)
    compiled = fit.compile_update(update, plan, compiler_options=ahead.COMPILER_OPTIONS)
    assert compiled.num_recomputed > 0


def test_an_unrolled_update_gathers_and_scatters_a_layer_at_a_time(unrolled_hlo):
    counts = ahead.count_calls(unrolled_hlo)
    # Without the options: 41 and 32. Synchronous: the first gather and the last reduce-scatter,
    # which have nothing beside them.
    for kind in ("all-gather", "reduce-scatter"):
        assert LAYERS - 1 <= counts[f"{kind}-start"] <= LAYERS + 1 and counts[kind] <= 1, counts


def test_the_shares_of_two_copies_are_summed_beside_the_backward_pass(compile_unrolled):
    hlo, mesh = compile_unrolled(MeshConfig(data=2, fsdp=2, reshard_after_forward=False))
    sums = [each for each in traffic_of(hlo, mesh) if each.axes == ("data",)]
    # Left to itself XLA sums 42 times, at the end, with nothing beside 3.82 of 3.85 GB.
    layers = LAYERS * 2 * read_config([f"--config={CONFIG}"]).model.num_layer_params() / 2
    tables = 2 * 4 * VOCAB * DIM / 2
    (all_,) = sums
    assert all_.operation == "all-reduce" and all_.times <= LAYERS + 3
    assert all_.num_bytes == pytest.approx(layers + tables, rel=0.01)
    assert all_.exposed_bytes < tables + 0.3 * layers


def test_unrolled_lean_layers_take_the_memory_of_a_scan(compile_8b):
    # 10.7 GiB with cuDNN, a scan 10.0; 13.6 where the weight gradients are put off to the end. 10.2
    # with flash attention, 10.8 where it makes the zeros of all layers' dq at once.
    unrolled = compile_8b(remat=Remat.ATTENTION, scan_unroll=LAYERS)
    counts = ahead.count_calls(ahead.text_of(unrolled))
    limit = 10.5 if counts["flash_attention_backward"] else 11.5
    assert fit.predicted_memory_gib(unrolled) < limit
    assert counts["reduce-scatter"] == 0 and counts["reduce-scatter-start"] <= LAYERS + 1, counts


def test_columns_of_dq_come_back_in_order_where_the_gradients_are_joined(unrolled_hlo):
    if not ahead.count_calls(unrolled_hlo)["flash_attention_backward"]:
        pytest.skip("cuDNN's kernel has columns in order")
    sums = re.findall(r"(%\S+) = f32\[[\d,]+,16,256\]\S* get-tuple-element", unrolled_hlo)
    assert len(sums) == LAYERS
    for name in sums:
        users = re.findall(rf"= (\w+\[[\d,]+)\]\S* fusion\([^)]*{name}[,)]", unrolled_hlo)
        # Of query heads that share a key head, that and its values: no pass of its own.
        assert len(users) == 1 and users[0].endswith(",6,128"), users


def test_the_autotune_entries_of_an_h200_are_those_of_the_program(unrolled_hlo):
    if not targets.recorded_autotune(H200):
        pytest.skip("none are shipped for this jaxlib")
    products = [
        line for line in unrolled_hlo.splitlines() if 'custom_call_target="__cublas' in line
    ]
    chosen = collections.Counter(re.findall(r'"selected_algorithm":"(\d+)"', "\n".join(products)))
    # 5 weights of a layer, forward and twice backward, and the loss's 3. Triton would make those
    # that were not found.
    assert len(products) == 5 * 3 * LAYERS + 3
    assert chosen.total() == len(products) and chosen["0"] < chosen.total() / 4, chosen


def test_an_unknown_card_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="target='h999' is not one of h100"):
        ahead.devices_of("h999", hosts=1, gpus_per_host=8)


def test_auto_takes_the_richest_policy_that_fits_the_card(
    compiled, config_8b, devices, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_only, memory = fit.compile_only, {}

    def noted(update, plan, **options):
        remat = plan.execution.remat
        of_plan = compiled if remat == Remat.GEMMS else compile_only(update, plan, **options)
        memory[remat] = fit.predicted_memory_gib(of_plan)
        return of_plan

    monkeypatch.setattr(fit, "compile_only", noted)
    # 15.2 with `gemms`, 13.9 with `attention_mlp`, 10.4 with `attention` (jax 0.11.2)
    chosen = ahead.compile_to_fit(config_8b(remat=Remat.AUTO), devices, pool_gib=12.5)
    assert list(memory) == [Remat.GEMMS, Remat.ATTENTION, Remat.ATTENTION_MLP]
    assert memory[Remat.ATTENTION] <= 12.5 * fit.USABLE < memory[Remat.ATTENTION_MLP]
    assert chosen.plan.execution.remat == Remat.ATTENTION


def test_the_pool_is_jaxs_share_of_the_card(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    # 85,017,493,504 bytes and 92%
    assert round(ahead.pool_gib("h100"), 2) == 72.84


# Which gradients are summed where.

# Name -> mesh, for the 8 GPUs, and how many layers are unrolled.
SPLITS: dict[str, dict[str, Any]] = {
    "zero3": dict(data=2, fsdp=4),
    "zero3 tp sp": dict(data=2, fsdp=2, tensor=2),
    "zero2": dict(data=2, fsdp=4, zero=2),
    "zero1": dict(data=2, fsdp=4, zero=1),
    "zero1 unrolled": dict(data=2, fsdp=4, zero=1, scan_unroll=4),
    "zero3 in float32": dict(data=2, fsdp=4, reduce_dtype=Dtype.FLOAT32),
}
SPLIT_LAYERS = 4
# It sums nothing over devices: cuDNN's is a call, and ours takes 15 s of a program's 20.
SPLIT_ATTENTION = Attention.CUDNN


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum over devices: what each of them has of the result, and which of them sum together."""

    operation: str
    dtype: str
    dims: tuple[int, ...]
    groups: frozenset[frozenset[int]]
    in_loop: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Split:
    """A compiled update's plan, and its sums over devices, but for those of the tables.

    The tables' gradients are summed once an update, in float32, outside of the layers.
    """

    plan: Plan
    hlo: str
    reductions: list[Reduction]

    def over(self, operation: str, axis: str) -> list[Reduction]:
        """Those over one mesh axis of what is larger than all norm scales together."""
        groups = groups_over(self.plan.mesh.shape, (axis,))
        return [
            reduction
            for reduction in self.reductions
            if (reduction.operation, reduction.groups) == (operation, groups)
            and reduction.num_elements > self.num_scales()
        ]

    def not_over(self, operation: str, *axes: str) -> list[Reduction]:
        """Those over anything but one of these mesh axes."""
        allowed = [groups_over(self.plan.mesh.shape, (axis,)) for axis in axes]
        return [
            reduction
            for reduction in self.reductions
            if reduction.operation == operation and reduction.groups not in allowed
        ]

    def num_scales(self) -> int:
        model = self.plan.config.model
        return (2 * model.num_layers + 1) * model.model_dim

    def num_matrix_elements(self) -> int:
        """Of a layer's matrices, as the optimiser has them on a device."""
        blocks, shardings = self.plan.state.params.layers, self.plan.update_shardings.layers
        shards = [
            sharding.shard_shape(leaf.shape)[1:]
            for leaf, sharding in zip(
                jax.tree.leaves(blocks), jax.tree.leaves(shardings), strict=True
            )
        ]
        return sum(math.prod(shape) for shape in shards if len(shape) > 1)


def split_of(config, devices) -> Split:
    hlo = ahead.text_of(ahead.compile_update(config, devices))
    tables = {config.model.vocab_size, config.model.vocab_size // config.mesh.tensor}
    reductions = [reduction for reduction in reductions_of(hlo) if not tables & set(reduction.dims)]
    return Split(plan_of_run(config, devices=devices), hlo, reductions)


def reductions_of(hlo: str) -> list[Reduction]:
    """One for each array that is summed; several may share a call."""
    of_loops = in_loops(computations(hlo))
    return [
        Reduction(call.operation, dtype, dims, call.groups, call.computation in of_loops)
        for call in collectives_of(hlo)
        if call.operation in ("all-reduce", "reduce-scatter")
        for dtype, dims in call.arrays
    ]


def in_loops(computations: dict[str, list[str]]) -> set[str]:
    """The names of loops' bodies and of what they call."""
    found: set[str] = set()
    left = {name for lines in computations.values() for name in called("body", lines)}
    while left:
        found |= left
        lines = [line for name in left for line in computations[name]]
        left = called("calls|to_apply|body", lines) - found
    return found


def called(attributes: str, lines: list[str]) -> set[str]:
    return set(re.findall(rf"(?:{attributes})=%([\w.-]+)", "\n".join(lines)))


@pytest.fixture(scope="module", params=SPLITS)
def split(request, config_8b, devices) -> Split:
    mesh = dict(SPLITS[request.param])
    scan_unroll = mesh.pop("scan_unroll", 1)
    config = config_8b(
        remat=Remat.ATTENTION_MLP,
        scan_unroll=scan_unroll,
        mesh=MeshConfig(**mesh),
        attention=SPLIT_ATTENTION,
    )
    config.model = dataclasses.replace(config.model, num_layers=SPLIT_LAYERS)
    return split_of(config, devices)


def test_block_gradients_are_scattered_over_fsdp_and_their_shards_summed_over_data(split):
    """As a layer's gradients are made; with ZeRO-1 once an update, all layers' in float32."""
    config = split.plan.config
    is_late = config.mesh.zero == 1
    dtype = "f32" if is_late or config.mesh.reduce_dtype == Dtype.FLOAT32 else "bf16"
    num_elements = split.num_matrix_elements() * (SPLIT_LAYERS if is_late else 1)
    for sums in (split.over("reduce-scatter", "fsdp"), split.over("all-reduce", "data")):
        assert sum(reduction.num_elements for reduction in sums) == num_elements
        assert {reduction.in_loop for reduction in sums} == {not is_late}
        assert {reduction.dtype for reduction in sums} == {dtype}


def test_no_block_gradient_is_summed_whole(split):
    assert split.not_over("reduce-scatter", "fsdp", "tensor") == []
    others = split.not_over("all-reduce", "data", "tensor")
    # Norm scales and scalars.
    assert others and sum(reduction.num_elements for reduction in others) < 2 * split.num_scales()


def test_block_gradients_are_scattered_where_rows_are_passed_on_in_a_ring(config_8b, devices):
    config = config_8b(
        remat=Remat.ATTENTION_MLP,
        scan_unroll=1,
        mesh=MeshConfig(fsdp=4, tensor=2, async_tensor=AsyncTensor.RING),
        attention=SPLIT_ATTENTION,
    )
    config.model = dataclasses.replace(config.model, num_layers=SPLIT_LAYERS)
    split = split_of(config, devices)
    sums = split.over("reduce-scatter", "fsdp")
    assert sum(reduction.num_elements for reduction in sums) == split.num_matrix_elements()
    assert {(reduction.dtype, reduction.in_loop) for reduction in sums} == {("bf16", True)}
    test_no_block_gradient_is_summed_whole(split)
    # A layer's rows go on twice and their sums twice; back as often. Recomputed, rows go twice and
    # attention's sums once.
    rows, seq_len = rows_of_group(config, split.plan.mesh.shape) // 2, config.seq_len
    stream = rf"bf16\[{rows},{seq_len},{config.model.model_dim}\]"
    messages = re.findall(rf"= \(?\(?{stream}.*? collective-permute(?:-start)?\(", split.hlo)
    assert len(messages) == 11


@pytest.fixture(scope="module")
def grouped(config_8b, devices) -> Split:
    """4 devices of a tensor axis over 2 key heads; small, since only the key heads matter."""
    mesh = MeshConfig(fsdp=2, tensor=4)
    config = config_8b(seq_len=1024, mesh=mesh, attention=SPLIT_ATTENTION)
    config.model = dataclasses.replace(
        config.model,
        vocab_size=1280,
        model_dim=1024,
        num_layers=SPLIT_LAYERS,
        num_heads=16,
        num_kv_heads=2,
        mlp_dim=4096,
    )
    return split_of(config, devices)


def test_with_more_tensor_devices_than_key_heads_no_block_gradient_is_summed_whole(grouped):
    model, mesh = grouped.plan.config.model, grouped.plan.mesh.shape
    # Every device of the tensor axis stores the queries' weights, and makes gradients of its own.
    queries = model.model_dim * model.num_heads * model.head_dim() // mesh["fsdp"]
    num_elements = grouped.num_matrix_elements() - queries + queries // mesh["tensor"]
    scattered = grouped.over("reduce-scatter", "fsdp")
    assert sum(reduction.num_elements for reduction in scattered) == num_elements
    assert all(reduction.in_loop for reduction in scattered)
    test_no_block_gradient_is_summed_whole(grouped)


def test_rows_that_tensor_splits_are_gathered_and_scattered_without_a_copy(grouped):
    """Of their sequence, 14 transposes stand beside the messages of a layer here."""
    config = grouped.plan.config
    rows = rows_of_group(config, grouped.plan.mesh.shape)
    assert rows == config.mesh.tensor
    stream = sorted((rows, config.seq_len, config.model.model_dim))
    transposed = re.findall(r"= \w+\[([\d,]+)\]\S* transpose\(", grouped.hlo)
    assert transposed and stream not in [sorted(map(int, dims.split(","))) for dims in transposed]
