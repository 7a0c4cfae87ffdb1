import types

import numpy as np
import pytest

from jaxscale.data import Batch, TokenRows

SEQ_LEN = 16


def store_of_lengths(lengths, dtype=np.int32):
    """A store in memory whose token ids count up: an id says where in the store it stands."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return types.SimpleNamespace(
        tokens=np.arange(offsets[-1], dtype=dtype), document_offsets=offsets, name="memory"
    )


def some_store(*, count=40, longest=30, seed=0):
    return store_of_lengths(np.random.default_rng(seed).integers(1, longest + 1, count))


def open_rows(store, **options):
    options = {"seq_len": SEQ_LEN, "seed": 0, "vocab_size": 2**20, "eval_fraction": 0} | options
    return TokenRows(store, **options)


def packed_slowly(store, start, *, first, last, max_documents):
    """One row, token by token: walks the tokens of documents [first, last) in a circle."""
    place = [
        (document, token)
        for document in range(first, last)
        for token in range(store.document_offsets[document], store.document_offsets[document + 1])
    ]
    at = start - place[0][1]
    tokens, targets, segments, positions = [], [], [], []
    segment = position = 0
    for step in range(SEQ_LEN):
        document, token = place[(at + step) % len(place)]
        is_document_start = token == store.document_offsets[document]
        if step == 0 or is_document_start:
            segment, position = segment + 1, 0
        is_document_end = token + 1 == store.document_offsets[document + 1]
        if segment > max_documents:
            new = (0, -1, 0, 0)
        else:
            new = (
                store.tokens[token],
                -1 if is_document_end else store.tokens[token + 1],
                segment,
                position,
            )
        for field, value in zip((tokens, targets, segments, positions), new, strict=True):
            field.append(int(value))
        position += 1
    return tokens, targets, segments, positions


@pytest.mark.parametrize("max_documents", [1, 2, 3, 64])
@pytest.mark.parametrize("longest", [1, 3, 30, 90])
@pytest.mark.parametrize(("split", "eval_fraction"), [("train", 0), ("train", 0.5), ("eval", 0.5)])
def test_rows_equal_packing_token_by_token(split, eval_fraction, longest, max_documents):
    store = some_store(count=40, longest=longest)
    options = {
        "split": split,
        "eval_fraction": eval_fraction,
        "max_documents_per_row": max_documents,
    }
    rows = open_rows(store, **options)
    batch = rows.rows(np.arange(3 * rows.num_rows))
    first, last = {("train", 0): (0, 40), ("train", 0.5): (0, 20), ("eval", 0.5): (20, 40)}[
        split, eval_fraction
    ]
    for row in range(len(batch.tokens)):
        # The first token is always kept and, ids counting up, it is its own place in the store.
        expected = packed_slowly(
            store, batch.tokens[row, 0], first=first, last=last, max_documents=max_documents
        )
        for name, field, value in zip(Batch._fields, batch, expected, strict=True):
            assert field[row].tolist() == value, name


def test_a_row_over_the_end_of_the_split_starts_a_new_segment_there():
    rows = open_rows(store_of_lengths([50]))
    batch = rows.rows(np.arange(200))
    wrapped = np.flatnonzero((np.diff(batch.tokens, axis=1) < 0).any(axis=1))
    assert len(wrapped)
    for row in wrapped:
        seam = int(np.flatnonzero(batch.tokens[row] == 49)[0])
        assert batch.targets[row, seam] == -1
        assert batch.segments[row].tolist() == [1] * (seam + 1) + [2] * (SEQ_LEN - seam - 1)


@pytest.mark.parametrize("num_tokens", [16, 17, 31, 32, 33])
def test_the_smallest_splits_work(num_tokens):
    rows = open_rows(store_of_lengths([num_tokens]))
    assert rows.num_rows == num_tokens // SEQ_LEN
    assert rows.rows(np.arange(50)).tokens.shape == (50, SEQ_LEN)


def test_batches_are_int32():
    rows = open_rows(store_of_lengths([60, 70], np.uint16))
    assert {field.dtype for field in rows.rows([0, 1])} == {np.dtype(np.int32)}


def test_an_epoch_holds_every_token_at_most_once_and_leaves_less_than_a_row():
    rows = open_rows(some_store())
    for epoch in range(3):
        tokens = rows.rows(epoch * rows.num_rows + np.arange(rows.num_rows)).tokens
        assert len(np.unique(tokens)) == tokens.size > rows.num_tokens - SEQ_LEN


def test_each_epoch_cuts_and_orders_anew():
    rows = open_rows(some_store())
    starts = [
        rows.rows(epoch * rows.num_rows + np.arange(rows.num_rows)).tokens[:, 0]
        for epoch in range(4)
    ]
    assert len({tuple(sorted(start)) for start in starts}) == 4
    assert len({tuple(np.argsort(start)) for start in starts}) == 4


def test_without_shuffle_rows_come_in_store_order():
    rows = open_rows(some_store(), shuffle=False)
    tokens = rows.rows(np.arange(rows.num_rows)).tokens
    np.testing.assert_array_equal(tokens.ravel(), np.arange(tokens.size))
    np.testing.assert_array_equal(rows.rows([rows.num_rows + 1]).tokens, tokens[1:2])


def test_a_sample_is_a_function_of_seed_and_number_alone():
    store = some_store()
    whole = open_rows(store).rows(np.arange(100))
    again = open_rows(store)
    for number in (99, 3, 42):
        for field, expected in zip(again.rows([number]), whole, strict=True):
            np.testing.assert_array_equal(field[0], expected[number])
    other = open_rows(store, seed=1).rows(np.arange(100))
    assert (other.tokens != whole.tokens).any()


def test_train_and_eval_share_no_document_and_together_hold_all():
    store = some_store()
    splits = [open_rows(store, split=split, eval_fraction=0.2) for split in ("train", "eval")]
    assert [rows.num_documents for rows in splits] == [32, 8]
    assert sum(rows.num_tokens for rows in splits) == len(store.tokens)
    bound = store.document_offsets[32]
    train, held_out = [rows.rows(np.arange(5 * rows.num_rows)) for rows in splits]
    assert max(train.tokens.max(), train.targets.max()) == bound - 1
    assert held_out.tokens.min() == bound
    assert held_out.targets[held_out.targets >= 0].min() == bound + 1


@pytest.mark.parametrize(
    ("lengths", "eval_fraction", "num_eval_tokens"),
    [
        ([1000], 0.1, 100),  # a document alone
        ([1000], 0.01, 16),  # a row at least
        ([100] * 3, 0.9, 270),  # no document would be left to train on
        ([100, 15], 0.1, 16),  # the last document is shorter than a row
        ([5, 100], 0.1, 16),  # and so is what is before it
        ([16, 15, 1], 0.9, 16),
        ([10] * 10, 0.01, 16),
    ],
)
def test_where_documents_are_too_few_or_short_the_tail_is_held_out(
    lengths, eval_fraction, num_eval_tokens, caplog
):
    store = store_of_lengths(lengths)
    with caplog.at_level("INFO", "jaxscale"):
        train, held_out = [
            open_rows(store, split=split, eval_fraction=eval_fraction, shuffle=False)
            for split in ("train", "eval")
        ]
    cut = sum(lengths) - num_eval_tokens
    np.testing.assert_array_equal(train.stream, store.tokens[:cut])
    np.testing.assert_array_equal(held_out.stream, store.tokens[cut:])
    (record,) = caplog.records
    assert f"the last {num_eval_tokens} of {sum(lengths)} tokens are held out" in record.message
    seen = [set(), set()]
    for rows, ids in zip((train, held_out), seen, strict=True):
        # An epoch leaves up to a row out, others see it.
        shuffled = open_rows(store, split=rows.split, eval_fraction=eval_fraction)
        batch = shuffled.rows(np.arange(20 * rows.num_rows))
        ids |= set(batch.tokens.ravel()) | set(batch.targets[batch.targets >= 0])
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == sum(lengths)


def test_the_last_token_before_a_cut_has_no_target():
    rows = open_rows(store_of_lengths([64]), eval_fraction=0.25, shuffle=False)
    batch = rows.rows(np.arange(rows.num_rows))
    assert batch.tokens.ravel().tolist() == list(range(48))
    assert np.flatnonzero(batch.targets == -1).tolist() == [47]


def test_tokens_beyond_the_most_documents_are_padding_counted_and_warned_of_once(caplog):
    rows = open_rows(store_of_lengths([4] * 40), max_documents_per_row=2, shuffle=False)
    batch = rows.rows([0, 1])
    assert batch.segments.tolist() == [[1] * 4 + [2] * 4 + [0] * 8] * 2
    assert batch.targets[0].tolist() == [1, 2, 3, -1, 5, 6, 7, -1] + [-1] * 8
    rows.rows([2])
    assert rows.dropped_tokens == 24
    (record,) = caplog.records
    message = (
        "2 of 2 rows hold more than config.data.max_documents_per_row=2 documents; "
        "16 of their 32 tokens"
    )
    assert message in record.getMessage()


def test_a_row_of_just_the_most_documents_keeps_all(caplog):
    rows = open_rows(store_of_lengths([4] * 40), max_documents_per_row=4, shuffle=False)
    assert rows.rows([0]).segments.min() == 1
    assert rows.dropped_tokens == 0 and not caplog.records


@pytest.mark.parametrize("token", [0, 63, 500, 2047])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.int32, 3000),
        (np.int64, 3000),
        (np.uint16, 3000),
        (np.int16, 3000),
        (np.int32, -1),
        (np.int64, -1),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_by_document_and_position(dtype, token, value):
    store = store_of_lengths([64] * 32, dtype)
    store.tokens[token] = value
    message = (
        rf"document {token // 64} holds id {value} at position {token % 64} "
        rf"\(token {token} of the store\), "
        r"outside range\(vocab_size=3000\); set config.model.vocab_size"
    )
    # At the start: 64 rows of 16 are sampled, half of this store and always its first and last row.
    with pytest.raises(ValueError, match=message):
        rows = open_rows(store, vocab_size=3000)
        rows.rows(np.arange(rows.num_rows))


def test_an_id_of_int64_is_not_wrapped_into_the_vocabulary():
    store = store_of_lengths([2000], np.int64)
    rows = open_rows(store)
    store.tokens[777] = 2**32 + 5
    with pytest.raises(ValueError, match="holds id 4294967301 at position 777"):
        rows.rows(np.arange(rows.num_rows))


def test_a_bad_id_in_the_first_or_last_row_is_refused_at_the_start():
    for token in (3, 99_999):
        store = store_of_lengths([100_000])
        store.tokens[token] = 2**20
        with pytest.raises(ValueError, match=f"position {token} "):
            open_rows(store)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (
            [20, 11],
            {"eval_fraction": 0.1},
            "31 tokens, less than two rows of seq_len=16.* lower seq_len, or add text",
        ),
        (
            [5, 6],
            {},
            "train split of memory has 2 documents with 11 tokens, less than one row of seq_len=16",
        ),
        ([100], {"split": "eval"}, "eval_fraction=0 holds nothing out"),
        ([100], {"eval_fraction": 1.0}, "at least 0 and below 1"),
        ([100], {"split": "test"}, "'test' is neither 'train' nor 'eval'"),
        ([100], {"seed": -1}, "seed=-1 must be at least 0"),
        ([100], {"seq_len": 0}, "seq_len=0 must be at least 1"),
        ([100], {"max_documents_per_row": 0}, "max_documents_per_row=0"),
    ],
)
def test_impossible_settings_are_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        open_rows(store_of_lengths(lengths), **options)


def test_a_store_of_floats_is_refused():
    with pytest.raises(ValueError, match="dtype float32, which holds no token ids"):
        open_rows(store_of_lengths([100], np.float32))


def test_a_negative_sample_number_is_refused():
    with pytest.raises(ValueError, match="count from 0, got -1"):
        open_rows(some_store()).rows([-1])


def test_sample_numbers_may_be_huge():
    rows = open_rows(some_store())
    assert rows.rows([2**62]).tokens.shape == (1, SEQ_LEN)


@pytest.mark.parametrize("seed", range(5))
def test_no_row_holds_more_than_most_documents_and_some_row_holds_as_many(seed):
    lengths = np.random.default_rng(seed).integers(1, 9, 60)
    rows = open_rows(store_of_lengths(lengths), eval_fraction=0, max_documents_per_row=64)
    # Every window of the circle, by an unshuffled look at each start.
    stream = np.concatenate([np.full(length, i) for i, length in enumerate(lengths)])
    windows = (np.roll(stream, -start)[: rows.seq_len] for start in range(len(stream)))
    assert rows.most_documents() == max(len(set(window)) for window in windows)
    batch = rows.rows(np.arange(3 * rows.num_rows))
    assert batch.segments.max() <= rows.most_documents()
