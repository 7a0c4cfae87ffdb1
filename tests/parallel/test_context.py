"""Rows split over `context` train as whole rows on one device do, by each exchange."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.config import (
    Attention,
    Balance,
    ContextConfig,
    Dtype,
    Exchange,
    IntegrityConfig,
    validate,
)
from jaxscale.models import gemma, llama
from jaxscale.ops.attention import CUDNN_ENDS, attention
from jaxscale.ops.deal import order
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from jaxscale.ops.layers import LAYERS_AHEAD
from jaxscale.step.feed import device_batches
from jaxscale.step.layout import exchange_of
from jaxscale.step.plan import plan_of_run
from jaxscale.step.state import init_state
from jaxscale.step.update import held_out_loss
from jaxscale.train.sample import sample
from tests.step import conftest as step
from tests.step.alike import assert_trains_like

rows = step.rows

SIZES: dict[str, Any] = dict(
    vocab_size=step.VOCAB_SIZE, model_dim=64, num_heads=8, num_kv_heads=2, mlp_dim=96
)
GEMMA = gemma.Config(**SIZES, head_size=8, num_layers=3, global_every=2, window=5, score_cap=5.0)
# bfloat16: sums of 500 tokens' losses in another order, as tests/step/test_bfloat16.py has it. A
# ring's parts are rounded before they are merged, which whole rows are not: 1.3e-6 here (jax
# 0.11.2); held to what tests/step/test_layouts.py allows bfloat16.
BFLOAT16_RTOL = dict(all_to_all=1e-6, ring=2e-3)


@pytest.fixture(scope="module")
def run(rows):
    """`run(num_devices, exchange=, **config changes) -> Run`: as that of tests/step."""

    @functools.cache
    def run(num_devices: int = 8, **changes) -> step.Run:
        return step.train(config_of(**changes), rows, num_devices=num_devices)

    return run


def config_of(*, exchange: str = "auto", balance: str = "head_tail", **changes):
    config = step.small_config(**changes)
    config.data.max_documents_per_row = 16  # as the corpus of a run would say
    config.context = ContextConfig(exchange=Exchange(exchange), balance=Balance(balance))
    validate(config)
    return config


# Name -> devices, mesh, exchange and batch settings. There are 8 query heads over 2 key heads, so
# from context=4 on (or 2, with tensor=2) all-to-all shares them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "all_to_all 2, fsdp": dict(fsdp=4, context=2),
    "all_to_all 8, shared key heads": dict(fsdp=1, context=8),
    "all_to_all 2, tp2": dict(fsdp=2, tensor=2, context=2, sequence_parallel=False),
    "all_to_all 2, tp4 auto": dict(fsdp=1, tensor=4, context=2, axis_types="auto"),
    "all_to_all 2, hsdp accumulated": dict(data=2, fsdp=2, context=2, grad_accumulation=2),
    "all_to_all 2, zero1 accumulated": dict(fsdp=4, context=2, zero=1, grad_accumulation=2),
    "all_to_all 2, hsdp zero2": dict(data=2, fsdp=2, context=2, zero=2),
    "all_gather 4, dp": dict(data=2, fsdp=1, context=4, exchange="all_gather"),
    "all_gather 2, tp2 sp auto": dict(
        fsdp=2, tensor=2, context=2, exchange="all_gather", axis_types="auto"
    ),
    "ring 8": dict(fsdp=1, context=8, exchange="ring"),
    "ring 2, tp4 sp": dict(fsdp=1, tensor=4, context=2, exchange="ring"),
    "ring 2, tp4 sp along the sequence": dict(
        fsdp=1, tensor=4, context=2, exchange="ring", grad_accumulation=8
    ),
    "ring 4, zero2 accumulated": dict(
        fsdp=2, context=4, zero=2, grad_accumulation=2, exchange="ring"
    ),
    "ring 4 by document": dict(fsdp=2, context=4, exchange="ring", balance="document"),
    "all_gather 2, tp2 sp by document": dict(
        fsdp=2, tensor=2, context=2, exchange="all_gather", balance="document"
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_rows_start_the_same_and_train_the_same_as_on_one_device(run, layout):
    settings = LAYOUTS[layout]
    alone, here = run(1), run(**settings)
    for name, value in alone.initial.items():
        np.testing.assert_array_equal(here.initial[name], value, err_msg=name)
    dealt = np.broadcast_to(np.arange(32), alone.first_batch[0].shape)
    if "exchange" in settings:
        balance = Balance(settings.get("balance", "head_tail"))
        dealt = order(alone.first_batch[2], settings["context"], balance=balance)
    for mine, theirs in zip(here.first_batch, alone.first_batch, strict=True):
        np.testing.assert_array_equal(mine, np.take_along_axis(theirs, dealt, axis=1))
    assert_trains_like(here, alone)


UNROLLED: dict[str, dict[str, Any]] = {
    "all_to_all": dict(fsdp=4, context=2, remat="attention"),
    "ring": dict(fsdp=2, context=4, remat="attention_mlp", exchange="ring"),
}


@pytest.mark.parametrize("layout", UNROLLED)
def test_unrolled_lean_layers_train_the_same_too(run, layout):
    deep = dict(num_layers=LAYERS_AHEAD + 2, scan_unroll=LAYERS_AHEAD + 2)
    alone = run(1, num_layers=LAYERS_AHEAD + 2)
    assert_trains_like(run(**UNROLLED[layout], **deep), alone)


def test_windows_caps_and_a_tied_table_do_by_all_to_all(run):
    assert_trains_like(run(model=GEMMA, fsdp=2, context=4), run(1, model=GEMMA))


@pytest.mark.parametrize("exchange", BFLOAT16_RTOL)
def test_with_bfloat16_the_first_loss_and_gradients_are_those_of_one_device(run, exchange):
    wide = dict(dtype="bfloat16", reduce_dtype="float32")
    here = run(fsdp=4, context=2, exchange=exchange, **wide)
    alone = run(1, **wide)
    np.testing.assert_allclose(here.losses[0], alone.losses[0], rtol=BFLOAT16_RTOL[exchange])
    for name, moment in alone.first_moments.items():
        # Activations round at 4e-3, as with tensor parallelism (tests/step/test_reduce_dtype.py).
        distance = np.linalg.norm(here.first_moments[name] - moment) / np.linalg.norm(moment)
        assert distance < 1e-2, name


# What the rest of a run does.


@pytest.fixture(scope="module")
def looked_at(rows):
    """`looked_at(num_devices, ...)`: the held-out loss of a batch, and tokens sampled greedily."""

    def looked_at(num_devices=8, **changes):
        config = config_of(**changes)
        config.sample.temperature = 0.0
        plan = step.make_plan(config, num_devices)
        state = init_state(plan)
        with shd.use(plan.mesh, plan.rules):
            batch = next(device_batches(plan, rows, start=0))
            loss, _ = jax.jit(functools.partial(held_out_loss, plan=plan))(state, batch)
            prompt = np.array([5, 6, 7])
            return float(loss), sample(plan, state, prompt=prompt, num_tokens=12).tolist()

    return looked_at


@pytest.mark.parametrize("exchange", ["all_to_all", "ring"])
def test_evaluation_and_sampling_are_those_of_one_device(looked_at, exchange):
    # Large weights, so that a token's successor depends on more than itself.
    model = llama.Config(**SIZES, num_layers=2, init_scale=0.2)
    loss, tokens = looked_at(model=model, fsdp=2, context=4, exchange=exchange)
    expected_loss, expected_tokens = looked_at(1, model=model)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert tokens == expected_tokens and len(set(tokens)) > 3


def test_layers_on_halves_of_the_rows_evaluate_and_sample_alike(looked_at):
    model = llama.Config(**SIZES, num_layers=2, init_scale=0.2)
    loss, tokens = looked_at(model=model, fsdp=4, tensor=2, async_tensor="halves")
    expected_loss, expected_tokens = looked_at(1, model=model)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert tokens == expected_tokens


# Attention alone.

ATTENTION_RULES = shd.Rules(
    batch="data",
    seq="context",
    heads=None,
    attn_seq="context",
    attn_heads=None,
    attn_kv_heads=None,
    head=None,
)
# Documents that end where a chunk of 8 tokens does, inside, in the next; whole rows, none, padding.
LENGTHS = ((64,), (8, 8, 16, 1, 30, 1), (3, 20, 11, 9), ())


def attended(arrays, segments, *, exchange: str, balance: str = "head_tail"):
    """The output of attention over these rows, and the gradients of queries, keys and values."""
    execution = Execution(
        dtype=Dtype.FLOAT32,
        attention=Attention.XLA,
        exchange=Exchange(exchange),
        balance=Balance(balance),
        max_documents=6,
    )
    documents = documents_of(segments, segments, max_documents=6)

    @jax.jit
    def run(q, k, v, cotangent):
        options: dict[str, Any] = dict(documents=documents, execution=execution)
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return out, *vjp(cotangent)

    return run(*arrays)


@pytest.mark.parametrize("balance", Balance)
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("size", [2, 4])
def test_merged_parts_of_any_documents_are_the_whole_and_so_are_their_gradients(
    exchange, size, balance
):
    rng = np.random.default_rng(0)
    shape = dict(out=4, q=4, k=2, v=2)
    arrays = [
        rng.normal(size=(4, 64, shape[x], 8)).astype(np.float32) for x in ("q", "k", "v", "out")
    ]
    numbered = [np.repeat(np.arange(1, len(row) + 1), row) for row in LENGTHS]
    segments = np.array([np.pad(row, (0, 64 - len(row))) for row in numbered], np.int32)
    whole = attended(arrays, segments, exchange="all_to_all")
    places = order(segments, size, balance=balance)

    def deal(x):
        return np.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)

    with shd.use(shd.make_mesh(data=8 // size, context=size), ATTENTION_RULES):
        dealt = [jax.device_put(deal(x), shd.shardings(x, "batch seq _ _")) for x in arrays]
        placed = jax.device_put(deal(segments), shd.shardings(segments, "batch seq"))
        parts = attended(dealt, placed, exchange=exchange, balance=balance)
    for name, mine, theirs in zip(shape, parts, whole, strict=True):
        theirs = deal(np.asarray(theirs))
        np.testing.assert_allclose(mine, theirs, atol=5e-6, rtol=0, err_msg=name)


# Which exchange.

LARGE = llama.Config(
    vocab_size=512, model_dim=512, num_layers=1, num_heads=32, num_kv_heads=8, mlp_dim=64
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(context=1), "all_to_all"),
        (dict(context=8), "all_to_all"),
        (dict(context=16), "all_to_all"),  # a key head for two devices
        (dict(context=64), "ring"),  # more devices than heads, and than a node has
        (dict(context=8, tensor=8), "ring"),
        (dict(context=3), "all_gather"),
        (dict(context=3, seq_len=6 * 2**20), "ring"),
    ],
)
def test_auto_takes_all_to_all_where_heads_divide_and_a_ring_where_keys_are_many(changes, expected):
    config = config_of(model=LARGE)
    config.seq_len = changes.pop("seq_len", 384)
    sizes = dict.fromkeys(shd.MESH_AXES, 1) | changes
    assert exchange_of(config, sizes) == expected


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "seq_len": (dict(context=8, seq_len=36), r"config.seq_len=36: .*config.mesh.context=8"),
    "seq_len with sp": (
        dict(context=2, tensor=4, seq_len=36, batch_size=2),
        r"config.seq_len=36: .*config.mesh.context=2 \* config.mesh.tensor=4",
    ),
    "seq_len in chunks": (
        dict(context=4, seq_len=36, exchange="ring"),
        r"config.seq_len=36: .*'ring' .* 2 \* config.mesh.context = 8 chunks",
    ),
    "heads": (
        dict(context=4, model=dict(num_heads=6, head_size=8), exchange="all_to_all"),
        r"config.model.num_heads=6 .*context=4.*config.mesh.context to a divisor of 6, or "
        r"config.context.exchange='all_gather'",
    ),
    "key heads": (
        dict(
            context=4, model=dict(num_heads=24, num_kv_heads=6, head_size=8), exchange="all_to_all"
        ),
        r"config.model.num_kv_heads=6 .*context=4.* 6 query heads a device, 4 a key head",
    ),
    "model_dim": (
        dict(context=8, model=dict(model_dim=36, head_size=4)),
        r"config.model.model_dim=36 .*fsdp=1 \* context=8",
    ),
    "rows": (dict(data=2, context=4, batch_size=3), r"config.batch_size=3: .*data \* fsdp"),
    "a window": (
        dict(context=4, model=dict(window=4), exchange="ring"),
        r"config.model.window=4: .*'ring' .*config.context.exchange='all_to_all'",
    ),
    "a window, auto": (
        dict(context=8, model=dict(num_heads=4, window=4)),
        r"config.model.window=4 needs whole rows.*config.model.num_heads=4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_split_is_refused_with_the_key_and_a_fix(mistake):
    changes, message = MISTAKES[mistake]
    sizes = SIZES | dict(num_layers=1) | changes.pop("model", {})
    with pytest.raises(ValueError, match=message):
        plan_of_run(config_of(fsdp=-1, model=llama.Config(**sizes), **changes))


@pytest.mark.skipif(CUDNN_ENDS is None, reason="not seen with this jax")
@pytest.mark.parametrize(
    "changes", [dict(deterministic=True), dict(integrity=IntegrityConfig(replay_every=10))]
)
def test_cudnn_is_refused_where_it_would_end_the_process(changes):
    changes = changes | dict(fsdp=-1, context=4, attention=Attention.CUDNN)
    plan_of_run(config_of(**changes))  # all_to_all
    message = r"config.attention='cudnn' .*'ring' .*config.deterministic.*config.attention='auto'"
    with pytest.raises(ValueError, match=message):
        plan_of_run(config_of(exchange="ring", **changes))
