"""Flash attention compiled for an H100 that is not here: registers, calls, and whom it is for."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale import sharding as shd
from jaxscale.command_line import read_config
from jaxscale.compile import ahead
from jaxscale.config import Attention, MeshConfig
from jaxscale.kernels import flash_attention, hopper
from jaxscale.models import gemma
from jaxscale.ops.attention import attention
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from tests.compile.bodies import kernels_without_bodies

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    pytest.mark.skipif(jax.__version_info__ < hopper.JAX, reason="this jax is too old for it"),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
]
SEQ, HEADS, KV_HEADS = 1024, 4, 2
# Bytes a thread that a kernel of a pass keeps in memory for want of registers, at most; else none.
# Those are of tiles with a mask, and of what stays the same over all tiles, which is stored once
# and read (docs/kernels.md).
MAX_SPILLS = {(64, None): 52}
SPILLS = re.compile(r"entry function '(\w+)'.*?(\d+) bytes spill stores", re.DOTALL)
# What ptxas says where products wait for one another.
SERIALIZED = "Potential Performance Loss"


def spills_of(said: str) -> dict[str, int]:
    """Bytes a thread of each kernel."""
    return {name: int(number) for name, number in SPILLS.findall(said)}


@functools.cache
def device():
    return ahead.devices_of("h100", hosts=1, gpus_per_host=1)[0]


def compiled(sizes, *, cap=None, window=None, deterministic=False):
    """Of the output and its gradients."""
    sharding = NamedSharding(Mesh(np.array([device()]), ("data",)), PartitionSpec())
    size, v_size = sizes
    shapes = [(HEADS, size), (KV_HEADS, size), (KV_HEADS, v_size), (HEADS, v_size)]
    arrays = [
        jax.ShapeDtypeStruct((1, SEQ, *shape), jnp.bfloat16, sharding=sharding) for shape in shapes
    ]
    segments = jax.ShapeDtypeStruct((1, SEQ), jnp.int32, sharding=sharding)

    def both(q, k, v, grad, segments):
        documents = documents_of(segments, segments, max_documents=8)
        options = dict(window=window, cap=cap, deterministic=deterministic)
        function = functools.partial(
            flash_attention.attention, documents=documents, scale=size**-0.5, **options
        )
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(grad)

    options: dict[str, Any] = ahead.COMPILER_OPTIONS
    return jax.jit(both).lower(*arrays, segments).compile(compiler_options=options)


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("sizes", flash_attention.HEAD_SIZES)
def test_sums_fit_in_registers_and_products_do_not_wait(sizes, cap, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    hlo = ahead.text_of(compiled(sizes, cap=cap))
    said = "".join(capfd.readouterr())
    spilled = spills_of(said)
    assert len(spilled) == (2 if sizes[0] <= 128 else 4)
    forward = spilled.pop("flash_attention_forward_mosaic_gpu_kernel")
    assert forward <= (0 if sizes[0] == 64 else MAX_SPILLS.get((sizes[0], cap), 0))
    assert max(spilled.values()) <= MAX_SPILLS.get((sizes[0], cap), 0)
    assert SERIALIZED not in said
    calls = {name: n for name, n in ahead.count_calls(hlo).items() if "flash" in name}
    backward = "flash_attention_backward"
    apart = {f"{backward}_of_{part}": 1 for part in ("keys", "queries", "values")}
    assert calls == {"flash_attention_forward": 1} | ({backward: 1} if sizes[0] <= 128 else apart)


@pytest.mark.parametrize("size", [64, 128])
def test_sums_fit_in_registers_in_one_order_too(size, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled((size, size), deterministic=True)
    said = "".join(capfd.readouterr())
    spilled = spills_of(said)
    assert len(spilled) == 3
    assert max(spilled.values()) == 0
    assert SERIALIZED not in said


def test_gemma_2_trains_on_long_rows_with_it():
    path = Path(__file__).parents[2] / "configs" / "llama3_1b.py"
    config = read_config([f"--config={path}"])
    config.model = gemma.Config(
        vocab_size=8192,
        model_dim=512,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=256,
        mlp_dim=1024,
        max_seq_len=8192,
        window=4096,
        global_every=2,
        qk_norm=False,
        score_cap=50.0,
        logit_cap=30.0,
    )
    config = dataclasses.replace(config, scan_unroll=2, batch_size=1, mesh=MeshConfig())
    config.data.max_documents_per_row = 8
    with kernels_without_bodies():
        compiled = ahead.compile_update(config, [device()])
    counts = ahead.count_calls(ahead.text_of(compiled))
    # A local layer and a global one; what comes out is kept for the backward pass.
    assert counts["flash_attention_forward"] == 2
    assert counts["flash_attention_backward_of_queries"] == 2


RULES = shd.Rules(
    batch=("data", "fsdp"),
    seq=None,
    heads="tensor",
    attn_seq=None,
    attn_heads="tensor",
    attn_kv_heads="tensor",
    head=None,
)
COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)")
LAYOUTS = {
    "rows": dict(fsdp=4),
    "heads": dict(tensor=4),
    "rows and heads": dict(fsdp=2, tensor=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_over_rows_and_heads_it_sends_nothing(layout):
    """Each device runs both passes on the rows and heads that it has."""
    mesh = shd.make_mesh(
        LAYOUTS[layout], devices=ahead.devices_of("h100", hosts=1, gpus_per_host=4)
    )
    execution = Execution(platform="gpu", attention=Attention.FLASH)

    def both(q, k, v, grad, segments):
        documents = documents_of(segments, segments, max_documents=8)
        options: dict[str, Any] = dict(documents=documents, execution=execution)
        out, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
        return out, *pull(grad)

    with shd.use(mesh, RULES):

        def array(shape, axes, dtype=jnp.bfloat16):
            sharding = NamedSharding(mesh, RULES.spec(axes, shape, mesh=mesh))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        q, k = (array((4, SEQ, n, 128), "batch seq heads head") for n in (8, 4))
        arrays = q, k, k, q, array((4, SEQ), "batch seq", jnp.int32)
        options: dict[str, Any] = ahead.COMPILER_OPTIONS
        with kernels_without_bodies():
            lowered = jax.jit(both).lower(*arrays)
        hlo = ahead.text_of(lowered.compile(compiler_options=options))
    assert COLLECTIVE.findall(hlo) == []
    rows, heads = 4 // mesh.shape["fsdp"], 8 // mesh.shape["tensor"]
    counts = ahead.count_calls(hlo)
    assert counts["flash_attention_forward"] == counts["flash_attention_backward"] == 1
    assert f"bf16[{rows},{SEQ},{heads},128]" in hlo
