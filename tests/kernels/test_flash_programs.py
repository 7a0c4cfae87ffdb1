"""Flash attention's programs against float64 and XLA in float32: interpreted, with their races
looked for, where no GPU is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import (
    flash_attention,
    flash_backward_keys,
    flash_dealt,
    flash_dq_sums,
    flash_forward,
    flash_forward_dealt,
    flash_spans,
    hopper,
)
from jaxscale.kernels.flash_forward import LOG2_E
from jaxscale.kernels.xla_attention import reference
from jaxscale.ops.documents import documents_of
from tests.kernels.mosaic import IS_GPU, as_held, interpreted, plgpu

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < hopper.JAX, reason="jax has no interpreter of Mosaic GPU for it"
)
# Of the whole array's norm: bfloat16 rounds p and ds at 2e-3.
RTOL = 5e-3
# Tokens, query heads, key heads, lengths of documents (padding behind them), window. Head size 64
# has programs of 256 queries, and of 128 where tokens in whole tiles of 128 are no multiple of it.
CASES = {
    "one document": (512, 1, 1, [512], None),
    "documents, padding, shared keys": (512, 2, 1, [100, 1, 27, 300], None),
    # Of the first tile of keys each warpgroup has a document, and so no more than half of a step.
    "a document each": (384, 2, 1, [64, 200, 50], None),
    "window": (512, 1, 1, [512], 70),
    "no whole tiles": (200, 2, 2, [120, 70], None),
    "three tiles of 128": (384, 1, 1, [384], None),
    "nothing but padding": (256, 1, 1, [], None),
    "padding, shared keys": (512, 2, 1, [300], None),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that each goes from tile to tile, on a GPU too."""
    monkeypatch.setattr(flash_dealt, "PROGRAMS", 2)


def operands(name, sizes=(64, 64)):
    """q, k, v and the gradient of what comes out, then segments [1, S] and the window."""
    seq, heads, kv_heads, lengths, window = CASES[name]
    size, v_size = sizes
    shapes = (heads, size), (kv_heads, size), (kv_heads, v_size), (heads, v_size)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, seq, *shape)), jnp.bfloat16) for shape in shapes]
    row = np.repeat(1 + np.arange(len(lengths)), lengths)
    return arrays, np.pad(row, (0, seq - len(row)))[None].astype(np.int32), window


def forward(q, k, v, segments, window=None, cap=None, **options: Any):
    pairs = flash_spans.of_segments(segments, window=window)
    options |= dict(pairs=pairs, scale=q.shape[-1] ** -0.5, cap=cap)
    with interpreted():
        found = flash_attention._forward(q, k, v, **options)
        return [np.asarray(x, np.float64) for x in found]


def expected(q, k, v, segments, window=None, cap=None):
    """(output, log-sum-exp) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
    s = s if cap is None else cap * np.tanh(s / cap)
    spans = flash_spans.of_segments(segments, window=window).keys_of_queries
    first, last = (np.asarray(x) for x in spans)
    key = np.arange(q.shape[1])
    seen = (key >= first[..., None]) & (key < last[..., None])
    s = np.where(seen[:, None], s, -np.inf)
    largest = np.maximum(s.max(-1, keepdims=True), -1e30)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    p /= np.maximum(total, 1e-30)
    return np.einsum("bnst,btnv->bsnv", p, v), np.where((last > first)[:, None], lse, -np.inf)


def assert_forward_is(found, wanted):
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    assert np.linalg.norm(out - wanted_out) <= RTOL * np.linalg.norm(wanted_out)
    # A GPU's exp and log are approximate.
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_head_size_64_forward(name):
    (q, k, v, _), segments, window = operands(name)
    assert_forward_is(forward(q, k, v, segments, window), expected(q, k, v, segments, window))


@pytest.mark.parametrize("name", CASES)
def test_head_size_128_forward(name):
    (q, k, v, _), segments, window = operands(name, (128, 128))
    assert_forward_is(forward(q, k, v, segments, window), expected(q, k, v, segments, window))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_forward_with_a_cap_and_of_other_head_sizes(sizes):
    (q, k, v, _), segments, window = operands("no whole tiles", sizes)
    cap = 2.0 if sizes[0] != 192 else None
    # The GPU's tanh is right to 5e-4 of itself, which moves a log-sum-exp by as much.
    out, lse = forward(q, k, v, segments, window, cap)
    wanted_out, wanted_lse = expected(q, k, v, segments, window, cap)
    assert np.linalg.norm(out - wanted_out) <= RTOL * np.linalg.norm(wanted_out)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-3 if cap else 1e-4)


def with_scores_above(
    powers: float, *, size, name="one document", rows=slice(None), heads=slice(None)
):
    """In one document: keys from 150 on score so many powers of 2 above the first tile's, those
    from 290 on as many more. rows, heads: of these queries only."""
    (q, k, v, _), segments, _ = operands(name, (size, size))
    q, k = (np.array(x, np.float64) for x in (q, k))
    q[..., 0], k[..., 0] = 0, 0
    q[:, rows, heads, 0] = size**0.5
    k[:, 150:, :, 0] = powers / LOG2_E
    k[:, 290:, :, 0] = 2 * powers / LOG2_E
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, k)), v, segments


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("powers", [20.0, 100.0, 300.0])
@pytest.mark.parametrize("rows", [slice(None), [300]])
def test_scores_far_above_those_of_the_first_tile(powers, rows, *, size):
    """With 20 the first tile's scores do as the reference, with 100 sums of p say that they do not,
    with 300 p is infinite. In the one row there is, the tile with a mask shrinks sums to nothing,
    which would hide it."""
    q, k, v, segments = with_scores_above(powers, size=size, rows=rows)
    found = forward(q, k, v, segments)
    assert np.isfinite(found[0]).all()
    assert_forward_is(found, expected(q, k, v, segments))


@pytest.mark.parametrize("notes", [1024, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_one_of_two_heads_that_share_tiles_of_keys_is_made_again(head, notes, monkeypatch):
    """By itself, as the other's program is done by then. With one note for all tiles all of them
    are made again."""
    monkeypatch.setattr(flash_forward_dealt, "NOTES", notes)
    above = dict(size=128, name="padding, shared keys", heads=[head])
    q, k, v, segments = with_scores_above(300.0, **above)
    assert hopper.heads_together(q.shape[2], k.shape[2], head_size=128) == 2
    found = forward(q, k, v, segments)
    assert np.isfinite(found[0]).all()
    assert_forward_is(found, expected(q, k, v, segments))


def gradients(name, sizes=(64, 64), **options: Any):
    """(ours, those of XLA in float32) of q, k and v."""
    (*qkv, cotangent), segments, window = operands(name, sizes)
    documents = documents_of(segments, segments, max_documents=8)
    options |= dict(documents=documents, scale=sizes[0] ** -0.5, window=window)
    with interpreted():
        attention = functools.partial(flash_attention.attention, **options)
        found = [np.asarray(x) for x in jax.vjp(attention, *qkv)[1](cotangent)]
    options.pop("deterministic", None)
    wide = [x.astype(jnp.float32) for x in (*qkv, cotangent)]
    with jax.default_matmul_precision("highest"):
        pull = jax.vjp(functools.partial(reference, **options), *wide[:3])[1]
        return found, pull(wide[3])


def assert_gradients_are(found, wanted):
    for name, mine, theirs in zip("qkv", found, wanted, strict=True):
        mine, theirs = (np.asarray(x, np.float64) for x in (mine, theirs))
        assert np.linalg.norm(mine - theirs) <= 2 * RTOL * np.linalg.norm(theirs), name


@pytest.mark.parametrize("name", CASES)
def test_head_size_64_backward(name):
    assert_gradients_are(*gradients(name))


@pytest.mark.parametrize(
    "name", ["documents, padding, shared keys", "a document each", "window", "no whole tiles"]
)
def test_head_size_128_backward(name):
    assert_gradients_are(*gradients(name, (128, 128)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_backward_with_a_cap_and_of_other_head_sizes(sizes, deterministic):
    if sizes[0] > 128 and deterministic:
        pytest.skip("the same programs")
    cap = 2.0 if sizes[0] != 192 else None
    assert_gradients_are(*gradients("no whole tiles", sizes, cap=cap, deterministic=deterministic))


# Steps without a mask and with one, none at all, and several heads: what is added a step late.
LATE = [
    ("one document", (256, 256)),
    ("documents, padding, shared keys", (192, 128)),
    ("nothing but padding", (256, 256)),
    ("window", (128, 128)),
    ("a document each", (128, 128)),
    ("one document", (64, 64)),
    ("documents, padding, shared keys", (64, 64)),
    ("nothing but padding", (64, 64)),
    ("three tiles of 128", (64, 64)),
    ("window", (64, 64)),
]


@pytest.mark.parametrize(("name", "sizes"), LATE)
def test_backward_with_sums_a_step_late(name, sizes):
    assert_gradients_are(*gradients(name, sizes, deterministic=True))


TOKEN = 50  # of the first document of 120
BAD = [("q", np.nan), ("q", np.inf), ("k", np.nan), ("k", np.inf), ("v", np.inf)]


@pytest.mark.parametrize(("name", "bad"), BAD)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_what_is_not_finite_spoils_what_sees_it_and_no_other_head(name, bad, *, size):
    arrays, segments, _ = operands("no whole tiles", (size, size))
    token = np.arange(segments.shape[1])
    of_document = segments[0] == 1
    of_query = token == TOKEN if name == "q" else of_document & (token >= TOKEN)
    if name == "k" and bad == np.inf:  # else the score is -inf, and its p is 0
        of_query &= np.asarray(arrays[0][0, :, 0, 3] > 0)
    of_key = of_document & (token <= np.flatnonzero(of_query).max())
    spoiled = dict(out=of_query, dq=of_query, dk=of_key, dv=of_key)
    if name == "v":
        spoiled["dv"] = np.zeros_like(of_key)  # p does not depend on it
    where = "qkv".index(name)
    arrays[where] = arrays[where].at[0, TOKEN, 0, 3].set(bad)

    documents = documents_of(segments, segments, max_documents=8)
    options: dict[str, Any] = dict(documents=documents, scale=size**-0.5)
    with interpreted(), np.errstate(all="ignore"):
        out, pull = jax.vjp(functools.partial(flash_attention.attention, **options), *arrays[:3])
        made = dict(zip(spoiled, (out, *pull(arrays[3])), strict=True))
    for what, tokens in spoiled.items():
        is_finite = np.isfinite(np.asarray(made[what], np.float64)[0]).all(axis=-1)
        assert is_finite[:, 1].all(), what
        assert not is_finite[tokens, 0].any(), what
        assert tokens.any() or is_finite[:, 0].all(), what


DOCUMENTS = [100, 996, 2000, 1000]


# most: what the busiest may have, of the mean; of documents of one row it makes two tiles.
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("heads_at_once", [16, 4])
@pytest.mark.parametrize(
    ("lengths", "num_rows", "most"),
    [([4096], 1, 1.04), ([4096], 4, 1.04), (DOCUMENTS, 1, 1.2), (DOCUMENTS, 4, 1.04)],
)
def test_tiles_are_dealt_once_and_evenly(
    lengths, num_rows, most, heads_at_once, together, monkeypatch
):
    monkeypatch.setattr(flash_dealt, "PROGRAMS", 132)
    heads, tiles = 16, 16
    segments = np.tile(np.repeat(1 + np.arange(len(lengths)), lengths), (num_rows, 1))
    pairs = flash_spans.of_segments(jnp.asarray(segments, jnp.int32), window=None)
    spans = pairs.keys_of_queries
    visits = flash_spans.tiles_seen(spans, size=256, num_seen=4096, seen_size=64)
    head_bytes = flash_dealt.L2_BYTES // heads_at_once
    dealt = flash_dealt.deal(visits, num_heads=heads, head_bytes=head_bytes, together=together)
    table, counts = np.asarray(dealt.table), dealt.num_of(np.arange(132 // together))
    own = [items[:count] for items, count in zip(table, counts, strict=True)]
    places = {tuple(item[:3]) for items in own for item in items}
    assert len(places) == sum(map(len, own)) == num_rows * heads // together * tiles
    assert {head for _, head, _ in places} == set(range(0, heads, together))
    stacked = np.asarray(visits.stacked())
    assert all((stacked[row, tile] == work).all() for row, _, tile, *work in table.reshape(-1, 7))
    busy = [(items[:, 4] - items[:, 3] + 4).sum() for items in own]
    assert max(busy) < most * np.mean(busy)
    assert all((np.diff(items[:, 1] // heads_at_once) >= 0).all() for items in own)


@pytest.mark.skipif(IS_GPU, reason="a GPU looks for no races")
def test_a_program_that_does_not_wait_for_the_other_of_its_cluster_is_found(monkeypatch):
    def of_one(together, **options):
        return plgpu.Barrier(**options)

    monkeypatch.setattr(flash_forward_dealt, "barrier_of_cluster", of_one)
    (q, k, v, _), segments, window = operands("padding, shared keys", (128, 128))
    with pytest.raises(AssertionError, match="may still read"):
        forward(q, k, v, segments, window)


def test_two_heads_go_together_where_an_even_number_shares_a_key_head():
    def together(head_size):
        heads = (32, 8), (16, 8), (12, 4), (16, 16)
        return [hopper.heads_together(*each, head_size=head_size) for each in heads]

    assert together(128) == together(256) == [2, 2, 1, 1]
    assert together(64) == [1, 1, 1, 1]


@pytest.mark.parametrize("num_columns", [32, 64])
def test_columns_of_dq_come_back_in_order(num_columns):
    shape = 2, 128, 3, 128
    rows = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    tiles = rows.reshape(2, 2, 64, 3, 128 // num_columns, num_columns).transpose(0, 3, 1, 4, 2, 5)
    held = np.stack([as_held(part) for part in tiles.reshape(-1, 64, num_columns)])
    sums = held.reshape(flash_dq_sums.shape_of(shape, num_columns=num_columns))
    np.testing.assert_array_equal(flash_dq_sums.in_order(jnp.asarray(sums)), rows)


@pytest.mark.skipif(IS_GPU, reason="a GPU looks for no races")
def test_ds_that_is_written_before_it_was_read_is_found(monkeypatch):
    def hand_over(self, ds, slot):
        self.here.ds_tiles.at[slot, self.mine()][...] = ds
        plgpu.barrier_wait(self.here.ds_used.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.here.ds_made.at[slot])

    monkeypatch.setattr(flash_backward_keys.OfKeys, "hand_over", hand_over)
    with pytest.raises(AssertionError):
        gradients("one document")


def test_the_form_of_head_size_64_takes_whole_tiles_without_a_cap():
    def form(*, head_size=64, seq=512, cap=None):
        tiles = flash_forward.tiles_of(head_size, seq=seq, cap=cap)
        return tiles.warpgroups, tiles.keeps_reference

    assert form() == (4, True)
    assert form(seq=384) == form(head_size=128) == (2, True)
    # Programs of larger heads make one tile of queries, and cannot begin it again.
    assert form(cap=30.0) == form(head_size=128, cap=30.0) == form(head_size=192) == (2, False)
