"""How likely a model finds the documents of files, file by file or folder by folder."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np

from jaxscale.data import text
from jaxscale.data.indexed import IndexedDataset
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.score import Passage, scores, windows

ALL = "all"


@dataclasses.dataclass
class Judged:
    """Sums over documents. num_bytes: of their text in UTF-8; None where tokens alone are kept."""

    loss: float = 0.0
    num_tokens: int = 0
    num_documents: int = 0
    num_bytes: int | None = 0

    def add(self, other: "Judged") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.num_documents += other.num_documents
        if self.num_bytes is None or other.num_bytes is None:
            self.num_bytes = None
        else:
            self.num_bytes += other.num_bytes

    def record(self, name: str) -> dict[str, Any]:
        """nats a token, perplexity and bits a byte, which does not depend on the tokenizer."""
        nats = self.loss / max(self.num_tokens, 1)
        bits = self.loss / math.log(2) / self.num_bytes if self.num_bytes else None
        return {
            "name": name,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "nats_per_token": nats,
            "perplexity": math.exp(min(nats, 700)),
            "bits_per_byte": bits,
        }


def judge(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    path: str,
    format: str = "auto",
    text_field: str = "text",
    by: str = "file",
    length: int,
) -> Iterator[dict[str, Any]]:
    """A record for each file, or folder, of a data path, and for all.

    by: "file" or "folder", the first below the path. length: tokens of a window. A document's first
    token is not judged, its end is. Raises ValueError for data that cannot be read.
    """
    total = Judged()
    documents = _documents(path, tokenizer, format=format, text_field=text_field)
    for name, group in itertools.groupby(documents, lambda document: _group(document[0], by)):
        judged = Judged()
        for _, tokens, num_bytes in group:
            judged.add(_judge(engine, tokens, num_bytes=num_bytes, length=length))
        total.add(judged)
        yield judged.record(name)
    if not total.num_documents:
        raise ValueError(f"--data={path!r} holds no document")
    yield total.record(ALL)


def _group(name: str, by: str) -> str:
    parts = PurePath(name).parts
    return parts[0] if by == "folder" and len(parts) > 1 else name


def _documents(
    path: str, tokenizer: Tokenizer, *, format: str, text_field: str
) -> Iterator[tuple[str, np.ndarray, int | None]]:
    """(file, tokens with the end of the document, bytes of text)."""
    found, files = text.find_files(path, format)
    if found == "indexed":
        dataset = IndexedDataset(path)
        for begin, end in itertools.pairwise(dataset.document_offsets):
            yield path, np.asarray(dataset.tokens[begin:end], np.int32), None
    for name, file in files:
        for document in text.read_documents(
            path, [(name, file)], format=found, text_field=text_field
        ):
            tokens = [*tokenizer.encode(document), tokenizer.end_of_document]
            yield name, np.array(tokens, np.int32), len(document.encode())


def _judge(engine: Engine, tokens: np.ndarray, *, num_bytes: int | None, length: int) -> Judged:
    if max(tokens) >= engine.model.vocab_size:
        raise ValueError(
            f"--data holds token {max(tokens)}; the model has {engine.model.vocab_size}: it was "
            "trained with another tokenizer"
        )
    first, rest = int(tokens[0]), tokens[1:].tolist()
    passages: Iterator[Passage] = windows(rest, before=first, length=length)
    judged = Judged(num_documents=1, num_bytes=num_bytes)
    for score in scores(engine, passages):
        judged.loss += score.loss
        judged.num_tokens += score.num_tokens
    return judged
