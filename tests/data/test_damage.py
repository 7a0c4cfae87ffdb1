"""A small fuzzer: whatever happens to the bytes of a file, it is read, or told by its name.

Flips, cuts and the like, from fixed seeds. Any other exception, also one whose message is not ours,
fails; so does a case that takes long.
"""

import contextlib
import gzip
import json
import signal
import traceback

import numpy as np
import pytest

from jaxscale.data import IndexedDataset, IndexedWriter, TokenRows, open_tokenizer, text
from jaxscale.data.tokenizer import train_bpe

NUM_CASES = 100  # of each kind
SECONDS = 20  # for one, on a machine that is busy

TEXTS = [f"text {number}, naïve 😀\n" * (number % 4) for number in range(60)]


def write_text(folder):
    (folder / "a.txt").write_text("\n".join(TEXTS * 5))
    return folder / "a.txt"


def write_gzip(folder):
    (folder / "a.txt.gz").write_bytes(gzip.compress("\n".join(TEXTS * 5).encode()))
    return folder / "a.txt.gz"


def write_jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder / "a.jsonl"


def write_json(folder):
    (folder / "a.json").write_text(json.dumps([{"text": t, "n": [1.5, None]} for t in TEXTS]))
    return folder / "a.json"


def write_csv(folder):
    rows = "".join(
        '{},"{}"\n'.format(number, t.replace("\n", "\r\n")) for number, t in enumerate(TEXTS)
    )
    (folder / "a.csv").write_text("n,text\n" + rows)
    return folder / "a.csv"


def write_parquet(folder):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": TEXTS, "n": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=20)
    return folder / "a.parquet"


def write_arrow(folder):
    return _write_arrow(folder / "stream.arrow", "new_stream")


def write_arrow_file(folder):
    return _write_arrow(folder / "file.arrow", "new_file")


def _write_arrow(path, new):
    import pyarrow

    table = pyarrow.table({"text": TEXTS, "n": range(len(TEXTS))})
    with pyarrow.OSFile(str(path), "wb") as sink:
        with getattr(pyarrow.ipc, new)(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    return path


def write_state(folder):
    path = write_arrow(folder)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    return folder / "state.json"


def write_bin(folder):
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "store", np.int32) as writer:
        for length in rng.integers(1, 40, 20):
            writer.add(rng.integers(0, 1000, length))
    return folder / "store.bin"


def write_idx(folder):
    return write_bin(folder).with_suffix(".idx")


def write_tokenizer(folder):
    train_bpe(TEXTS, folder, vocab_size=280)
    return folder / "tokenizer.json"


def write_tokenizer_config(folder):
    return write_tokenizer(folder).with_name("tokenizer_config.json")


def read_text(path):
    path = path.parent if path.name == "state.json" else path
    format = {".json": "json", ".csv": "csv"}.get(path.suffix, "auto")
    format, files = text.find_files(str(path), format)
    for document in text.read_documents(str(path), files, format=format, text_field="text"):
        document.encode()


def read_store(path):
    store = IndexedDataset(path)
    for split in ("train", "eval"):
        rows = TokenRows(store, seq_len=16, seed=0, vocab_size=1000, split=split, eval_fraction=0.2)
        ids = rows.rows(np.arange(2 * rows.num_rows)).tokens
        assert 0 <= ids.min() <= ids.max() < rows.vocab_size
        rows.check_ids(slice(0, rows.num_tokens))


def read_tokenizer(path):
    tokenizer = open_tokenizer(str(path.parent))
    for ids in tokenizer.encode_batch(TEXTS):
        tokenizer.decode(ids)


KINDS = {
    write_text: read_text,
    write_gzip: read_text,
    write_jsonl: read_text,
    write_json: read_text,
    write_csv: read_text,
    write_parquet: read_text,
    write_arrow: read_text,
    write_arrow_file: read_text,
    write_state: read_text,
    write_bin: read_store,
    write_idx: read_store,
    write_tokenizer: read_tokenizer,
    write_tokenizer_config: read_tokenizer,
}


def damaged(content, rng):
    """The bytes with one to three damages."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        if not content:
            break
        at = int(rng.integers(len(content)))
        span = slice(at, at + int(rng.integers(1, 1 + min(64, len(content)))))
        damage = rng.choice(["bit", "byte", "cut", "delete", "repeat", "zeros", "ones"])
        if damage == "bit":
            content[at] ^= 1 << int(rng.integers(8))
        elif damage == "byte":
            content[at] = int(rng.integers(256))
        elif damage == "cut":
            del content[at:]
        elif damage == "delete":
            del content[span]
        elif damage == "repeat":
            content[at:at] = content[span]
        else:
            content[span] = bytes([0 if damage == "zeros" else 255]) * len(content[span])
    return bytes(content)


@contextlib.contextmanager
def limited(seconds):
    def interrupt(*_):
        raise AssertionError(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def fault(read, path):
    """What is wrong with how this file is read or refused; None if nothing."""
    try:
        with limited(SECONDS):
            read(path)
    except (ValueError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = frame.f_globals["__name__"].startswith("jaxscale.")
        is_named = str(path.with_suffix("") if path.stem == "store" else path.parent) in str(error)
        if is_ours and is_named and "\n" not in str(error):
            return None
        return f"{type(error).__name__}, ours: {is_ours}, named: {is_named}: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_a_damaged_file_is_read_or_told_by_its_name(write, tmp_path):
    path = write(tmp_path)
    content = path.read_bytes()
    KINDS[write](path)
    for seed in range(NUM_CASES):
        path.write_bytes(damaged(content, np.random.default_rng(seed)))
        assert (seed, fault(KINDS[write], path)) == (seed, None)
