import dataclasses
import itertools
import json
import math
import threading
import time

import numpy as np
import pytest

from jaxscale.config import DataConfig
from jaxscale.data import TokenRows, batches, open_dataset

BATCH_SIZE = 8


@pytest.fixture
def rows(make_store, random_documents):
    return TokenRows(make_store(random_documents(60)), seq_len=32, seed=5, vocab_size=1000)


def settings(path, **changes):
    config = DataConfig(path=str(path), eval_fraction=0.2)
    return dataclasses.replace(config, **changes)


def first_batches(count, rows, **options):
    stream = batches(rows, **{"batch_size": BATCH_SIZE} | options)
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


def assert_same(found, expected):
    assert [number for number, _ in found] == [number for number, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        for field, other_field in zip(one, other, strict=True):
            np.testing.assert_array_equal(field, other_field)


@pytest.mark.parametrize(
    ("prefetch", "threads"), [(0, 0), (0, 2), (1, 1), (1, 4), (4, 0), (4, 2), (16, 8)]
)
def test_threads_and_prefetch_change_nothing(rows, prefetch, threads):
    expected = [(n, rows.rows(n * BATCH_SIZE + np.arange(BATCH_SIZE))) for n in range(20)]
    assert_same(first_batches(20, rows, prefetch=prefetch, threads=threads), expected)


def test_resuming_at_n_gives_what_iterating_to_n_would_have(rows):
    assert_same(first_batches(5, rows, start=12), first_batches(17, rows)[12:])


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_the_rows_of_all_hosts_are_the_global_batch(rows, num_hosts):
    whole = first_batches(4, rows)
    for owned in (
        np.arange(BATCH_SIZE).reshape(num_hosts, -1),
        np.arange(BATCH_SIZE).reshape(-1, num_hosts).T,
    ):
        per_host = [first_batches(4, rows, local_rows=local_rows) for local_rows in owned]
        for step, (_, expected) in enumerate(whole):
            for field, expected_field in enumerate(expected):
                joined = np.empty_like(expected_field)
                for local_rows, found in zip(owned, per_host, strict=True):
                    joined[local_rows] = found[step][1][field]
                np.testing.assert_array_equal(joined, expected_field)


def test_a_batch_larger_than_an_epoch_crosses_epochs(rows):
    batch_size = 3 * rows.num_rows + 1
    ((_, first), (_, second)) = first_batches(2, rows, batch_size=batch_size)
    expected = rows.rows(np.arange(2 * batch_size))
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens]), expected.tokens)


def test_a_start_far_ahead_costs_nothing(rows):
    ((number, _),) = first_batches(1, rows, start=10**12)
    assert number == 10**12


@pytest.mark.parametrize("threads", [0, 2])
def test_an_exception_in_a_reader_reaches_the_consumer_at_its_batch(rows, threads):
    class Failing:
        def rows(self, indices):
            if indices[0] >= 3 * BATCH_SIZE:
                raise ValueError("document 7 is damaged")
            return rows.rows(indices)

    stream = batches(Failing(), batch_size=BATCH_SIZE, threads=threads)
    assert [next(stream)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="document 7 is damaged"):
        next(stream)
    assert list(stream) == []


def test_close_stops_the_reader_threads(rows):
    before = set(threading.enumerate())
    stream = batches(rows, batch_size=BATCH_SIZE, threads=2)
    next(stream)
    assert set(threading.enumerate()) - before
    stream.close()
    deadline = time.monotonic() + 600
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"start": -1}, "start=-1 must be at least 0"),
        ({"prefetch": -1}, "config.data.prefetch=-1"),
        ({"threads": -1}, "config.data.threads=-1"),
        ({"local_rows": []}, "local_rows"),
        ({"local_rows": [1, 0]}, "must rise"),
        ({"local_rows": [0, 8]}, r"within range\(batch_size=8\)"),
    ],
)
def test_bad_arguments_are_refused_before_iterating(rows, options, message):
    with pytest.raises(ValueError, match=message):
        batches(rows, **{"batch_size": BATCH_SIZE} | options)


def test_what_is_read_is_known_to_be_said(tmp_path):
    (tmp_path / "a.csv").write_text("body\n" + "some text\n" * 100)
    path, cache = tmp_path / "a.csv", str(tmp_path / "cache")
    config = settings(path, format="csv", text_field="body", cache_dir=cache)
    corpus = open_dataset(config, seed=0, seq_len=16, vocab_size=257)
    assert corpus.description["num_documents"] == 100
    assert corpus.source == f"{path}: reading a.csv as csv"


def test_open_dataset_reads_text_through_the_cache(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(10):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 50)
    config = settings(tmp_path / "text", cache_dir=str(tmp_path / "cache"))
    corpus = open_dataset(config, seed=0, seq_len=64, vocab_size=257)
    assert corpus.eval is not None and corpus.tokenizer is not None
    assert (corpus.train.num_documents, corpus.eval.num_documents) == (8, 2)
    text = corpus.tokenizer.decode(corpus.train.rows([0]).tokens[0])
    assert "ocument" in text
    assert len(list((tmp_path / "cache").glob("*.idx"))) == 1


@pytest.mark.parametrize("between", ["\n\n", "\n"])
def test_one_text_file_is_training_data(tmp_path, between):
    content = between.join(f"the story number {number}" for number in range(1000))
    (tmp_path / "book.txt").write_text(content)
    config = settings(tmp_path / "book.txt", eval_fraction=0.01, cache_dir=str(tmp_path / "cache"))
    corpus = open_dataset(config, seed=0, seq_len=64, vocab_size=257)
    assert corpus.eval is not None and corpus.tokenizer is not None
    num_documents = 1000 if between == "\n\n" else 1
    assert corpus.description["num_documents"] == num_documents
    assert corpus.train.num_tokens + corpus.eval.num_tokens == len(content) + num_documents
    assert corpus.eval.num_tokens == pytest.approx(0.01 * len(content), rel=0.05)
    assert corpus.tokenizer.decode(corpus.train.stream).count("story") == pytest.approx(990, abs=1)


def test_open_dataset_reads_a_store_without_a_tokenizer(make_store, random_documents):
    store = make_store(random_documents(100))
    corpus = open_dataset(settings(store.prefix), seed=0, seq_len=32, vocab_size=1000)
    assert corpus.tokenizer is None
    assert corpus.description["num_documents"] == 100
    assert json.loads(json.dumps(corpus.description)) == corpus.description


def test_without_an_eval_fraction_there_is_no_eval_split(make_store, random_documents):
    config = settings(make_store(random_documents(100)).prefix, eval_fraction=0.0)
    assert open_dataset(config, seed=0, seq_len=32, vocab_size=1000).eval is None


def test_held_out_rows_do_not_depend_on_the_seed(make_store, random_documents):
    config = settings(make_store(random_documents(200)).prefix)
    one, other = (open_dataset(config, seed=seed, seq_len=32, vocab_size=1000) for seed in (0, 1))
    assert one.eval is not None and other.eval is not None
    np.testing.assert_array_equal(one.eval.rows([0, 1]).tokens, other.eval.rows([0, 1]).tokens)
    assert (one.train.rows([0, 1]).tokens != other.train.rows([0, 1]).tokens).any()


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = settings(tmp_path / "a.txt", cache_dir=str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"'bytes' has 257 ids but vocab_size=256; set config.model.vocab_size to 257",
    ):
        open_dataset(config, seed=0, seq_len=4, vocab_size=256)


def test_errors_about_converted_text_name_the_text_not_the_cache(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = settings(tmp_path / "a.txt", cache_dir=str(tmp_path), eval_fraction=0.0)
    with pytest.raises(ValueError, match=r"train split of .*a.txt has 1 documents with 5 tokens"):
        open_dataset(config, seed=0, seq_len=64, vocab_size=257)


def test_a_checkpoint_of_other_data_is_refused_naming_what_differs(make_store, random_documents):
    documents = random_documents(100)
    corpora = []
    other_ids = [[(token + 1) % 1000 for token in document] for document in documents]
    for name, changed in (
        ("a", documents),
        ("b", documents),
        ("c", other_ids),
        ("d", documents[1:]),
    ):
        config = settings(make_store(changed, name=name).prefix)
        corpora.append(open_dataset(config, seed=0, seq_len=32, vocab_size=1000))
    first, same, other, shorter = corpora
    first.check_same(same.description)
    with pytest.raises(
        ValueError, match=r"not the data this run began with: fingerprint was '\w+', is '\w+'\. "
    ):
        first.check_same(other.description)
    with pytest.raises(ValueError, match="num_documents was 99, is 100; num_tokens was"):
        first.check_same(shorter.description)
    with pytest.raises(ValueError, match="dtype was None"):
        first.check_same({})


def test_unigram_entropy_is_the_cross_entropy_of_token_counts(make_store):
    config = settings(make_store([[1, 1, 1, 2]] * 8 + [[1, 2, 3, 3]] * 2).prefix)
    corpus = open_dataset(config, seed=0, seq_len=4, vocab_size=5)
    # Train counts with one added: 1, 25, 9, 1, 1 of 37. Held out: 1, 2, 3, 3 in each document.
    expected = -(math.log(25 / 37) + math.log(9 / 37) + 2 * math.log(1 / 37)) / 4
    assert corpus.unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_of_a_large_store_is_a_sample_and_says_so(
    make_store, random_documents, monkeypatch, caplog
):
    config = settings(make_store(random_documents(400)).prefix)
    corpus = open_dataset(config, seed=0, seq_len=32, vocab_size=1000)
    exact = corpus.unigram_entropy()
    monkeypatch.setattr("jaxscale.data.loader.BLOCK_TOKENS", 16)
    monkeypatch.setattr("jaxscale.data.loader.TRAIN_BLOCKS", 256)
    with caplog.at_level("INFO", "jaxscale"):
        assert corpus.unigram_entropy() == pytest.approx(exact, rel=0.1)
    assert f"counted 4096 of {corpus.train.num_tokens} train tokens" in caplog.text


@pytest.mark.parametrize("value", [-1, 1000, 2**31 - 1])
def test_a_bad_id_that_only_the_entropy_reads_is_refused_by_its_place(make_store, value):
    documents = [[1] * 1000 for _ in range(20)]
    documents[3][700] = value  # between the rows that are looked at first
    config = settings(make_store(documents, dtype=np.int32).prefix)
    corpus = open_dataset(config, seed=0, seq_len=16, vocab_size=1000)
    with pytest.raises(ValueError, match=f"document 3 holds id {value} at position 700"):
        corpus.unigram_entropy()


def test_the_python_library_opens_by_its_name(tmp_path):
    config = settings("python-stdlib", cache_dir=str(tmp_path), eval_fraction=0.01)
    corpus = open_dataset(config, seed=0, seq_len=1024, vocab_size=257)
    assert corpus.train.num_tokens > 5e6  # systems that strip the library's tests keep about 10 MB
    assert 2.5 < corpus.unigram_entropy() < 4.0
    assert corpus.eval is not None and corpus.tokenizer is not None
    source = corpus.tokenizer.decode(corpus.eval.rows(np.arange(8)).tokens.ravel())
    assert "self." in source
