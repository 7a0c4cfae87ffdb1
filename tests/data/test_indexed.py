import errno
import os
import struct

import numpy as np
import pytest

from jaxscale.data import IndexedDataset, IndexedWriter, indexed

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def megatron_store(
    prefix, sequences, *, bounds=None, code=8, char="H", magic=b"MMIDIDX\x00\x00", version=1
):
    """The bytes that Megatron's builder writes, one struct call at a time."""
    bounds = list(range(len(sequences) + 1)) if bounds is None else bounds
    size = struct.calcsize("<" + char)
    pointers, at = [], 0
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * size
    flat = [token for sequence in sequences for token in sequence]
    index = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(bounds))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    with open(f"{prefix}.bin", "wb") as file:
        file.write(struct.pack(f"<{len(flat)}{char}", *flat))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index)


def documents_of(store):
    return [document.tolist() for document in store]


def damage(path, new, *, at):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(new)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_a_written_store_reads_back_in_every_integer_dtype(make_store, dtype):
    limits = np.iinfo(dtype)
    documents = [[limits.min, limits.max], [0], [1, 2, 3]]
    store = make_store(documents, dtype=dtype)
    assert store.dtype == dtype
    assert documents_of(store) == documents
    assert store.document_offsets.tolist() == [0, 2, 3, 6]
    assert (len(store), store.num_tokens) == (3, 6)


@pytest.mark.parametrize(
    ("code", "char"),
    [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")],
)
def test_a_store_laid_out_by_megatron_reads_in_every_dtype(tmp_path, code, char):
    megatron_store(tmp_path / "m", DOCUMENTS, code=code, char=char)
    assert documents_of(IndexedDataset(tmp_path / "m")) == DOCUMENTS


def test_the_writer_writes_megatrons_bytes(tmp_path, make_store):
    make_store(DOCUMENTS, dtype=np.int32)
    megatron_store(tmp_path / "m", DOCUMENTS, code=4, char="i")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"store{end}").read_bytes() == (tmp_path / f"m{end}").read_bytes()


def test_documents_of_several_sequences_are_read_whole(tmp_path):
    megatron_store(tmp_path / "m", [[1, 2], [3], [4, 5, 6], [7]], bounds=[0, 2, 3, 4])
    assert documents_of(IndexedDataset(tmp_path / "m")) == [[1, 2, 3], [4, 5, 6], [7]]


def test_multimodal_modes_at_the_end_of_an_index_are_ignored(tmp_path):
    megatron_store(tmp_path / "m", DOCUMENTS)
    with open(tmp_path / "m.idx", "ab") as file:
        file.write(b"\0" * len(DOCUMENTS))
    assert documents_of(IndexedDataset(tmp_path / "m")) == DOCUMENTS


def test_empty_documents_are_left_out_with_one_warning(tmp_path, caplog):
    megatron_store(tmp_path / "m", [[], [1, 2], [], [3], []], bounds=[0, 1, 1, 2, 3, 4, 5])
    assert documents_of(IndexedDataset(tmp_path / "m")) == [[1, 2], [3]]
    assert [record.getMessage().split("left out ")[1] for record in caplog.records] == [
        "4 of 6 documents, they hold no tokens"
    ]


def test_a_path_with_either_suffix_opens_the_store(make_store):
    prefix = make_store(DOCUMENTS).prefix
    for end in (".bin", ".idx"):
        assert documents_of(IndexedDataset(prefix + end)) == DOCUMENTS


def test_tokens_are_a_read_only_view_of_the_file(make_store):
    store = make_store(DOCUMENTS)
    assert not store.tokens.flags.owndata
    assert not store[0].flags.writeable


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_missing_file_is_named(make_store, end):
    store = make_store(DOCUMENTS)
    os.remove(store.prefix + end)
    with pytest.raises(ValueError, match=rf"no such file: {store.prefix}{end};"):
        IndexedDataset(store.prefix)


def test_a_missing_store_names_both_files(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*none\.bin and .*none\.idx"):
        IndexedDataset(tmp_path / "none")


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_an_empty_file_is_refused(make_store, end):
    store = make_store(DOCUMENTS)
    open(store.prefix + end, "wb").close()
    with pytest.raises(ValueError, match=f"{end} is empty"):
        IndexedDataset(store.prefix)


@pytest.mark.parametrize("size", [1, 33, 34, 60, -1])
def test_a_truncated_index_is_refused(make_store, size):
    path = make_store(DOCUMENTS).prefix + ".idx"
    whole = os.path.getsize(path)
    os.truncate(path, size % whole)
    with pytest.raises(ValueError, match=rf"truncated: {size % whole} bytes"):
        IndexedDataset(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "not a Megatron index: it begins with b'TNTIDX"),
        ({"version": 2}, "index version 2; only version 1"),
        ({"code": 9}, "dtype code 9; the format defines 1 uint8"),
        ({"bounds": [0, 2, 1, 3]}, "falling at document 1"),
        ({"bounds": [0, 1, 2]}, "run from 0 to 2; they must rise from 0 to 3"),
        ({"bounds": [1, 2, 3]}, "run from 1 to 3"),
        ({"bounds": []}, "no documents"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, changes, message):
    megatron_store(tmp_path / "m", DOCUMENTS, **changes)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "m")


def test_a_truncated_bin_is_refused_with_both_sizes(make_store):
    store = make_store(DOCUMENTS)
    os.truncate(store.prefix + ".bin", 10)
    with pytest.raises(
        ValueError, match=r"has 10 bytes.* 9 tokens of uint16, 18 bytes: the .bin is truncated"
    ):
        IndexedDataset(store.prefix)


def test_a_bin_longer_than_its_index_says_they_do_not_belong_together(make_store):
    store = make_store(DOCUMENTS)
    with open(store.prefix + ".bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(
        ValueError, match=r"has 20 bytes.* 18 bytes: they belong to different stores"
    ):
        IndexedDataset(store.prefix)


def test_a_store_that_cannot_be_read_is_named(tmp_path, monkeypatch, make_store):
    store = make_store(DOCUMENTS)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for function in ("is_file", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(indexed, function, refused, raising=False)
            with pytest.raises(ValueError, match="store cannot be read: Permission denied; "):
                IndexedDataset(store.prefix)


def test_document_bounds_whose_differences_overflow_are_refused(tmp_path):
    quarter = 2**62
    bounds = [0, quarter, -2 * quarter, -quarter, 3]  # each difference wraps to 2**62
    megatron_store(tmp_path / "m", DOCUMENTS, bounds=bounds)
    with pytest.raises(ValueError, match="falling at document 1"):
        IndexedDataset(tmp_path / "m")


POINTERS = 34 + 3 * 4


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (
            POINTERS + 8,
            struct.pack("<q", 8),
            "sequence 1 begins at byte 8 of the .bin.* ends at byte 6; ",
        ),
        (POINTERS + 16, struct.pack("<q", -4), r"sequence 2 begins at byte -4 .*\(offsets fall"),
        (34 + 4, struct.pack("<i", -1), "sequence 1 has length -1"),
    ],
)
def test_sequences_that_do_not_lie_end_to_end_are_refused(make_store, at, value, message):
    store = make_store(DOCUMENTS)
    damage(store.prefix + ".idx", value, at=at)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(store.prefix)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (np.array([], np.int32), r"document 1 of .* has shape \(0,\)"),
        (np.zeros((2, 2), np.int32), r"shape \(2, 2\)"),
        (np.array([1.0]), "float64; token ids are integers"),
        (np.array([65536]), "ids 65536 to 65536; uint16 holds 0 to 65535: use a wider dtype"),
        (np.array([-1, 3]), "ids -1 to 3"),
    ],
)
def test_the_writer_refuses_a_bad_document_and_leaves_nothing(tmp_path, document, message):
    with (
        pytest.raises(ValueError, match=message),
        IndexedWriter(tmp_path / "store", np.uint16) as writer,
    ):
        writer.add(np.array([1]))
        writer.add(document)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_a_dtype_the_format_lacks(tmp_path):
    with pytest.raises(ValueError, match="dtype=uint32 is not in the format; use one of uint8"):
        IndexedWriter(tmp_path / "store", np.uint32)


def test_a_store_without_documents_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="no documents were added"):
        IndexedWriter(tmp_path / "store", np.uint16).close()
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_rewrite_keeps_the_old_store(make_store):
    store = make_store(DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedWriter(store.prefix, np.uint16) as writer:
        writer.add(np.array([7]))
        raise RuntimeError
    assert documents_of(IndexedDataset(store.prefix)) == DOCUMENTS


def test_a_rewrite_replaces_the_store_and_never_shows_an_index_beside_another_bin(
    make_store, monkeypatch
):
    prefix = make_store(DOCUMENTS, dtype=np.int64).prefix
    replace, index_seen = os.replace, []

    def watched_replace(source, target):
        index_seen.append(os.path.exists(prefix + ".idx"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched_replace)
    assert documents_of(make_store([[7]])) == [[7]]
    assert index_seen == [False, False, False]


@pytest.mark.parametrize("moment", ["adding", "closing"])
def test_a_full_disk_leaves_no_file_and_the_old_store(tmp_path, make_store, monkeypatch, moment):
    before = documents_of(make_store(DOCUMENTS))
    names = {"adding": ".bin", "closing": ".idx"}

    def open_on_full_disk(path, mode, **options):
        full = names[moment] in path and "w" in mode
        if full:
            open(path, mode).close()
        return open("/dev/full" if full else path, mode, **options)

    monkeypatch.setattr(indexed, "open", open_on_full_disk, raising=False)
    with pytest.raises(OSError, match="No space left"):
        with IndexedWriter(tmp_path / "store", np.uint16) as writer:
            for _ in range(1000):
                writer.add(np.zeros(1000, np.uint16))
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "store.bin",
        "store.crc",
        "store.idx",
    ]
    assert documents_of(IndexedDataset(tmp_path / "store")) == before
