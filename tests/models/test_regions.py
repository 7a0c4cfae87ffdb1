"""A model inside a region that is manual over some axes, and with its sequence split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import Dtype, Remat
from jaxscale.models import gemma, llama
from jaxscale.models.decoder import forward
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from jaxscale.ops.layers import Stack, run_layers
from jaxscale.ops.loss import cross_entropy

SIZES: dict[str, Any] = dict(
    vocab_size=250, model_dim=16, num_layers=4, num_heads=8, num_kv_heads=4, mlp_dim=32
)
CONFIGS: dict[str, llama.Config | gemma.Config] = {
    "llama": llama.Config(**SIZES, qk_norm=True, qkv_bias=True),
    "gemma": gemma.Config(**SIZES, head_size=4, window=5, global_every=3),
}
EXECUTION = Execution(
    dtype=Dtype.FLOAT32, reduce_dtype=Dtype.FLOAT32, remat=Remat.GEMMS, max_documents=4
)
RULES = shd.Rules(
    batch=("data", "fsdp"),
    seq=None,
    residual_rows=("data", "fsdp"),
    residual_seq=None,
    act_embed=None,
    embed="fsdp",
    heads="tensor",
    kv_heads="tensor",
    attn_seq=None,
    attn_heads="tensor",
    attn_kv_heads="tensor",
    head=None,
    mlp="tensor",
    vocab="tensor",
    norm=None,
    layers=None,
)
CONTEXT = RULES.replace(
    seq="context",
    residual_seq=("context", "tensor"),
    attn_heads=("tensor", "context"),
    attn_kv_heads=("tensor", "context"),
)
LOSS_RTOL = 1e-6
GRADIENT_RTOL = 2e-5

both_axis_types = pytest.mark.parametrize("axis_types", ["explicit", "auto"])


@pytest.fixture(scope="module")
def batch():
    """Four packed rows of 16 tokens: tokens, targets, segments, positions."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 4, (4, 16)), axis=1).astype(np.int32)
    starts = np.where(np.diff(segments, prepend=0) > 0, np.arange(16), 0)
    positions = (np.arange(16) - np.maximum.accumulate(starts, axis=1)).astype(np.int32)
    tokens, targets = (rng.integers(0, 250, (4, 16)).astype(np.int32) for _ in range(2))
    return tokens, np.where(rng.random((4, 16)) < 0.1, -1, targets), segments, positions


def loss_of(params, batch, *, graphdef, run=forward):
    tokens, targets, segments, positions = batch
    documents = documents_of(segments, positions, max_documents=EXECUTION.max_documents)
    model = nnx.merge(graphdef, params)
    x, head, cap, *_ = run(model, tokens, documents=documents, execution=EXECUTION)
    loss = cross_entropy(x, head, targets, vocab_size=250, dtype=jnp.float32, cap=cap)
    return loss / np.float32(50)


@pytest.fixture(scope="module")
def built(batch):
    """`built("llama")`: graphdef, parameters, and (loss, gradients) on one device."""

    @functools.cache
    def built(name):
        graphdef, params = nnx.split(CONFIGS[name].build(nnx.Rngs(0)))
        alone = jax.jit(jax.value_and_grad(lambda p, b: loss_of(p, b, graphdef=graphdef)))
        return graphdef, params, alone(params, batch)

    return built


def assert_equal(mine, theirs):
    (loss, gradients), (expected, expected_gradients) = mine, theirs
    np.testing.assert_allclose(loss, expected, rtol=LOSS_RTOL)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(expected_gradients),
        strict=True,
    )
    for (path, gradient), wanted in pairs:
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(
            gradient, wanted, rtol=0, atol=GRADIENT_RTOL * scale, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize(
    "sizes", [dict(fsdp=2, context=4), dict(data=2, context=2, tensor=2), dict(context=4, tensor=2)]
)
@pytest.mark.parametrize("name", CONFIGS)
@both_axis_types
def test_with_the_sequence_split_loss_and_gradients_are_those_of_one_device(
    batch, built, name, sizes, axis_types
):
    """Heads are exchanged for sequence around attention; the loss sums over all axes of tokens."""
    graphdef, params, alone = built(name)
    rules = CONTEXT
    if CONFIGS[name].num_kv_heads % (sizes["context"] * sizes.get("tensor", 1)):
        rules = CONTEXT.replace(attn_kv_heads=None)
    with shd.use(shd.make_mesh(sizes, axis_types=axis_types), rules):
        placed = jax.device_put(params, shd.shardings(params))
        rows = jax.device_put(batch, shd.shardings(batch, "batch seq"))
        step = jax.jit(jax.value_and_grad(lambda p, b: loss_of(p, b, graphdef=graphdef)))
        assert_equal(step(placed, rows), alone)


@pytest.mark.parametrize("sizes", [dict(fsdp=4), dict(data=2, fsdp=2), dict(fsdp=2, tensor=2)])
@both_axis_types
def test_inside_a_region_that_is_manual_over_stages_they_are_too(batch, built, sizes, axis_types):
    """Each of two stages has half of the layers; the first passes its result on by a permute."""
    graphdef, params, alone = built("llama")
    mesh = shd.make_mesh(stage=2, **sizes, axis_types=axis_types)

    def staged(model, tokens, *, documents, execution):
        (stack,), x = model.stacks(), model.embed(tokens, execution)

        def region(weights, x, documents):
            mine = Stack(weights, stack.blocks, share=stack.share)
            for turn in range(2):
                out, _ = run_layers(mine, x, documents=documents, execution=execution)
                x = jax.lax.ppermute(out, "stage", [(0, 1), (1, 0)]) if turn == 0 else out
            is_last = jax.lax.axis_index("stage") == 1
            return jnp.where(is_last, x, jnp.zeros((), x.dtype))[None]

        specs = jax.tree.map(lambda _: P("stage"), stack.weights), P(), P()
        mapped = jax.shard_map(
            region, axis_names={"stage"}, in_specs=specs, out_specs=P("stage"), check_vma=False
        )
        return model.output(mapped(stack.weights, x, documents).sum(0))

    with shd.use(mesh, RULES.replace(layers="stage")):
        placed = jax.device_put(params, shd.shardings(params))
        rows = jax.device_put(batch, shd.shardings(batch, "batch seq"))
        step = jax.jit(
            jax.value_and_grad(lambda p, b: loss_of(p, b, graphdef=graphdef, run=staged))
        )
        assert_equal(step(placed, rows), alone)
