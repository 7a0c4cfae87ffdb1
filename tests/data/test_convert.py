import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxscale.data import ByteTokenizer, IndexedDataset, convert, indexed, text

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def corpus(tmp_path):
    """A folder of 50 short text files, named by what they hold."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number:02}.txt").write_text(f"text {number}")
    return folder


def texts_of(store):
    assert all(document[-1] == 256 for document in store)
    return [ByteTokenizer().decode(document) for document in store]


def cached(corpus, tmp_path):
    return convert.cached_store(str(corpus), ByteTokenizer(), cache_dir=str(tmp_path / "cache"))


def cached_prefixes(tmp_path):
    """The stores in the cache; whatever else is left there but locks shows up too."""
    return sorted(
        {path.with_suffix("") for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"}
    )


def test_a_store_holds_every_document_once_in_another_order(corpus, tmp_path):
    store = convert.convert(str(corpus), tmp_path / "out", tokenizer=ByteTokenizer())
    assert store.dtype == np.uint16
    texts, expected = texts_of(store), [f"text {number}" for number in range(50)]
    assert sorted(texts) == sorted(expected) and texts != expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out.bin", "out.idx"]


def test_a_large_vocabulary_is_stored_as_int32(corpus, tmp_path):
    class Wide(ByteTokenizer):
        vocab_size, end_of_document = 100_000, 99_999

    store = convert.convert(str(corpus), tmp_path / "out", tokenizer=Wide())
    assert store.dtype == np.int32 and store[0][-1] == 99_999


def test_empty_documents_are_skipped_and_counted_once(corpus, tmp_path, caplog):
    for number in range(3):
        (corpus / f"{number:02}.txt").write_text("")
    assert len(convert.convert(str(corpus), tmp_path / "out", tokenizer=ByteTokenizer())) == 47
    assert [record.getMessage() for record in caplog.records] == [
        f"{corpus}: skipped 3 documents without text"
    ]


def test_text_of_empty_documents_alone_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="none of the 1 documents holds text"):
        convert.convert(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer=ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_cached_store_is_built_once(corpus, tmp_path, monkeypatch):
    first = texts_of(cached(corpus, tmp_path))
    monkeypatch.setattr(convert, "convert", None)
    assert texts_of(cached(corpus, tmp_path)) == first


def test_a_moved_folder_keeps_its_cached_store_and_changed_text_makes_another(corpus, tmp_path):
    cached(corpus, tmp_path)
    corpus = corpus.rename(tmp_path / "moved")
    cached(corpus, tmp_path)
    assert len(cached_prefixes(tmp_path)) == 1
    for count, new in ((2, "changed in size"), (3, "changed in kind")):
        (corpus / "00.txt").write_text(new)
        os.utime(corpus / "00.txt", (count, count))
        assert new in texts_of(cached(corpus, tmp_path))
        assert len(cached_prefixes(tmp_path)) == count


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_damaged_cached_store_is_built_again(corpus, tmp_path, end, caplog):
    expected = texts_of(cached(corpus, tmp_path))
    (prefix,) = cached_prefixes(tmp_path)
    os.truncate(f"{prefix}{end}", 20)
    assert texts_of(cached(corpus, tmp_path)) == expected
    assert cached_prefixes(tmp_path) == [prefix]
    assert "damaged, converting again" in caplog.text


def test_a_failed_build_leaves_nothing(corpus, tmp_path):
    (corpus / "00.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        cached(corpus, tmp_path)
    assert cached_prefixes(tmp_path) == []


def full_disk(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_and_leaves_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(
        ValueError, match=r"cache .*/cache cannot be written to: No space .*config.data.cache_dir"
    ):
        cached(corpus, tmp_path)
    assert cached_prefixes(tmp_path) == []
    with pytest.raises(OSError, match="No space left"):
        convert.convert(str(corpus), tmp_path / "out", tokenizer=ByteTokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "corpus"]
    monkeypatch.undo()
    assert len(texts_of(cached(corpus, tmp_path))) == 50


def test_a_cache_that_is_a_file_or_cannot_be_written_is_told(corpus, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()
    with pytest.raises(ValueError, match="cache cannot be written to: File exists"):
        cached(corpus, tmp_path)
    (tmp_path / "cache").unlink()
    expected = texts_of(cached(corpus, tmp_path))

    def read_only(path, mode="r", **options):
        if "w" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open(path, mode, **options)

    for module in (convert, indexed):
        monkeypatch.setattr(module, "open", read_only, raising=False)
    assert texts_of(cached(corpus, tmp_path)) == expected
    (corpus / "00.txt").write_text("changed")
    with pytest.raises(ValueError, match="cache cannot be written to: Read-only file system"):
        cached(corpus, tmp_path)


def test_text_that_goes_away_is_told(corpus, tmp_path, monkeypatch):
    listed = text.find_files(str(corpus))
    monkeypatch.setattr(text, "find_files", lambda path, format: listed)
    (corpus / "07.txt").unlink()
    with pytest.raises(ValueError, match="07.txt cannot be read: No such file"):
        cached(corpus, tmp_path)


def test_processes_that_build_at_once_convert_once_and_agree(corpus, tmp_path, spawn):
    program = """if True:
        import logging, sys
        from jaxscale.data import ByteTokenizer, convert
        logging.basicConfig(level=logging.INFO)
        print(len(convert.cached_store(sys.argv[1], ByteTokenizer(), cache_dir=sys.argv[2])))
    """
    command = [sys.executable, "-c", program, str(corpus), str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    pipe = subprocess.PIPE
    processes = [spawn(command, stdout=pipe, stderr=pipe, env=environment) for _ in range(3)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [output for output, _ in outputs] == ["50\n"] * 3
    assert sum("converted in" in errors for _, errors in outputs) == 1
    assert len(cached_prefixes(tmp_path)) == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_builders_without_a_lock_all_end_well(corpus, tmp_path, monkeypatch, is_damaged):
    expected = texts_of(cached(corpus, tmp_path))
    (prefix,) = cached_prefixes(tmp_path)
    if is_damaged:
        os.truncate(f"{prefix}.idx", 20)
    monkeypatch.setattr(convert, "_lock", lambda path: contextlib.nullcontext())
    barrier, found = threading.Barrier(4), []

    def build():
        barrier.wait()
        convert._build(
            prefix, str(corpus), tokenizer=ByteTokenizer(), format="auto", text_field="text"
        )
        found.append(texts_of(IndexedDataset(prefix)))

    builders = [threading.Thread(target=build) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert found == [expected] * 4
    assert cached_prefixes(tmp_path) == [prefix]


def test_the_default_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert convert.default_cache_dir() == tmp_path / "jaxscale" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert convert.default_cache_dir() == Path.home() / ".cache" / "jaxscale" / "data"


def run_script(*arguments):
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    command = [sys.executable, SCRIPTS / "prepare_data.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_prepare_data_writes_a_store_and_refuses_to_replace_it(corpus, tmp_path):
    arguments = [f"--input={corpus}/*.txt", f"--output={tmp_path}/made/store"]
    result = run_script(*arguments)
    assert result.returncode == 0, result.stderr
    assert len(texts_of(IndexedDataset(tmp_path / "made" / "store"))) == 50
    assert "vocab_size at least 257" in result.stderr
    again = run_script(*arguments)
    assert again.returncode != 0 and "pass --overwrite" in again.stderr + again.stdout
    assert run_script(*arguments, "--overwrite").returncode == 0
