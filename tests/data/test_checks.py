"""A store that is not as it was written is named, converted again, or left out by rows."""

import contextlib
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxscale.config import DataConfig, OnCorruption
from jaxscale.data import IndexedWriter, block_sums, checks, convert, open_dataset
from jaxscale.data.checks import CorruptionError

SEQ_LEN = 64
PATIENCE = 60


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", 1000)


@pytest.fixture
def store(tmp_path):
    """The prefix of a store of 40 documents, 24 kB."""
    with IndexedWriter(tmp_path / "store", np.uint16) as writer:
        for document in np.random.default_rng(0).integers(0, 250, (40, 300)).astype(np.uint16):
            writer.add(document)
    return tmp_path / "store"


@pytest.fixture
def text(tmp_path):
    """A folder of text, and the cache."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"The cat {number} sat on the mat. " * 9)
    return dict(path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"))


def opened(vocab_size=257, **settings):
    config = DataConfig(eval_fraction=0.3, **settings)
    return open_dataset(config, seed=0, seq_len=SEQ_LEN, vocab_size=vocab_size)


def flip(path, bit):
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    # In place, as a disk does it: a map of the file sees it.
    with open(path, "r+b") as file:
        file.write(data)


def cached_file(text, end):
    (path,) = Path(text["cache_dir"]).glob(f"*{end}")
    return path


def all_rows(corpus):
    return [corpus.train.rows(np.arange(8) + 8 * n) for n in range(corpus.train.num_rows // 8)]


def tokens_of(corpus):
    return np.concatenate([batch.tokens for batch in all_rows(corpus)])


@pytest.mark.parametrize("end", [".bin", ".idx", ".crc"])
def test_every_flipped_bit_of_a_store_is_refused_and_its_file_named(store, end):
    path, draw = Path(f"{store}{end}"), random.Random(0)
    opened(path=str(store))
    for _ in range(40):
        bit = draw.randrange(path.stat().st_size * 8)
        flip(path, bit)
        with pytest.raises(ValueError, match=f"{path}"):
            opened(path=str(store))
        flip(path, bit)
    opened(path=str(store))


def test_the_checksums_are_those_of_the_blocks_whatever_the_documents(tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "store", np.int32) as writer:
        for size in np.random.default_rng(1).integers(1, 2000, 50):
            writer.add(np.arange(size))
    sums = block_sums.read(tmp_path / "store.crc")
    assert sums is not None
    data = (tmp_path / "store.bin").read_bytes()
    assert sums.num_bytes == len(data) and len(sums.blocks) == -(-len(data) // 1000)
    whole = block_sums.BlockSums()
    whole.add(data)
    assert whole.to_bytes(tmp_path / "store.idx") == (tmp_path / "store.crc").read_bytes()


def test_a_store_without_checksums_is_read_as_it_is(store):
    Path(f"{store}.crc").unlink()
    flip(f"{store}.bin", 800)
    assert tokens_of(opened(path=str(store))).size


def test_a_flipped_bit_that_makes_an_id_too_large_is_not_blamed_on_the_vocabulary(store):
    flip(f"{store}.bin", 15)
    with pytest.raises(CorruptionError, match=r"store\.bin has changed since it was written"):
        opened(path=str(store), vocab_size=250)
    Path(f"{store}.crc").unlink()
    with pytest.raises(ValueError, match="set config.model.vocab_size"):
        opened(path=str(store), vocab_size=250)


@pytest.mark.parametrize("bit", [3, 15])
def test_skip_leaves_out_the_rows_of_a_damaged_block_and_no_others(store, caplog, bit):
    before = all_rows(opened(path=str(store)))
    flip(f"{store}.bin", 5 * 8000 + bit)  # block 5: tokens 2500 to 3000
    corpus = opened(path=str(store), on_corruption=OnCorruption.SKIP)
    after = all_rows(corpus)
    assert corpus.unigram_entropy() > 0
    left_out = 0
    for old, new in zip(before, after, strict=True):
        is_out = (new.targets == -1).all(axis=1)
        left_out += is_out.sum()
        for a, b in zip(old, new, strict=True):
            assert np.array_equal(a[~is_out], b[~is_out])
        assert (new.tokens[is_out] == 0).all() and (new.segments[is_out] == 1).all()
        assert (new.positions[is_out] == np.arange(SEQ_LEN)).all()
    # 500 tokens, and a row that runs into them at either end.
    assert 500 // SEQ_LEN <= left_out <= 500 // SEQ_LEN + 2
    assert caplog.text.count("rows that it is part of are left out") == 1
    assert corpus.train.dropped_tokens == left_out * SEQ_LEN


@pytest.mark.parametrize("end", [".bin", ".idx", ".crc"])
def test_a_cached_store_that_has_changed_is_converted_again(text, end, caplog):
    expected = tokens_of(opened(**text))
    flip(cached_file(text, end), 99)
    assert np.array_equal(tokens_of(opened(**text)), expected)
    assert "the cached store is damaged, converting again" in caplog.text
    assert str(cached_file(text, end)) in caplog.text
    caplog.clear()
    opened(**text)
    assert not caplog.records


def until_corrupt(corpus):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        corpus.train.rows([0])  # its own block is sound
        time.sleep(0.01)


def test_damage_to_a_large_store_is_found_in_the_background_and_mended_by_the_next_start(
    text, monkeypatch, caplog
):
    monkeypatch.setattr(checks, "SMALL_BYTES", 0)
    monkeypatch.setattr(convert, "SMALL_BYTES", 0)
    monkeypatch.setattr("jaxscale.data.loader.SMALL_BYTES", 0)
    expected = tokens_of(opened(**text))
    caplog.set_level(logging.INFO)
    corpus = opened(**text)
    corpus.check_in_background(part=1, parts=2)
    deadline = time.monotonic() + PATIENCE
    while "all as written" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "all as written" in caplog.text
    path = cached_file(text, ".bin")
    flip(path, path.stat().st_size * 8 - 160)  # held-out text, which no row of training has
    corpus = opened(**text)
    corpus.train.rows([0])
    corpus.check_in_background(part=0, parts=1)
    with pytest.raises(CorruptionError, match=f"{path} has changed .*the next start converts"):
        until_corrupt(corpus)
    assert np.array_equal(tokens_of(opened(**text)), expected)


def test_damage_during_a_run_is_found_while_reading(store):
    corpus = opened(path=str(store))
    flip(f"{store}.bin", 8000)
    with pytest.raises(CorruptionError, match=r"bytes 1000 to 2000 \(tokens 500 on\)"):
        for n in range(corpus.train.num_rows):
            corpus.train.rows([n])


KILLED = """if True:
    import os, signal, sys
    from jaxscale.data import ByteTokenizer, convert
    write = convert._write_shuffled
    def held(*arguments, **options):
        print("held", flush=True)
        sys.stdin.readline()
        write(*arguments, **options)
    convert._write_shuffled = held
    convert.cached_store(sys.argv[1], ByteTokenizer(), cache_dir=sys.argv[2])
"""


def test_what_a_killed_conversion_left_is_removed_and_that_of_a_live_one_is_not(
    text, spawn, caplog
):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED, text["path"], text["cache_dir"]]
    pipe = subprocess.PIPE
    child = spawn(command, stdin=pipe, stdout=pipe, env=environment)
    assert child.stdout.readline() == "held\n"
    (folder,) = Path(text["cache_dir"]).glob("*.tmp-*")
    convert._remove_leftovers(folder.parent, "*")
    assert folder.exists()
    child.kill()
    child.wait()
    caplog.set_level(logging.INFO)
    opened(**text)
    assert not list(folder.parent.glob("*tmp*")) and not list(folder.parent.glob("*new*"))
    assert f"removed {folder}: that conversion was cut short" in caplog.text


def test_what_stands_in_the_cache_and_is_not_ours_stays(text):
    opened(**text)
    folder = Path(text["cache_dir"]) / "x.tmp-1"
    folder.mkdir()
    with contextlib.suppress(FileNotFoundError):
        convert._remove_leftovers(folder.parent, "*")
    assert folder.exists()
