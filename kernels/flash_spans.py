"""Which queries see which keys, as spans, and which tiles of either that makes kernels visit.

Causal attention, windows, packed documents and parts of a ring are all the same to a kernel: query
i of a row sees keys first[i] <= j < last[i], and the queries that see a key are a span too. Tiles
outside of the spans are never read, and tiles inside of all of them need no mask.

B rows, S queries, T keys, M documents a row at most.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.kernels.xla_attention import places


class Spans(NamedTuple):
    """int32 [B, S] or [B, T], first <= last: the keys that a query sees, or the queries that see a
    key; none if its span is empty."""

    first: Any
    last: Any

    def padded(self, tile: int) -> "Spans":
        """To whole tiles of so many, with empty ones."""
        size = -self.first.shape[1] % tile
        return Spans(*(jnp.pad(x, ((0, 0), (0, size))) for x in self))


class Pairs(NamedTuple):
    """The queries and keys that belong together, from both sides."""

    keys_of_queries: Spans
    queries_of_keys: Spans

    def padded(self, tile: int) -> "Pairs":
        return Pairs(*(spans.padded(tile) for spans in self))


def of_segments(segments_BS, *, window: int | None) -> Pairs:
    """Of causal attention inside documents; 0 is padding. window: a token sees so many tokens."""
    seq = segments_BS.shape[1]
    token_S = jnp.arange(seq, dtype=jnp.int32)
    changes_BS = segments_BS[:, 1:] != segments_BS[:, :-1]
    begins_BS, ends_BS = (
        jnp.pad(changes_BS, ((0, 0), side), constant_values=True) for side in ((1, 0), (0, 1))
    )
    # One scan of rows and of rows turned over: each is three launches.
    starts_BS = (jnp.where(x_BS, token_S, 0) for x_BS in (begins_BS, ends_BS[:, ::-1]))
    first_BS, turned_BS = jnp.split(jax.lax.cummax(jnp.concatenate([*starts_BS]), axis=1), 2)
    end_BS = seq - turned_BS[:, ::-1]
    if window is not None:
        first_BS = jnp.maximum(first_BS, token_S - window + 1)
        end_BS = jnp.minimum(end_BS, token_S + window)
    is_real_BS = segments_BS > 0
    return Pairs(
        keys_of_queries=_spans_where(is_real_BS, first_BS, end=token_S + 1),
        queries_of_keys=_spans_where(is_real_BS, token_S, end=end_BS),
    )


def of_parts(parts, *, seq: int, num_keys: int, causal: bool) -> Pairs:
    """Of `partial_forward`: the queries of document m over the keys of document m."""
    queries, keys = (parts.q_starts_BM, parts.q_lengths_BM), (parts.k_starts_BM, parts.k_lengths_BM)
    document_BS, place_BS = places(*queries, seq=seq)
    start_BS, length_BS = _of_documents(keys, document_BS)
    document_BT, place_BT = places(*keys, seq=num_keys)
    start_BT, length_BT = _of_documents(queries, document_BT)
    num_seen_BS, num_before_BT = length_BS, jnp.int32(0)
    if causal:
        num_seen_BS = jnp.minimum(length_BS, place_BS + 1)
        num_before_BT = jnp.minimum(length_BT, place_BT)
    return Pairs(
        keys_of_queries=_spans_where(document_BS >= 0, start_BS, end=start_BS + num_seen_BS),
        queries_of_keys=_spans_where(
            document_BT >= 0, start_BT + num_before_BT, end=start_BT + length_BT
        ),
    )


def _of_documents(starts_and_lengths_BM, document_BS):
    """Of each token's document, any of a token that is of none."""
    mine_BS = jnp.maximum(document_BS, 0)
    return (jnp.take_along_axis(x_BM, mine_BS, axis=1) for x_BM in starts_and_lengths_BM)


def _spans_where(is_real, first, *, end) -> Spans:
    return Spans(*(jnp.where(is_real, x, 0) for x in (first, end)))


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


def tiles_seen(spans: Spans, *, size: int, num_seen: int, seen_size: int) -> Visits:
    """What each tile of `size` queries visits: tiles of `seen_size` of `num_seen` keys. Or what
    each tile of keys visits of the queries."""
    first, last = (x.reshape(x.shape[0], -1, size) for x in spans)
    sees = last > first
    begin = jnp.where(sees, first, num_seen).min(-1) // seen_size
    end = -(-jnp.where(sees, last, 0).max(-1) // seen_size)
    begin = jnp.minimum(begin, end)
    whole_begin = jnp.clip(-(-first.max(-1) // seen_size), begin, end)
    whole_end = jnp.clip(last.min(-1) // seen_size, whole_begin, end)
    return Visits(begin, end, whole_begin, whole_end)


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
