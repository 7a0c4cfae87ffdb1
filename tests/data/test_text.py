import builtins
import csv
import errno
import gzip
import json
import os
import random

import pytest

from jaxscale.data import text


def read(path, *, format="auto", field="text"):
    format, files = text.find_files(str(path), format)
    return list(text.read_documents(str(path), files, format=format, text_field=field))


def write_parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_a_folder_of_text_is_read_by_name_without_hidden_files(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.md", "b.txt", "sub/c.txt"]


def test_a_glob_and_a_single_file_are_read(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "c.md") == ["c.md"]


def test_text_is_read_to_the_byte_but_for_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\n")
    assert read(tmp_path) == ["one\r\ntwo\r\n\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_that_is_alone_is_cut_behind_its_blank_lines(tmp_path, name, end):
    documents = [f"story {number}{end}begins{end} {end}\t{end}" for number in range(120)]
    documents[0] = end + documents[0]
    documents[-1] = "the end"
    content = "".join(documents).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == documents
    assert read(tmp_path) == documents
    (tmp_path / "b.txt").write_text("another")
    assert read(tmp_path) == ["".join(documents), "another"]


@pytest.mark.parametrize("num_documents", [99, 100])
def test_a_text_of_few_parts_stays_one_document(tmp_path, num_documents):
    content = "\n\n".join(map(str, range(num_documents)))
    (tmp_path / "a.txt").write_text(content)
    documents = read(tmp_path)
    assert len(documents) == (1 if num_documents < 100 else num_documents)
    assert "".join(documents) == content


def test_a_long_text_without_blank_lines_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST_DOCUMENT_BYTES", 100)
    content = "".join(f"{'é' * (number % 70)}\n" for number in range(1, 1000))
    (tmp_path / "a.txt").write_text(content)
    documents = read(tmp_path)
    assert "".join(documents) == content
    assert all(document.endswith("\n") for document in documents)
    sizes = [len(document.encode()) for document in documents[:-1]]
    assert len(sizes) >= 100 and all(100 <= size < 300 for size in sizes)


def test_jsonl_plain_and_compressed_is_read_line_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one", "n": 1}\n\n{"text": "tw\\u00f6"}\n{"text": null}'
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    assert read(tmp_path) == ["one", "twö", "", "three"]


def test_half_a_surrogate_pair_in_jsonl_becomes_a_replacement(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "cut \\ud83d"}\n{"text": "cut \\uD83D"}\n{"text": "whole \\ud83d\\ude00"}\n'
    )
    assert read(tmp_path) == ["cut \ufffd", "cut \ufffd", "whole 😀"]


def test_parquet_is_read(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=["one", None, "two"], n=[1, 2, 3])
    assert read(tmp_path / "a.parquet") == ["one", "", "two"]


def test_another_field_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    write_parquet(tmp_path / "b.parquet", body=["two"])
    assert read(tmp_path / "a.jsonl", field="body") + read(
        tmp_path / "b.parquet", field="body"
    ) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "a.jsonl line 3 is not JSON: "),
        (
            '{"content": "x", "id": 1}',
            r"a.jsonl line 3 has no field 'text', only \['content', 'id'\]",
        ),
        ('["x"]', "a.jsonl line 3 holds a list"),
        ('{"text": 5}', "a.jsonl line 3: field 'text' holds a int, not text"),
        ('{"text": "x"', "a.jsonl line 3 is not JSON"),
        ("[" * 100_000, "a.jsonl line 3 is not JSON: maximum recursion depth"),
        (f'{{"n": {"1" * 5000}}}', "a.jsonl line 3 is not JSON: Exceeds the limit"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_bad_parquet_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", content=["x"], text=[1])
    with pytest.raises(
        ValueError, match=r"a.parquet has no field 'body', only \['content', 'text'\]"
    ):
        read(tmp_path, field="body")
    with pytest.raises(ValueError, match=r"a.parquet: field 'text' holds a int64, not text"):
        read(tmp_path)
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match=r"a.parquet is not Parquet"):
        read(tmp_path)


def test_json_arrays_and_records_are_read_where_the_format_says_so(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "one"}, {"text": None}, {"text": "tw\ud83d"}], indent=1)
    )
    (tmp_path / "b.json").write_text('\ufeff{"text": "three", "n": 1}')
    (tmp_path / "README.md").write_text("about")
    assert read(tmp_path, format="json") == ["one", "", "tw\ufffd", "three"]


def test_json_that_holds_a_record_a_line_is_read_as_jsonl(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(tmp_path / "a.json", format="jsonl") == ["one", "two"]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    assert read(tmp_path, format="jsonl") == ["one", "two", "three"]
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n')
    assert read(tmp_path, format="jsonl") == ["four"]
    with pytest.raises(ValueError, match=r"a.json is not JSON: Extra data: line 2 .*format=jsonl"):
        read(tmp_path / "a.json", format="json")


def test_csv_is_read_with_quotes_line_ends_and_long_fields(tmp_path):
    long = "long " * 40_000
    with open(tmp_path / "a.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["n", "text"], [1, 'said "no",\r\nand left\n'], [2, ""], [3, long]])
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbftext\tn\none, two\t4\n\n"))
    assert read(tmp_path, format="csv") == ['said "no",\r\nand left\n', "", long, "one, two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"a.csv line 1 has no field 'text', only \[\]; set config.data.text_field"),
        ("n,body\n1,x\n", r"line 1 has no field 'text', only \['n', 'body'\]"),
        ("text,text\n1,x\n", r"line 1 has no field 'text'"),
        ("n,text\n1,x\n2,one, two\n", "a.csv line 3 ends a record of 3 columns, line 1 names 2"),
        ('n,text\n1,"x\ny"\n2,"cut', "a.csv line 4 is not CSV: unexpected end of data"),
        ('n,text\n1,"x" y\n', "a.csv line 2 is not CSV: ',' expected after '\"'"),
        (b"n,text\n1,\xff\n", "a.csv is not UTF-8 at byte 9"),
    ],
)
def test_bad_csv_is_named_by_file_and_line(tmp_path, content, message):
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv", format="csv")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.json",
            r"holds json \(.*a.json\): set config.data.format to json \(an array of records\)",
        ),
        ("a.JSON.gz", "set config.data.format to json .*, jsonl .* or text"),
        ("a.csv", "set config.data.format to csv"),
        ("a.tsv", "set config.data.format to csv"),
        ("a.xml", "set config.data.format to text"),
        ("a.tar.gz", r"holds packed files \(.*a.tar.gz\): unpack them"),
        ("a.zip", "unpack them; of packed files only .gz are read"),
    ],
)
def test_a_file_whose_suffix_leaves_open_what_it_is_asks_for_the_format(tmp_path, name, message):
    (tmp_path / name).write_bytes(gzip.compress(b"x") if name.endswith("gz") else b"x")
    for path in (tmp_path, tmp_path / name, tmp_path / "*"):
        with pytest.raises(ValueError, match=message):
            read(path)
        assert read(path, format="text") == ["x"]


def test_what_is_read_is_described(tmp_path, make_store):
    for name in ("a.csv", "b.csv", "README.md"):
        (tmp_path / name).write_text("text\n")
    for path, format, names in (
        (tmp_path, "csv", "2 files, a.csv to b.csv"),
        (tmp_path / "a.csv", "text", "a.csv"),
    ):
        found, files = text.find_files(str(path), format)
        description = text.describe_files(str(path), files, format=found)
        assert description == f"{path}: reading {names} as {format}"
    prefix = make_store([[1]]).prefix
    assert text.describe_files(prefix, [], format="indexed") == f"{prefix}: a token store"


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 at byte 3"):
        read(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"four\n\n" * 200 + b"\xff")
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 at byte 1203"):
        read(tmp_path)


@pytest.mark.parametrize("format", ["text", "jsonl", "csv", "json"])
def test_a_damaged_gzip_file_is_named(tmp_path, format):
    # With other bytes a damaged middle may decode all the same, and only its checksum tells.
    bits = random.Random(0)
    texts = [bits.randbytes(20).hex() for _ in range(100)]
    records = [{"text": text} for text in texts]
    content = {
        "text": "\n\n".join(texts),
        "jsonl": "\n".join(map(json.dumps, records)),
        "csv": "\n".join(["text", *texts]),
        "json": json.dumps(records),
    }[format]
    whole = gzip.compress(content.encode())
    for damaged, reason in (
        (whole[:-300], "Compressed file ended before"),
        (b"plain", "Not a gzipped file"),
        (whole[:40] + b"\xff" * 40 + whole[80:], "Error -3 while decompressing"),
        (whole[:-8] + b"\xff" * 8, "CRC check failed"),
    ):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"a.gz cannot be read: {reason}"):
            read(tmp_path / "a.gz", format=format)


def refuse(monkeypatch, module, function, *, path):
    """From now on the function refuses this path: root, who runs tests, is refused nothing."""
    allowed = getattr(module, function, None) or getattr(builtins, function)

    def refused(*arguments, **options):
        if os.fspath(arguments[0]) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return allowed(*arguments, **options)

    monkeypatch.setattr(module, function, refused, raising=False)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("{}")
    refuse(monkeypatch, text, "open", path=tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read: Permission denied; "):
        read(tmp_path)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt", "locked/*.txt"])
def test_a_folder_that_may_not_be_read_is_named_and_not_passed_over(tmp_path, monkeypatch, pattern):
    for name in ("open", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    refuse(monkeypatch, os, "scandir", path=tmp_path / "locked")
    with pytest.raises(ValueError, match="/locked cannot be read: Permission denied; make it"):
        read(tmp_path / pattern)
    assert read(tmp_path / "open/*.txt") == ["open"]


def test_a_path_below_a_folder_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    refuse(monkeypatch, os, "stat", path=tmp_path / "a.txt")
    with pytest.raises(ValueError, match="a.txt' cannot be read: Permission denied"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("pattern", ["", "*"])
def test_links_to_nothing_and_pipes_are_named_and_not_passed_over(tmp_path, pattern):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="b.txt cannot be read: No such file or directory"):
        read(tmp_path / pattern)
    (tmp_path / "b.txt").unlink()
    os.mkfifo(tmp_path / "c.txt")
    with pytest.raises(ValueError, match="c.txt is no regular file"):
        read(tmp_path / pattern)


def test_damaged_parquet_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=[f"text {number}" for number in range(1000)])
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", whole[:-1], whole[: len(whole) // 2], whole[:20] + whole[60:]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ValueError, match="a.parquet is not Parquet, or damaged: .*copy it"):
            read(tmp_path)


def write_arrow(path, *batches, as_file=False):
    """As `datasets` writes it: a stream; or in the file format."""
    import pyarrow

    schema = pyarrow.schema({"n": pyarrow.int64(), "text": pyarrow.string()})
    new = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, schema) as writer:
        for texts in batches:
            columns = [pyarrow.array(range(len(texts))), pyarrow.array(texts, pyarrow.string())]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))


def write_saved(folder, *shards):
    """What `Dataset.save_to_disk` of datasets 5.2 leaves; its shards are each a list of texts."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, texts[:1], texts[1:])
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')


@pytest.mark.parametrize("as_file", [False, True])
def test_arrow_files_are_read_batch_by_batch(tmp_path, as_file):
    texts = [f"text {number}" for number in range(3000)]
    write_arrow(tmp_path / "a.arrow", texts[:2000], [], texts[2000:], [None], as_file=as_file)
    assert read(tmp_path) == [*texts, ""]


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path):
    write_saved(tmp_path / "saved", ["one", "two"], ["three"])
    assert read(tmp_path / "saved") == ["one", "two", "three"]
    assert text.find_files(str(tmp_path / "saved"))[0] == "arrow"
    (tmp_path / "saved" / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00001-of-00002.arrow"}]}'
    )
    assert read(tmp_path / "saved") == ["three"]


def test_of_a_saved_dict_of_splits_train_is_read_and_the_others_are_named(tmp_path):
    for split in ("test", "train", "odd"):
        write_saved(tmp_path / "saved" / split, [split])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test", "train", "odd"]}')
    path = str(tmp_path / "saved")
    assert read(path) == ["train"]
    format, files = text.find_files(path)
    assert text.describe_files(path, files, format=format) == (
        f"{path}: reading train/data-00000-of-00001.arrow as arrow, and not the splits test, odd"
    )
    assert read(tmp_path / "saved" / "test") == ["test"]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test", "odd"]}')
    with pytest.raises(ValueError, match="the splits test, odd; set config.data.path to .*/test'"):
        read(tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["odd"]}')
    assert read(tmp_path / "saved") == ["odd"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json is not JSON: .*; save the dataset again"),
        ("[]", "state.json should list names under '_data_files'"),
        ('{"_data_files": []}', "should list names under '_data_files', and has None; save"),
        ('{"_data_files": [{"filename": 5}]}', "and has 5; save the dataset again"),
        ('{"_data_files": [{"filename": "../a"}]}', "and has '../a'; save the dataset again"),
        ('{"_data_files": ["a\\u0000b"]}', r"and has 'a\\x00b'; save the dataset again"),
        ('{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow cannot be read: No such file"),
    ],
)
def test_a_saved_dataset_of_another_shape_is_named(tmp_path, state, message):
    write_saved(tmp_path / "saved", ["one"])
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "saved")


@pytest.mark.parametrize("as_file", [False, True])
def test_damaged_arrow_is_named(tmp_path, as_file):
    path = tmp_path / "a.arrow"
    write_arrow(path, ["some text"], ["more"] * 100, as_file=as_file)
    whole = path.read_bytes()
    # The second batch and the end mark left out: what remains is a sound stream.
    first = whole.index(b"some text") + 16
    invalid = whole.replace(b"some", b"s\xffme")
    for content in (b"", whole[:-1], whole[:first], whole[: len(whole) // 2], invalid):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.arrow is not Arrow, or damaged: .*copy it"):
            read(tmp_path)
    write_arrow(path, ["some text"], as_file=as_file)
    with pytest.raises(ValueError, match=r"a.arrow has no field 'body', only \['n', 'text'\]"):
        read(tmp_path, field="body")
    with pytest.raises(ValueError, match="a.arrow: field 'n' holds a int64, not text"):
        read(tmp_path, field="n")


def test_a_dataset_that_datasets_saved_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [f"text {number}" for number in range(2500)]
    saved = datasets.Dataset.from_dict({"text": texts, "n": range(2500)})
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    assert read(tmp_path / "one") == texts
    parts = saved.train_test_split(0.2)
    parts.save_to_disk(tmp_path / "parts")
    assert read(tmp_path / "parts") == parts["train"][:]["text"]
    assert read(tmp_path / "parts" / "test") == parts["test"][:]["text"]


def test_a_path_without_files_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "*.txt"):
        with pytest.raises(ValueError, match="finds no file; give 'python-stdlib', the prefix"):
            read(path)


def test_a_folder_of_mixed_formats_asks_for_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(
        ValueError,
        match=r"mixes formats: jsonl \(a.jsonl\), text \(README.md\); set config.data.format",
    ):
        read(tmp_path)
    assert read(tmp_path, format="jsonl") == ["one"]
    with pytest.raises(ValueError, match="holds no parquet file"):
        read(tmp_path, format="parquet")


def test_a_folder_with_a_store_asks_for_its_prefix(tmp_path, make_store):
    prefix = make_store([[1]]).prefix
    with pytest.raises(ValueError, match=f"set config.data.path to the store's prefix, '{prefix}'"):
        text.find_files(str(tmp_path))
    assert text.find_files(prefix) == ("indexed", [])
    os.remove(prefix + ".bin")
    assert text.find_files(prefix) == ("indexed", [])


def test_the_python_library_leaves_out_installed_packages():
    format, files = text.find_files("python-stdlib")
    names = [name for name, _ in files]
    assert format == "text" and "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or "dist-packages" in name]
