"""Documents -> a token store: `convert` writes one where asked, `cached_store` in the cache.

`train_tokenizer` makes the tokenizer first, of the same documents.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxscale.data import text
from jaxscale.data.block_sums import SUFFIX
from jaxscale.data.checks import SMALL_BYTES, StoreChecks
from jaxscale.data.indexed import (
    FILES,
    IndexedDataset,
    IndexedWriter,
    StorePath,
    is_store,
    strip_suffix,
)
from jaxscale.data.permutation import derive_keys, permute
from jaxscale.data.tokenizer import Tokenizer, train_bpe
from jaxscale.files import cache_folder, telling

# Part of the cache key: raise it when the same text and tokenizer give another store.
FORMAT_VERSION = 2
# The order of documents in a store is not the run's seed's business: one store serves every seed.
ORDER_SEED = 0
# One call of a tokenizer: enough for its threads to share, small enough to stay in memory.
CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 1024, 2**22
PROGRESS_SECONDS = 5.0
LOCK = "lock"  # in the folder of a conversion
WRITABLE_CACHE = (
    "text is converted there, which takes twice the tokens' size: make room, or set "
    "config.data.cache_dir to another folder"
)

log = logging.getLogger(__name__)


def convert(
    path: str,
    prefix: StorePath,
    *,
    tokenizer: Tokenizer,
    format: str = "auto",
    text_field: str = "text",
) -> IndexedDataset:
    """Tokenises the text at `path` into the store `prefix` and returns it opened.

    Every document gets the tokenizer's end-of-document token and documents are written in a hashed
    order, so that neighbours in the store are unrelated and its tail is a fair held-out sample.
    Needs twice the store's size on disk while it runs, and no memory beyond 8 bytes per document.
    Documents without text are skipped and counted in the log.
    Raises ValueError for unreadable text (see text.read_documents) or if no document has text, and
    OSError if the store cannot be written; nothing of it is left then.
    """
    format, files = text.find_files(path, format)
    if format == "indexed":
        raise ValueError(f"{path!r} is a token store already; train on it as it is")
    documents = text.read_documents(path, files, format=format, text_field=text_field)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
    with _work_folder(Path(strip_suffix(prefix))) as folder:
        with IndexedWriter(folder / "in_order", dtype) as writer:
            num_empty = _write_in_order(writer, documents, tokenizer=tokenizer, name=path)
        if num_empty:
            log.warning("%s: skipped %d documents without text", path, num_empty)
        with IndexedWriter(prefix, dtype, temporary=folder) as writer:
            _write_shuffled(writer, IndexedDataset(folder / "in_order"), name=path)
    return IndexedDataset(prefix)


def train_tokenizer(
    path: str,
    folder: Path,
    *,
    vocab_size: int,
    format: str = "auto",
    text_field: str = "text",
) -> None:
    """Trains a tokenizer on the text at `path` and writes it to `folder`, as Hugging Face does.

    Raises as `convert`.
    """
    format, files = text.find_files(path, format)
    if format == "indexed":
        raise ValueError(f"{path!r} is a token store, and a tokenizer is trained on text")
    documents = text.read_documents(path, files, format=format, text_field=text_field)
    train_bpe(_counted(documents, path), folder, vocab_size=vocab_size)


def _counted(documents: Iterable[str], name: str) -> Iterator[str]:
    progress, num_bytes = _Progress(name), 0
    for number, document in enumerate(documents, 1):
        num_bytes += len(document.encode())
        progress.tell(
            f"{number:,} documents counted for the tokenizer, "
            f"{num_bytes / progress.seconds / 1e6:.1f} MB/s"
        )
        yield document
    log.info("%s: choosing the tokenizer's tokens", name)


def cached_store(
    path: str,
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    text_field: str = "text",
    cache_dir: str = "",
) -> IndexedDataset:
    """The store for the text at `path`: from the cache, or converted into it first.

    The key covers the names, sizes and modification times of the files, the tokenizer's content,
    the field and FORMAT_VERSION, so changed text makes a new store (old ones stay; delete the
    folder to free the space). Processes that start together convert once: the others wait for a
    lock. Where the file system has no locks each converts for itself, and all end with the same
    files. A cached store that cannot be opened, or is not as it was written, is converted again;
    what killed conversions left in the cache is removed.
    Raises ValueError for what `convert` refuses, and for a cache that cannot be written.
    """
    format, files = text.find_files(path, format)
    root = Path(os.path.expanduser(cache_dir)) if cache_dir else default_cache_dir()
    prefix = root / _fingerprint(files, tokenizer, format=format, text_field=text_field)
    _remove_leftovers(root, "*")
    store = _open_cached(prefix, path)
    if store is not None:
        return store
    with telling(f"the cache {root} cannot be written to", WRITABLE_CACHE):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(prefix.with_suffix(".lock")):
            store = _open_cached(prefix, path)
            if store is None:
                _build(prefix, path, tokenizer=tokenizer, format=format, text_field=text_field)
                store = IndexedDataset(prefix, name=path)
    return store


def default_cache_dir() -> Path:
    """Where stores are kept unless config.data.cache_dir names another folder."""
    return cache_folder() / "data"


def _write_in_order(
    writer: IndexedWriter, documents: Iterable[str], *, tokenizer: Tokenizer, name: str
) -> int:
    """The number of documents without text, which are left out."""
    num_empty = num_tokens = num_bytes = 0
    end, progress = np.array([tokenizer.end_of_document], writer.dtype), _Progress(name)
    for chunk in _chunks(documents):
        filled = [document for document in chunk if document]
        num_empty += len(chunk) - len(filled)
        for ids in tokenizer.encode_batch(filled):
            writer.add(np.concatenate([ids.astype(writer.dtype), end]))
            num_tokens += len(ids) + 1
        num_bytes += sum(len(document.encode()) for document in filled)
        speed = num_bytes / progress.seconds / 1e6
        progress.tell(
            f"{writer.num_documents:,} documents, {num_tokens:,} tokens, {speed:.1f} MB/s"
        )
    if not writer.num_documents:
        raise ValueError(
            f"{name}: none of the {num_empty} documents holds text; check config.data.path and "
            "config.data.text_field"
        )
    return num_empty


class _Progress:
    """Logs how far it is, every PROGRESS_SECONDS at most."""

    def __init__(self, name: str):
        self._name = name
        self._start = self._told = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def tell(self, message: str) -> None:
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._told = time.monotonic()
            log.info("%s: %s", self._name, message)


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if len(chunk) == CHUNK_DOCUMENTS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _write_shuffled(writer: IndexedWriter, source: IndexedDataset, *, name: str) -> None:
    keys, progress = derive_keys(ORDER_SEED), _Progress(name)
    for first in range(0, len(source), 2**16):
        block = np.arange(first, min(first + 2**16, len(source)))
        for number in permute(block, len(source), keys=keys):
            writer.add(source[number])
        progress.tell(f"{writer.num_documents:,} of {len(source):,} documents in hashed order")


def _fingerprint(files: text.Files, tokenizer: Tokenizer, *, format: str, text_field: str) -> str:
    listing = []
    for name, file in files:
        with telling(f"{file} cannot be read", "was it moved away?"):
            listing.append((name, file.stat().st_size, file.stat().st_mtime_ns))
    key = json.dumps([FORMAT_VERSION, format, text_field, tokenizer.fingerprint, listing])
    return hashlib.sha256(key.encode()).hexdigest()[:20]


def _open_cached(prefix: Path, name: str) -> IndexedDataset | None:
    if not is_store(prefix):
        return None
    try:
        store = IndexedDataset(prefix, name=name)
        with telling(f"{prefix}{SUFFIX} cannot be read", "it is written anew"):
            checks = StoreChecks(store, is_cached=True)
        if checks.num_bytes <= SMALL_BYTES:
            checks.check_all()
        return store
    except ValueError as error:
        log.warning("the cached store is damaged, converting again: %s", error)
        return None


def _build(prefix: Path, path: str, *, tokenizer: Tokenizer, format: str, text_field: str) -> None:
    """Converts beside `prefix`, then replaces its files one by one.

    The same key gives the same bytes, so whoever else builds or reads meanwhile sees the old file
    or an equal new one; moving a damaged store out of the way first would leave a moment without
    any.
    """
    start = time.monotonic()
    with _work_folder(prefix) as folder:
        store = convert(
            path, folder / "store", tokenizer=tokenizer, format=format, text_field=text_field
        )
        for end in FILES:
            os.replace(folder / f"store{end}", f"{prefix}{end}")
    seconds = time.monotonic() - start
    log.info(
        "%s: %d documents, %d tokens, converted in %.1f s",
        path,
        len(store),
        store.num_tokens,
        seconds,
    )


@contextlib.contextmanager
def _work_folder(prefix: Path) -> Iterator[Path]:
    """A folder beside a store for what is not whole: whatever goes wrong, one deletion cleans up.

    It is locked while this process lives: those of processes that were killed are removed first.
    """
    _remove_leftovers(prefix.parent, prefix.name)
    name = f"{prefix.name}.%s-{os.getpid()}-{os.urandom(4).hex()}"
    folder = prefix.with_name(name % "tmp")
    # It gets the name that is looked for once it is locked.
    unlocked = prefix.with_name(name % "new")
    unlocked.mkdir(parents=True)
    try:
        with open(unlocked / LOCK, "w") as file:
            with contextlib.suppress(OSError):  # no locks here: then nobody else removes it either
                fcntl.flock(file, fcntl.LOCK_EX)
            unlocked.rename(folder)
            yield folder
    finally:
        for path in (unlocked, folder):
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path, name: str) -> None:
    """Removes what killed conversions into the stores of this name ("*": all) left behind."""
    pattern = name if name == "*" else glob.escape(name)
    for path in folder.glob(f"{pattern}.tmp-*"):
        # Held by a live process, or not ours to open, or of a file system without locks.
        with contextlib.suppress(OSError), open(path / LOCK, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s: that conversion was cut short", path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("no lock on %s (%s); every process converts for itself", path, error)
        yield
