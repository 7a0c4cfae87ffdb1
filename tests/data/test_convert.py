import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxscale.data import ByteTokenizer, IndexedDataset, convert, indexed, open_tokenizer, text

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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus",
        "out.bin",
        "out.crc",
        "out.idx",
    ]


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


def test_progress_is_logged_with_documents_tokens_and_speed(corpus, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(convert, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(convert, "CHUNK_DOCUMENTS", 20)
    with caplog.at_level("INFO", "jaxscale"):
        convert.convert(str(corpus), tmp_path / "out", tokenizer=ByteTokenizer())
    found = re.findall(rf"{corpus}: (.*) documents, (.*) tokens, (.*) MB/s", caplog.text)
    # "text 0" to "text 9" have 6 bytes, the others 7; and each its end.
    assert [(int(documents), int(tokens)) for documents, tokens, _ in found] == [
        (20, 150),
        (40, 310),
        (50, 390),
    ]
    assert all(float(speed) >= 0 for *_, speed in found)
    assert f"{corpus}: 50 of 50 documents in hashed order" in caplog.text


def run_script(*arguments, before=()):
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    command = [*before, sys.executable, SCRIPTS / "prepare_data.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_prepare_data_writes_a_store_and_refuses_to_replace_it(corpus, tmp_path):
    arguments = [f"--input={corpus}/*.txt", f"--output={tmp_path}/made/store"]
    result = run_script(*arguments)
    assert result.returncode == 0, result.stderr
    assert len(texts_of(IndexedDataset(tmp_path / "made" / "store"))) == 50
    assert "50 files, " in result.stderr and " as text" in result.stderr
    assert "50 documents, 390 tokens" in result.stderr
    assert "vocab_size at least 257" in result.stderr
    assert_mistake(run_script(*arguments), "made/store.bin or .idx exists; pass --overwrite")
    assert run_script(*arguments, "--overwrite").returncode == 0


def test_prepare_data_trains_a_tokenizer_and_keeps_it_beside_the_store(corpus, tmp_path):
    arguments = [f"--input={corpus}", f"--output={tmp_path}/out", "--train_tokenizer=260"]
    result = run_script(*arguments)
    assert result.returncode == 0, result.stderr
    assert f"--config.data.tokenizer={tmp_path}/out-tokenizer and" in result.stderr
    tokenizer = open_tokenizer(str(tmp_path / "out-tokenizer"))
    assert tokenizer.vocab_size == 260
    store = IndexedDataset(tmp_path / "out")
    texts = [tokenizer.decode(store[number]) for number in range(len(store))]
    assert sorted(texts) == sorted(f"text {number}" for number in range(50))
    for end in (".bin", ".idx"):
        (tmp_path / f"out{end}").unlink()
    assert_mistake(run_script(*arguments), "out-tokenizer exists; pass --overwrite")


def assert_mistake(result, *fragments):
    assert result.returncode == 2, result.stderr
    assert "\nerror: " in result.stderr
    assert "Traceback" not in result.stderr and "config." not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr, result.stderr


# Arguments besides the usual --input and --output -> what the message says.
MISTAKES = {
    "--output=": ("--output='' names no store; give a prefix",),
    "--output=data/": ("--output='data/' names no store",),
    "--output=.bin": ("--output='.bin' names no store",),
    "--output=text/0.txt/store": ("--output=text/0.txt/store cannot be written: Not a directory",),
    "--input=nowhere": ("--input='nowhere' finds no file",),
    "--input=mixed": ("--input='mixed' mixes formats", "set --format"),
    "--input=mixed/a.json": ("set --format to json", "or text"),
    "--input=mixed/b.jsonl": ("has no field 'text', only ['body']; set --text_field",),
    "--input=bad.txt": ("bad.txt is not UTF-8 at byte 0", "narrow --input to a glob"),
    "--input=empty.txt": ("check --input and --text_field",),
    "--tokenizer=nowhere": ("--tokenizer='nowhere' is no file",),
    "--train_tokenizer=100": ("--train_tokenizer=100", "[257, 1048576]"),
    "--tokenizer=bytes --train_tokenizer=300": ("--tokenizer and --train_tokenizer exclude",),
    "--train_tokenizer=300 --input=bad.txt": ("bad.txt is not UTF-8 at byte 0",),
    "--format=word": ("--format", "json"),
    "--outptu=x": ("outptu", "output"),
    "text/1.txt": ("'text/1.txt' is no flag", "quote globs"),
}


# Imports once what the script imports, then runs each command line in a fork: 20 s less.
IN_FORKS = """
import json, os, runpy, sys
import jaxscale.command_line, jaxscale.data.convert
script, *commands = json.loads(sys.argv[1])
for number, arguments in enumerate(commands):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_prepare_data_tells_mistakes_by_its_own_flags_and_writes_nothing(tmp_path):
    for name in ("text/0.txt", "text/1.txt", "empty.txt", "mixed/a.json", "mixed/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else '{"body": "some"}')
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    before = {*tmp_path.rglob("*")}
    commands = [["--input=text", "--output=out", *words.split()] for words in MISTAKES]
    words = json.dumps([str(SCRIPTS / "prepare_data.py"), *commands, ["--input=text"]])
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    result = subprocess.run(
        [sys.executable, "-c", IN_FORKS, words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    codes = [int(line) for line in result.stdout.split()]
    errors = [tmp_path / f"{number}.err" for number in range(len(codes))]
    expected = [*MISTAKES.values(), ("--output",)]
    for code, error, fragments in zip(codes, errors, expected, strict=True):
        result = subprocess.CompletedProcess([], code, stderr=error.read_text())
        assert_mistake(result, *fragments)
    assert {*tmp_path.rglob("*")} - {*errors} == before


def test_prepare_data_on_a_full_disk_leaves_nothing(corpus, tmp_path):
    (corpus / "00.txt").write_text("long " * 100_000)
    # No file may get larger than 100 KiB, which the system refuses as it does on a full disk.
    shell = ["bash", "-c", 'ulimit -f 100 && exec "$@"', "-"]
    result = run_script(f"--input={corpus}", f"--output={tmp_path}/out", before=shell)
    assert_mistake(result, "out cannot be written: File too large; make room")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]
