"""Which device has which tokens of a row that is split, so that all have as much to look at.

Under a causal mask a token looks at those before it, so a device gets two chunks of what it shares
with C - 1 others, one from the head and one from the tail: of 2 C chunks, i and 2 C - 1 - i.

HEAD_TAIL cuts rows (Llama 3, arXiv:2407.21783, section 3.3.2). All devices have the same work if
the row is one document, or if documents are short; a document of half a row is in half of the
chunks. Between two chunks at most one document reaches over.

DOCUMENT cuts each document of a row, and chunk j has the j-th piece of each: the same work whatever
the lengths. Document [start, end) gives chunk j (end + j) // 2C - (start + j) // 2C tokens: these
add up to its length, and over the documents to a 2C-th of the row (Hermite's identity).

R rows, B rows, S sequence, T tokens of all devices, M documents a row at most, P = 2: keys and
values, K key heads, H head size, C devices that share a row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxscale.config import Balance


class Parts(NamedTuple):
    """The parts of documents in some queries, and in the keys that they look at; int32 [B, M].

    Each of a kernel's documents is those queries and keys, and nothing else is looked at.
    """

    q_starts_BM: Any
    q_lengths_BM: Any
    k_starts_BM: Any
    k_lengths_BM: Any


# On the host.


def order(segments_RS: np.ndarray, num_devices: int, *, balance: Balance) -> np.ndarray:
    """int [R, S]: the tokens of each row in the order in which the devices hold them.

    segments_RS: the number of each token's document. S is a multiple of 2 * num_devices.
    """
    if balance == Balance.HEAD_TAIL:
        return np.broadcast_to(head_tail(segments_RS.shape[1], num_devices), segments_RS.shape)
    return by_document(segments_RS, num_devices)


def head_tail(seq_len: int, num_devices: int) -> np.ndarray:
    """int [seq_len]: for 2 devices and 4 chunks: 0, 3, then 1, 2."""
    return np.arange(seq_len).reshape(2 * num_devices, -1)[_chunks(num_devices)].reshape(-1)


def by_document(segments_RS: np.ndarray, num_devices: int) -> np.ndarray:
    """int [R, S]; padding is dealt as a document."""
    num_rows, seq_len = segments_RS.shape
    tokens = np.broadcast_to(np.arange(seq_len), segments_RS.shape)
    is_first = np.ones(segments_RS.shape, bool)
    is_first[:, 1:] = segments_RS[:, 1:] != segments_RS[:, :-1]
    starts = np.maximum.accumulate(np.where(is_first, tokens, 0), axis=1)
    is_last = np.roll(is_first, -1, axis=1)
    ends = np.where(is_last, tokens + 1, seq_len)[:, ::-1]
    ends = np.minimum.accumulate(ends, axis=1)[:, ::-1]
    places = _places(tokens, starts, ends=ends, num_chunks=2 * num_devices)
    in_chunks = np.empty_like(places)
    np.put_along_axis(in_chunks, places, tokens, axis=1)
    chunks = in_chunks.reshape(num_rows, 2 * num_devices, -1)
    return chunks[:, _chunks(num_devices)].reshape(num_rows, seq_len)


def _chunks(num_devices: int) -> np.ndarray:
    """The chunks' numbers, device after device."""
    first = np.arange(num_devices)
    return np.stack([first, 2 * num_devices - 1 - first], axis=1).reshape(-1)


def _before(end, chunk, *, num_chunks: int):
    """The tokens of a row up to `end` that the chunks before `chunk` have.

    The sum of (end + j) // num_chunks over j < chunk.
    """
    return chunk * (end // num_chunks) + (end % num_chunks + chunk - num_chunks).clip(0)


def _places(tokens, starts, *, ends, num_chunks: int):
    """Where in the chunks, in the order of their numbers, these tokens are.

    starts, ends: of the document of each token. seq_len is that of the last axis.
    """

    def before(chunk):
        mine = (_before(end, chunk, num_chunks=num_chunks) for end in (ends, starts))
        return next(mine) - next(mine)

    place = tokens - starts
    chunk = sum((before(j) <= place).astype(place.dtype) for j in range(1, num_chunks))
    length = tokens.shape[-1] // num_chunks
    return chunk * length + (starts + chunk) // num_chunks + place - before(chunk)


# On the devices.


def rows_of(lengths_BM, *, balance: Balance, num_devices: int, chunk: int) -> "Rows":
    """lengths_BM: of the documents of whole rows, in order. chunk: its tokens."""
    kind = {Balance.HEAD_TAIL: HeadTail, Balance.DOCUMENT: ByDocument}[balance]
    ends_BM = jnp.cumsum(lengths_BM, axis=1, dtype=jnp.int32)
    return kind(ends_BM - lengths_BM, ends_BM, 2 * num_devices, chunk)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each document begins and ends, in tokens of the whole row; int32 [B, M]."""

    starts_BM: Any
    ends_BM: Any
    num_chunks: int
    chunk: int

    def inside(self, number) -> Parts:
        """Queries and keys of one chunk."""
        raise NotImplementedError

    def across(self, queries, keys) -> Parts:
        """Queries of a chunk, and keys of one before it."""
        raise NotImplementedError

    def before(self, number) -> Parts:
        """Queries of a chunk, and the keys of all before it, which are in the row's order."""
        raise NotImplementedError

    def in_row_order(self, chunks_PBTKH):
        """Out of the order of the chunks' numbers."""
        raise NotImplementedError

    def in_chunks(self, row_PBTKH):
        """The inverse of `in_row_order`."""
        raise NotImplementedError


class HeadTail(Rows):
    """Chunk j is the j-th piece of the row."""

    def inside(self, number) -> Parts:
        first = number * self.chunk
        starts_BM, ends_BM = (
            jnp.clip(x - first, 0, self.chunk) for x in (self.starts_BM, self.ends_BM)
        )
        return Parts(starts_BM, ends_BM - starts_BM, starts_BM, ends_BM - starts_BM)

    def across(self, queries, keys) -> Parts:
        return self._across(queries, keys * self.chunk, num_keys=self.chunk)

    def before(self, number) -> Parts:
        return self._across(number, 0, num_keys=self.num_chunks * self.chunk)

    def _across(self, queries, keys_from, *, num_keys: int) -> Parts:
        """num_keys keys from `keys_from` on, before the chunk of the queries.

        One document: the one that goes on in the chunk.
        """
        first = queries * self.chunk
        goes_on_BM = (self.starts_BM < first) & (self.ends_BM > first)
        start_B1, end_B1 = (
            jnp.where(goes_on_BM, x, 0).sum(1, dtype=jnp.int32, keepdims=True)
            for x in (self.starts_BM, self.ends_BM)
        )
        last = jnp.minimum(first, keys_from + num_keys) - keys_from
        k_start_B1 = jnp.clip(start_B1 - keys_from, 0, last)
        is_seen_B1 = goes_on_BM.any(1, keepdims=True) & (k_start_B1 < last)
        q_length_B1 = jnp.minimum(end_B1 - first, self.chunk)
        parts = jnp.zeros_like(start_B1), q_length_B1, k_start_B1, last - k_start_B1
        # And an empty one: jax hands cuDNN no starts where there is one document.
        return Parts(*(jnp.pad(jnp.where(is_seen_B1, x, 0), ((0, 0), (0, 1))) for x in parts))

    def in_row_order(self, chunks_PBTKH):
        return chunks_PBTKH

    def in_chunks(self, row_PBTKH):
        return row_PBTKH


class ByDocument(Rows):
    """Chunk j is the j-th piece of each document."""

    def inside(self, number) -> Parts:
        mine = self._pieces(number)
        return Parts(*mine, *mine)

    def across(self, queries, keys) -> Parts:
        return self._seen(queries, self._pieces(keys))

    def before(self, number) -> Parts:
        ends, starts = (
            _before(x, number, num_chunks=self.num_chunks) for x in (self.ends_BM, self.starts_BM)
        )
        return self._seen(number, (self.starts_BM, ends - starts))

    def _pieces(self, number):
        """Start and length of each document's in a chunk."""
        starts_BM, ends_BM = (
            (x + number) // self.num_chunks for x in (self.starts_BM, self.ends_BM)
        )
        return starts_BM, ends_BM - starts_BM

    def _seen(self, queries, keys) -> Parts:
        q_starts_BM, q_lengths_BM = self._pieces(queries)
        # Queries without keys are no part of the call.
        return Parts(q_starts_BM, jnp.where(keys[1] > 0, q_lengths_BM, 0), *keys)

    def in_row_order(self, chunks_PBTKH):
        return self._taken(chunks_PBTKH, self._places_BT())

    def in_chunks(self, row_PBTKH):
        places_BT = self._places_BT()
        tokens_BT = jnp.broadcast_to(jnp.arange(places_BT.shape[1]), places_BT.shape)
        rows_B1 = jnp.arange(places_BT.shape[0])[:, None]
        inverse_BT = jnp.zeros_like(tokens_BT).at[rows_B1, places_BT].set(tokens_BT)
        return self._taken(row_PBTKH, inverse_BT)

    def _taken(self, x_PBTKH, places_BT):
        return jnp.take_along_axis(x_PBTKH, places_BT[None, :, :, None, None], axis=2)

    def _places_BT(self):
        """Of the row's tokens in the chunks. Padding is the document after the last."""
        size = self.num_chunks * self.chunk
        total_B1 = self.ends_BM[:, -1:]
        starts_BM = jnp.concatenate([self.starts_BM, total_B1], axis=1)
        ends_BM = jnp.concatenate([self.ends_BM, jnp.full_like(total_B1, size)], axis=1)
        tokens_T = jnp.arange(size, dtype=jnp.int32)
        number_BT = (self.ends_BM[:, None, :] <= tokens_T[:, None]).sum(2, dtype=jnp.int32)
        starts_BT, ends_BT = (
            jnp.take_along_axis(x, number_BT, axis=1) for x in (starts_BM, ends_BM)
        )
        tokens_BT = jnp.broadcast_to(tokens_T, starts_BT.shape)
        return _places(tokens_BT, starts_BT, ends=ends_BT, num_chunks=self.num_chunks)
