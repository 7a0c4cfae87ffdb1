"""Text on disk -> documents: plain files hold one each, all other formats one a record.

A plain file that is alone is cut into documents behind its blank lines. A folder that Hugging
Face's `datasets` saved is the Arrow files that it names.
"""

import contextlib
import csv
import glob
import gzip
import itertools
import json
import logging
import os
import stat
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jaxscale.data import indexed
from jaxscale.files import is_file, telling

STDLIB = "python-stdlib"
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".xml": "XML",
    ".bin": "indexed",
    ".idx": "indexed",
} | dict.fromkeys((".tar", ".tgz", ".zip", ".7z", ".bz2", ".xz", ".zst"), "packed files")
# What a suffix leaves open, or nobody means as plain text, and what to do about it.
UNCLEAR = {
    "json": "set config.data.format to json (an array of records), jsonl (a record a line) or text "
    "(each file as it stands)",
    "csv": "set config.data.format to csv (the first line names the columns) or text (each file as "
    "it stands)",
    "XML": "set config.data.format to text to read each file as it stands, or take the text out",
    "packed files": "unpack them; of packed files only .gz are read",
}

# A text that is alone stays one document if it would become fewer: of so many, 1% is one.
LEAST_DOCUMENTS = 100
# Its documents end here at the latest, with the line: what is cut into them is read piece by piece.
MOST_DOCUMENT_BYTES = 2**20
READABLE = "make it readable, or narrow config.data.path to a glob"
# What ends an Arrow stream that was written to its end.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# (name, path) pairs. A name is relative to the folder asked for: a moved folder keeps its cache.
Files = list[tuple[str, Path]]

log = logging.getLogger(__name__)


def find_files(path: str, format: str = "auto") -> tuple[str, Files]:
    """Returns (format, files): which format `path` is in, and its files, sorted by name.

    path: 'python-stdlib', a token store's prefix, a file, a folder (read recursively, hidden files
        left out), a dataset saved by `datasets` (of several splits: "train") or a glob.
    format: 'auto' goes by the suffixes. The files of 'indexed' are not listed.
    Raises ValueError if nothing is there, the suffixes of a folder disagree, or they do not say how
    to read the files.
    """
    if path == STDLIB:
        return "text", _stdlib_files()
    if format == "indexed" or (format == "auto" and indexed.is_store(path)):
        return "indexed", []
    if format in ("auto", "arrow") and (files := _saved_dataset(path)):
        return "arrow", files
    files = _list_files(path)
    if format == "auto":
        return _agreed(path, {name: _format_of(name) for name, _ in files}), files
    if format != "text" and len(files) > 1:  # a folder of data usually has a README beside it
        # Records a line often go by .json; where there is .jsonl as well, .json is something else.
        files = _of_format(files, format) or _of_format(files, "json" if format == "jsonl" else "")
    if not files:
        raise ValueError(
            f"config.data.path={path!r} holds no {format} file; "
            "set config.data.format to what it holds"
        )
    return str(format), files


def describe_files(path: str, files: Files, *, format: str) -> str:
    """What a run says it reads; format, files: as `find_files` gave them."""
    if format == "indexed":
        return f"{path}: a token store"
    first, last = files[0][0], files[-1][0]
    names = first if first == last else f"{len(files)} files, {first} to {last}"
    splits = _splits_of(path) if format == "arrow" else []
    others = ", ".join(split for split in splits if not first.startswith(f"{split}{os.sep}"))
    left_out = f", and not the splits {others}" if others else ""
    return f"{path}: reading {names} as {format}{left_out}"


def read_documents(path: str, files: Files, *, format: str, text_field: str) -> Iterator[str]:
    """Yields the text of every document, in the order of `files`.

    format, files: as `find_files` gave them. Raises ValueError naming file and line for what is not
    UTF-8, not JSON, or lacks the field. Only 'python-stdlib' may skip: it holds files in other
    encodings on purpose, to test Python with.
    """
    read = READERS[format]
    if format == "text":
        lone = _read_lone_text if len(files) == 1 else _read_text
        read = _read_stdlib if path == STDLIB else lone
    for _, file in files:
        yield from read(file, text_field)


def _stdlib_files() -> Files:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(str(file.relative_to(root)), file) for file in root.rglob("*.py")]
    installed = ("site-packages", "dist-packages")
    return sorted((name, file) for name, file in files if not name.startswith(installed))


def _list_files(path: str) -> Files:
    found = os.path.expanduser(path)
    with telling(f"config.data.path={path!r} cannot be read", READABLE):
        if os.path.isdir(found):
            files = _visible_files(Path(found))
        elif is_file(found):
            files = [(os.path.basename(found), Path(found))]
        else:
            _check_folders(found)
            names = glob.glob(found, recursive=True)
            files = [(name, Path(name)) for name in names if not os.path.isdir(name)]
    if not files:
        raise ValueError(
            f"config.data.path={path!r} finds no file; give 'python-stdlib', the prefix of a "
            ".bin/.idx store, or a text, JSONL or Parquet file, folder or glob "
            "(quote a glob in the shell)"
        )
    _check_files(files)
    return sorted(files)


def _check_files(files: Files) -> None:
    for _, file in files:
        with telling(f"{file} cannot be read", READABLE):
            if not stat.S_ISREG(file.stat().st_mode):
                raise ValueError(f"{file} is no regular file; move it away")


def _visible_files(root: Path) -> Files:
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise_for_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return [(str(file.relative_to(root)), file) for file in files]


def _check_folders(pattern: str) -> None:
    """Raises for a folder that the glob would have to look into and cannot: glob passes it over."""
    parent = os.path.dirname(pattern)
    if glob.has_magic(parent):
        _check_folders(parent)
    for folder in glob.glob(parent or ".", recursive=True):
        if os.path.isdir(folder):
            try:
                os.scandir(folder).close()
            except OSError as error:
                _raise_for_folder(error)


def _raise_for_folder(error: OSError) -> NoReturn:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}; {READABLE}") from error


def _format_of(name: str) -> str:
    name = name.lower().removesuffix(".gz")
    return SUFFIXES.get(os.path.splitext(name)[1], "text")


def _saved_dataset(path: str) -> Files:
    """The files of a folder that `save_to_disk` made, in its order; none of any other folder."""
    root = folder = Path(os.path.expanduser(path))
    with telling(f"config.data.path={path!r} cannot be read", READABLE):
        if splits := _splits_of(path):
            folder = root / _split_to_read(path, splits)
        elif not (is_file(root / "state.json") and is_file(root / "dataset_info.json")):
            return []
    names = _names_in(folder / "state.json", "_data_files")
    files = [(str((folder / name).relative_to(root)), folder / name) for name in names]
    _check_files(files)
    return files


def _splits_of(path: str) -> list[str]:
    """The splits of a saved DatasetDict; none of any other path."""
    file = Path(os.path.expanduser(path), "dataset_dict.json")
    return _names_in(file, "splits") if is_file(file) else []


def _split_to_read(path: str, splits: list[str]) -> str:
    if "train" in splits or len(splits) == 1:
        return "train" if "train" in splits else splits[0]
    raise ValueError(
        f"config.data.path={path!r} is a dataset of the splits {', '.join(splits)}; set "
        f"config.data.path to the folder of one, such as {os.path.join(path, splits[0])!r}"
    )


def _names_in(file: Path, key: str) -> list[str]:
    """The names in the list under the key, of a file that describes a saved dataset."""
    value = _load_json(file, "save the dataset again")
    listed = value.get(key) if isinstance(value, dict) else None
    names = []
    for entry in listed if isinstance(listed, list) and listed else [None]:
        name = entry.get("filename") if isinstance(entry, dict) else entry
        if not isinstance(name, str) or not name.isprintable() or os.path.basename(name) != name:
            raise ValueError(
                f"{file} should list names under {key!r}, and has {name!r}; save the dataset again"
            )
        names.append(name)
    return names


def _of_format(files: Files, format: str) -> Files:
    return [(name, file) for name, file in files if _format_of(name) == format]


def _agreed(path: str, formats: dict[str, str]) -> str:
    """formats: by name."""
    examples = {format: name for name, format in formats.items()}
    if "indexed" in examples:
        prefix = os.path.join(path, indexed.strip_suffix(examples["indexed"]))
        raise ValueError(
            f"config.data.path={path!r} is a folder with a token store in it; "
            f"set config.data.path to the store's prefix, {prefix!r}"
        )
    if len(examples) > 1:
        mix = ", ".join(f"{format} ({name})" for format, name in sorted(examples.items()))
        raise ValueError(
            f"config.data.path={path!r} mixes formats: {mix}; "
            "set config.data.format to the one to read, or use a glob"
        )
    ((format, name),) = examples.items()
    if format in UNCLEAR:
        raise ValueError(f"config.data.path={path!r} holds {format} ({name}): {UNCLEAR[format]}")
    return format


def _read_text(file: Path, _: str) -> Iterator[str]:
    with _open(file) as opened:
        yield _decode_text(opened.read(), file)


def _read_lone_text(file: Path, _: str) -> Iterator[str]:
    """Its documents, which together are the text."""
    with _open(file) as opened:
        pieces = _pieces(opened)
        first = list(itertools.islice(pieces, LEAST_DOCUMENTS))
        if len(first) < LEAST_DOCUMENTS:
            first = [b"".join(first)]
        start = 0
        for piece in itertools.chain(first, pieces):
            yield _decode_text(piece, file, start=start)
            start += len(piece)


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Each ends behind blank lines, or behind the line that makes it long enough."""
    piece: list[bytes] = []
    size, is_over = 0, False
    for line in lines:
        is_blank = line.isspace()
        if (is_over and not is_blank) or size >= MOST_DOCUMENT_BYTES:
            yield b"".join(piece)
            piece, size, is_over = [], 0, False
        # Blank lines that nothing precedes belong to what follows.
        is_over = is_blank and (is_over or bool(piece and not piece[-1].isspace()))
        piece.append(line)
        size += len(line)
    if piece:
        yield b"".join(piece)


def _decode_text(content: bytes, file: Path, *, start: int = 0) -> str:
    """start: where in the file the content begins."""
    mark = len(BYTE_ORDER_MARK) if start == 0 and content.startswith(BYTE_ORDER_MARK) else 0
    try:
        return content[mark:].decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 at byte {start + mark + error.start}; "
            "convert it, move it away, or narrow config.data.path to a glob"
        ) from error


def _read_stdlib(file: Path, _: str) -> Iterator[str]:
    with _open(file) as opened:
        content = opened.read()
    try:
        yield content.decode()
    except UnicodeDecodeError:
        log.debug("skipped %s: not UTF-8", file)


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            where = f"{file} line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where} is not JSON: {error}; correct it, or leave it out"
                ) from error
            yield _text_of(record, field, where=where)


def _read_json(file: Path, field: str) -> Iterator[str]:
    """An array of records, or one record."""
    value = _load_json(file, "if it holds a record a line, set config.data.format=jsonl")
    for number, record in enumerate(value if isinstance(value, list) else [value], 1):
        yield _text_of(record, field, where=f"{file} record {number}")


def _load_json(file: Path, fix: str) -> Any:
    with _open(file) as opened:
        content = _decode_text(opened.read(), file)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; {fix}") from error


def _read_csv(file: Path, field: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)  # a document may be longer than the 128 KiB that csv allows
    delimiter = "\t" if ".tsv" in file.name.lower() else ","
    with _open(file) as opened:
        rows = csv.reader(_decoded_lines(opened, file), delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if names.count(field) != 1:
                raise ValueError(_no_field(f"{file} line 1", field, names=names))
            column = names.index(field)
            for row in filter(None, rows):
                if len(row) != len(names):
                    raise ValueError(
                        f"{file} line {rows.line_num} ends a record of {len(row)} columns, line 1 "
                        f"names {len(names)}; correct it (text with commas or line ends is quoted)"
                    )
                yield row[column]
        except csv.Error as error:
            raise ValueError(f"{file} line {rows.line_num} is not CSV: {error}") from error


def _decoded_lines(lines: Iterable[bytes], file: Path) -> Iterator[str]:
    start = 0
    for line in lines:
        yield _decode_text(line, file, start=start)
        start += len(line)


def _text_of(record: Any, field: str, *, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(
            f"{where} holds a {type(record).__name__}; each record must be an object with {field!r}"
        )
    if field not in record:
        raise ValueError(_no_field(where, field, names=sorted(record)))
    text = record[field]
    if not isinstance(text, str | None):
        raise ValueError(_no_text(where, field, kind=type(text).__name__))
    # Half of a surrogate pair, a cut emoji, is valid JSON but no text: UTF-8 cannot hold it.
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_field(where: str, field: str, *, names: list[str]) -> str:
    return f"{where} has no field {field!r}, only {names}; set config.data.text_field"


def _no_text(where: str, field: str, *, kind: Any) -> str:
    return f"{where}: field {field!r} holds a {kind}, not text; set config.data.text_field"


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    _require_pyarrow(file)
    import pyarrow.parquet

    with (
        _open(file),  # tells what cannot be opened
        _telling_damage(file, "Parquet"),
        pyarrow.parquet.ParquetFile(file) as source,
    ):
        _check_column(source.schema_arrow, field, file=file)
        for records in source.iter_batches(batch_size=1024, columns=[field]):
            yield from _texts(records.column(0))


def _read_arrow(file: Path, field: str) -> Iterator[str]:
    _require_pyarrow(file)
    import pyarrow

    with _open(file), _telling_damage(file, "Arrow"), pyarrow.OSFile(str(file)) as source:
        reader, batches = _open_arrow(source)
        _check_column(reader.schema, field, file=file)
        column = reader.schema.get_field_index(field)
        for batch in batches:
            for start in range(0, batch.num_rows, 1024):
                yield from _texts(batch.column(column).slice(start, 1024))


def _open_arrow(source: Any) -> tuple[Any, Iterable[Any]]:
    """A reader of the file's schema, and its batches; of both formats, the file and the stream."""
    import pyarrow

    if source.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        return reader, map(reader.get_batch, range(reader.num_record_batches))
    source.seek(max(0, source.size() - len(END_OF_STREAM)))
    if source.read() != END_OF_STREAM:  # a stream that is cut between its batches reads as whole
        raise pyarrow.ArrowInvalid("its end is missing")
    source.seek(0)
    reader = pyarrow.ipc.open_stream(source)
    return reader, reader


def _require_pyarrow(file: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package `pyarrow`: pip install 'jaxscale[data]'"
        ) from error


@contextlib.contextmanager
def _telling_damage(file: Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())  # some have several lines
        raise ValueError(
            f"{file} is not {kind}, or damaged: {reason}; copy it again, or move it away"
        ) from error


def _check_column(schema: Any, field: str, *, file: Path) -> None:
    import pyarrow

    if schema.names.count(field) != 1:
        raise ValueError(_no_field(str(file), field, names=schema.names))
    kind = schema.field(field).type
    if kind not in (pyarrow.string(), pyarrow.large_string()):
        raise ValueError(_no_text(str(file), field, kind=kind))


def _texts(column: Any) -> Iterator[str]:
    column.validate(full=True)  # offsets that point elsewhere would be followed
    for text in column.to_pylist():
        yield text or ""


@contextlib.contextmanager
def _open(file: Path) -> Iterator[gzip.GzipFile | BinaryIO]:
    """The file as bytes, unpacked. What goes wrong while it is read is told by its name."""
    try:
        with gzip.open(file) if file.name.lower().endswith(".gz") else open(file, "rb") as opened:
            yield opened
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{file} cannot be read: {reason}; copy it again, or move it away"
        ) from error


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
