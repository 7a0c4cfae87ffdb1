"""Which device has which tokens of a row that is split."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Balance
from jaxscale.ops.deal import by_document, head_tail, order, rows_of

# Rows of 48 tokens: long and short documents, one alone, none; 0 is padding.
LENGTHS = ((24, 3, 3, 3, 15), (1, 1, 29, 10), (48,), ())


def segments_of(lengths=LENGTHS, seq_len: int = 48) -> np.ndarray:
    numbered = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    return np.array([np.pad(row, (0, seq_len - len(row))) for row in numbered], np.int32)


def looked_at(segments_RS, dealt_RS, *, size: int) -> np.ndarray:
    """[R, C]: pairs of a query and a key before it, in its document, on each device."""
    starts = np.array([[np.argmax(row == number) for number in row] for row in segments_RS])
    pairs = np.where(segments_RS > 0, np.arange(segments_RS.shape[1]) - starts + 1, 0)
    return np.take_along_axis(pairs, dealt_RS, axis=1).reshape(len(pairs), size, -1).sum(2)


def test_rows_are_dealt_from_both_ends():
    assert head_tail(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    # So that under a causal mask every device has as much to look at.
    looks = head_tail(64, 4).reshape(4, -1).sum(1) + 16
    assert len(set(looks)) == 1


@pytest.mark.parametrize("balance", Balance)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_dealt_once(balance, size):
    dealt = order(segments_of(), size, balance=balance)
    np.testing.assert_array_equal(np.sort(dealt, axis=1), np.tile(np.arange(48), (4, 1)))


@pytest.mark.parametrize("size", [2, 4])
def test_by_document_devices_have_as_much_to_look_at_whatever_the_lengths(size):
    segments = segments_of(((24, 3, 3, 3, 15), (1, 1, 29, 10)))
    mine = looked_at(segments, by_document(segments, size), size=size)
    rows = looked_at(segments, np.tile(head_tail(48, size), (2, 1)), size=size)
    # Of 24 * 25 / 2 + ... pairs; documents are cut at whole tokens.
    assert (mine.max(1) / mine.mean(1)).max() < 1.15
    assert (rows.max(1) / rows.mean(1)).max() > 1.3


def test_random_rows_are_dealt_by_document_as_the_devices_have_it():
    """What the host puts into a chunk is what the device says is there."""
    rng, size = np.random.default_rng(0), 3
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, 60), rng.integers(0, 9), replace=False))
        lengths = np.diff([0, *cuts, 60])
        kept = lengths[: rng.integers(1, len(lengths) + 1)]  # the rest is padding
        segments = segments_of((kept,), 60)
        chunks = by_document(segments, size).reshape(size, 2, -1)
        padded = jnp.asarray(np.pad(kept, (0, 10 - len(kept))))[None].astype(jnp.int32)
        rows = rows_of(padded, balance=Balance.DOCUMENT, num_devices=size, chunk=10)
        for device in range(size):
            for half, number in enumerate((device, 2 * size - 1 - device)):
                there = segments[0, chunks[device, half]]
                starts, counts, *_ = rows.inside(number)
                for document in range(len(kept)):
                    first, count = int(starts[0, document]), int(counts[0, document])
                    assert count == (there == document + 1).sum()
                    assert (there[first : first + count] == document + 1).all()
        numbers = np.argsort([0, 5, 1, 4, 2, 3])
        in_order = chunks.reshape(6, 10)[numbers].reshape(1, 1, 60, 1, 1)
        row = rows.in_row_order(jnp.asarray(in_order))
        np.testing.assert_array_equal(np.asarray(row).reshape(-1), np.arange(60))
        np.testing.assert_array_equal(np.asarray(rows.in_chunks(row)), in_order)
