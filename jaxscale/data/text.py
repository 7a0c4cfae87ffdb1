"""Text on disk -> documents: plain files hold one each, JSONL and Parquet one a record.

A plain file that is alone is cut into documents behind its blank lines.
"""

import glob
import gzip
import itertools
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxscale.data import indexed

STDLIB = "python-stdlib"
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".bin": "indexed",
    ".idx": "indexed",
}

# A text that is alone stays one document if it would become fewer: of so many, 1% is one.
LEAST_DOCUMENTS = 100
# Its documents end here at the latest, with the line: what is cut into them is read piece by piece.
MOST_DOCUMENT_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# (name, path) pairs. A name is relative to the folder asked for: a moved folder keeps its cache.
Files = list[tuple[str, Path]]

log = logging.getLogger(__name__)


def find_files(path: str, format: str = "auto") -> tuple[str, Files]:
    """Returns (format, files): which format `path` is in, and its files, sorted by name.

    path: 'python-stdlib', a token store's prefix, a file, a folder (read recursively, hidden files
        left out) or a glob.
    format: 'auto' goes by the suffixes. The files of 'indexed' are not listed.
    Raises ValueError if nothing is there or the suffixes of a folder disagree.
    """
    if path == STDLIB:
        return "text", _stdlib_files()
    if format == "indexed" or (format == "auto" and indexed.is_store(path)):
        return "indexed", []
    files = _list_files(path)
    formats = {name: _format_of(name) for name, _ in files}
    if format == "auto":
        return _agreed(path, formats), files
    if format != "text" and len(files) > 1:  # a folder of data usually has a README beside it
        files = [file for file in files if formats[file[0]] == format]
    if not files:
        raise ValueError(
            f"config.data.path={path!r} holds no {format} file; "
            "set config.data.format to what it holds"
        )
    return str(format), files


def read_documents(path: str, files: Files, *, format: str, text_field: str) -> Iterator[str]:
    """Yields the text of every document, in the order of `files`.

    format, files: as `find_files` gave them. Raises ValueError naming file and line for what is not
    UTF-8, not JSON, or lacks the field. Only 'python-stdlib' may skip: it holds files in other
    encodings on purpose, to test Python with.
    """
    read: Callable[[Path, str], Iterator[str]]
    if format == "jsonl":
        read = _read_jsonl
    elif format == "parquet":
        read = _read_parquet
    elif path == STDLIB:
        read = _read_stdlib
    else:
        read = _read_text if len(files) > 1 else _read_lone_text
    for _, file in files:
        yield from read(file, text_field)


def _stdlib_files() -> Files:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(str(file.relative_to(root)), file) for file in root.rglob("*.py")]
    installed = ("site-packages", "dist-packages")
    return sorted((name, file) for name, file in files if not name.startswith(installed))


def _list_files(path: str) -> Files:
    found = os.path.expanduser(path)
    if os.path.isdir(found):
        files = _visible_files(Path(found))
    elif os.path.isfile(found):
        files = [(os.path.basename(found), Path(found))]
    else:
        names = glob.glob(found, recursive=True)
        files = [(name, Path(name)) for name in names if os.path.isfile(name)]
    if not files:
        raise ValueError(
            f"config.data.path={path!r} finds no file; give 'python-stdlib', the prefix of a "
            ".bin/.idx store, or a text, JSONL or Parquet file, folder or glob "
            "(quote a glob in the shell)"
        )
    return sorted(files)


def _visible_files(root: Path) -> Files:
    files = [(file.relative_to(root), file) for file in root.rglob("*") if file.is_file()]
    return [
        (str(name), file)
        for name, file in files
        if not any(part.startswith(".") for part in name.parts)
    ]


def _format_of(name: str) -> str:
    name = name.lower().removesuffix(".gz")
    return SUFFIXES.get(os.path.splitext(name)[1], "text")


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
    return next(iter(examples))


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
    try:
        yield file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        log.debug("skipped %s: not UTF-8", file)


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file} line {number} is not JSON: {error}") from error
            text = _text_of(record, field, where=f"{file} line {number}")
            yield _without_half_pairs(text) if rb"\ud" in line else text


def _without_half_pairs(text: str) -> str:
    """Half of a surrogate pair, a cut emoji, is valid JSON but no text: UTF-8 cannot hold it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text_of(record: Any, field: str, *, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(
            f"{where} holds a {type(record).__name__}; each line must be an object with {field!r}"
        )
    if field not in record:
        raise ValueError(
            f"{where} has no field {field!r}, only {sorted(record)}; set config.data.text_field"
        )
    text = record[field]
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise ValueError(
            f"{where}: field {field!r} holds a {kind}, not text; set config.data.text_field"
        )
    return text or ""


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package `pyarrow`: pip install 'jaxscale[data]'"
        ) from error
    try:
        source = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not Parquet: {error}") from error
    with source:
        names = source.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{file} has no field {field!r}, only {names}; set config.data.text_field"
            )
        kind = source.schema_arrow.field(field).type
        if kind not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(
                f"{file}: field {field!r} holds {kind}, not text; set config.data.text_field"
            )
        for records in source.iter_batches(batch_size=1024, columns=[field]):
            for text in records.column(0).to_pylist():
                yield text or ""


def _open(file: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(file) if file.suffix == ".gz" else open(file, "rb")
