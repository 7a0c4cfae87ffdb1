"""Spans are those of the masks, and no tile that somebody sees is left out."""

import numpy as np
import pytest

from jaxscale.kernels import flash_spans
from jaxscale.kernels.flash_spans import Pairs, Spans, Work
from jaxscale.kernels.xla_attention import visible

SEQ, TILE_Q, TILE_K = 512, 64, 128


def segments_of(*lengths):
    row = np.repeat(1 + np.arange(len(lengths)), lengths)
    return np.pad(row, (0, SEQ - len(row)))[None].astype(np.int32)


SEGMENTS = {
    "one document": segments_of(SEQ),
    "padding": segments_of(300),
    "nothing but padding": segments_of(),
    "documents": segments_of(100, 1, 27, 128, 256),
    "one-token documents": segments_of(*[1] * 200, 312),
    "padding inside": np.repeat([[1, 0, 2]], [130, 126, 256], axis=1).astype(np.int32),
}
CASES = [(name, window) for name in SEGMENTS for window in (None, 1, 100)]


def seen(spans: Spans):
    """bool [S, T] of the only row, or [T, S]."""
    first, last = (np.asarray(x)[0][:, None] for x in spans)
    key = np.arange(SEQ)
    return (key >= first) & (key < last)


def assert_pairs_are(pairs: Pairs, expected):
    np.testing.assert_array_equal(seen(pairs.keys_of_queries), expected)
    np.testing.assert_array_equal(seen(pairs.queries_of_keys), expected.T)
    for spans in pairs:
        assert (np.asarray(spans.first) <= np.asarray(spans.last)).all()


@pytest.mark.parametrize(("name", "window"), CASES)
def test_spans_are_those_of_causal_documents(name, window):
    pairs = flash_spans.of_segments(SEGMENTS[name], window=window)
    assert_pairs_are(pairs, np.asarray(visible(SEGMENTS[name], window))[0])


@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.parametrize("by", ["queries", "keys"])
def test_every_tile_that_is_seen_is_visited_and_whole_ones_hide_nothing(name, window, by):
    pairs = flash_spans.of_segments(SEGMENTS[name], window=window)
    size, seen_size = (TILE_Q, TILE_K) if by == "queries" else (TILE_K, TILE_Q)
    spans = pairs.keys_of_queries if by == "queries" else pairs.queries_of_keys
    visits = flash_spans.tiles_seen(spans, size=size, num_seen=SEQ, seen_size=seen_size)
    visits = np.asarray(visits.stacked())[0]
    tiles = seen(spans).reshape(SEQ // size, size, SEQ // seen_size, seen_size)
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    for row, (begin, end, whole_begin, whole_end) in enumerate(visits):
        assert 0 <= begin <= whole_begin <= whole_end <= end <= some.shape[1]
        assert set(np.flatnonzero(some[row])) <= set(range(begin, end))
        assert every[row, whole_begin:whole_end].all()
        # Causal spans without a window have no gaps, so nothing is visited in vain.
        if window is None:
            assert end - begin == some[row].sum()
        work = Work(begin, end, whole_begin, whole_end)
        order = [int(work.tile(i)) for i in range(int(work.num))]
        assert sorted(order) == list(range(begin, end))
        assert order[: int(work.num_whole)] == list(range(whole_begin, whole_end))


@pytest.mark.parametrize("causal", [True, False])
def test_parts_are_documents_over_documents_that_stand_elsewhere(causal):
    class Parts:
        q_starts_BM = np.array([[0, 10, 30]], np.int32)
        q_lengths_BM = np.array([[10, 20, 0]], np.int32)
        k_starts_BM = np.array([[5, 100, 0]], np.int32)
        k_lengths_BM = np.array([[10, 300 if not causal else 20, 0]], np.int32)

    pairs = flash_spans.of_parts(Parts, seq=SEQ, num_keys=SEQ, causal=causal)
    expected = np.zeros((SEQ, SEQ), bool)
    for start, length, k_start, k_length in zip(
        *(
            getattr(Parts, name)[0]
            for name in ("q_starts_BM", "q_lengths_BM", "k_starts_BM", "k_lengths_BM")
        ),
        strict=True,
    ):
        for place in range(length):
            expected[start + place, k_start : k_start + (place + 1 if causal else k_length)] = True
    assert_pairs_are(pairs, expected)
