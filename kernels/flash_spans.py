"""Which keys a query sees, as a span, and which tiles of keys and queries that makes kernels visit.

Causal attention, windows, packed documents and parts of a ring are all the same to a kernel: query
i of a row sees keys first[i] <= j < last[i]. Tiles outside of the spans are never read, and tiles
inside of all of them need no mask.

B rows, S queries, T keys, M documents a row at most.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.kernels.xla_attention import places


class Spans(NamedTuple):
    """int32 [B, S], first <= last; a query whose span is empty sees nothing."""

    first_BS: Any
    last_BS: Any

    def padded(self, size: int) -> "Spans":
        """With `size` queries more, which see nothing."""
        return Spans(*(jnp.pad(x_BS, ((0, 0), (0, size))) for x_BS in self))


def of_segments(segments_BS, *, window: int | None) -> Spans:
    """Of causal attention inside documents; 0 is padding. window: a token sees so many tokens."""
    token_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    begins_BS = segments_BS != jnp.pad(segments_BS, ((0, 0), (1, 0)))[:, :-1]
    first_BS = jax.lax.cummax(jnp.where(begins_BS, token_S, 0), axis=1)
    if window is not None:
        first_BS = jnp.maximum(first_BS, token_S - window + 1)
    is_real_BS = segments_BS > 0
    return Spans(jnp.where(is_real_BS, first_BS, 0), jnp.where(is_real_BS, token_S + 1, 0))


def of_parts(parts, *, seq: int, causal: bool) -> Spans:
    """Of `partial_forward`: the queries of document m over the keys of document m."""
    document_BS, place_BS = places(parts.q_starts_BM, parts.q_lengths_BM, seq=seq)
    mine_BS = jnp.maximum(document_BS, 0)
    start_BS = jnp.take_along_axis(parts.k_starts_BM, mine_BS, axis=1)
    length_BS = jnp.take_along_axis(parts.k_lengths_BM, mine_BS, axis=1)
    if causal:
        length_BS = jnp.minimum(length_BS, place_BS + 1)
    is_real_BS = document_BS >= 0
    first_BS = jnp.where(is_real_BS, start_BS, 0)
    return Spans(first_BS, jnp.where(is_real_BS, start_BS + length_BS, 0))


class Visits(NamedTuple):
    """Tiles from `begin` to `end` are visited; of these, `whole_begin` to `whole_end` have no pair
    of a query and a key that is hidden. int32, [B, tiles]."""

    begin: Any
    end: Any
    whole_begin: Any
    whole_end: Any

    def one_at_least(self, num_tiles: int) -> "Visits":
        """Of `num_tiles`: with one for each tile that would visit none."""
        begin = jnp.minimum(self.begin, num_tiles - 1)
        return self._replace(begin=begin, end=jnp.maximum(self.end, begin + 1))

    def stacked(self):
        """int32 [B, tiles, 4], as a kernel reads them."""
        return jnp.stack(self, axis=-1).astype(jnp.int32)


def tiles_of_keys(spans: Spans, *, num_keys: int, tile_q: int, tile_k: int) -> Visits:
    """What each tile of queries visits."""
    first, last = (x.reshape(x.shape[0], -1, tile_q) for x in spans)
    sees = last > first
    begin = jnp.where(sees, first, num_keys).min(-1) // tile_k
    end = -(-jnp.where(sees, last, 0).max(-1) // tile_k)
    begin = jnp.minimum(begin, end)
    whole_begin = jnp.clip(-(-first.max(-1) // tile_k), begin, end)
    whole_end = jnp.clip(last.min(-1) // tile_k, whole_begin, end)
    return Visits(begin, end, whole_begin, whole_end)


def tiles_of_queries(spans: Spans, *, num_keys: int, tile_q: int, tile_k: int) -> Visits:
    """What each tile of keys visits: the transpose of `tiles_of_keys`."""
    by_queries = tiles_of_keys(spans, num_keys=num_keys, tile_q=tile_q, tile_k=tile_k)
    begin, end, whole_begin, whole_end = (x[:, None] for x in by_queries)
    tile = jnp.arange(num_keys // tile_k)[:, None]
    begin, end, _ = _hull((begin <= tile) & (tile < end))
    whole_begin, whole_end, has_gaps = _hull((whole_begin <= tile) & (tile < whole_end))
    whole_begin, whole_end = (jnp.where(has_gaps, begin, x) for x in (whole_begin, whole_end))
    whole_begin = jnp.clip(whole_begin, begin, end)
    return Visits(begin, end, whole_begin, jnp.clip(whole_end, whole_begin, end))


def _hull(chosen):
    """(first, one past the last, whether some between are not) of bool [..., tiles]."""
    tiles = chosen.shape[-1]
    tile = jnp.arange(tiles)
    end = jnp.where(chosen, tile + 1, 0).max(-1)
    begin = jnp.minimum(jnp.where(chosen, tile, tiles).min(-1), end)
    return begin, end, chosen.sum(-1) < end - begin


class Work(NamedTuple):
    """A program's row of `Visits.stacked()`, inside a kernel. Tiles without a mask come first."""

    begin: Any
    end: Any
    whole_begin: Any
    whole_end: Any

    @property
    def num(self):
        return self.end - self.begin

    @property
    def num_whole(self):
        return self.whole_end - self.whole_begin

    def tile(self, i, is_whole: bool | None = None):
        """The number of the ith tile to visit. is_whole: whether it is one without a mask, if that
        is known."""
        before, i_of_rest = self.whole_begin - self.begin, i - self.num_whole
        rest = jnp.where(
            i_of_rest < before, self.begin + i_of_rest, self.whole_end + i_of_rest - before
        )
        is_whole = i < self.num_whole if is_whole is None else is_whole
        return jnp.where(is_whole, self.whole_begin + i, rest)
