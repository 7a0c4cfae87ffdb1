"""Text to token ids and back; and a tokenizer trained on text."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.files import is_file, telling, write_atomically

# Looked for in this order when no tokenizer_config.json beside the tokenizer.json names the token.
END_OF_DOCUMENT_NAMES = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)
# Of tokenizers that are trained here.
END_OF_DOCUMENT = "<|endoftext|>"
MOST_IDS = 2**31
MISSHAPEN = object()

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the data package asks of a tokenizer. Ids are int32; `encode` adds no special tokens.

    vocab_size: one more than the largest id. fingerprint: hex, of everything that decides the ids.
    end_of_document: the id written after each document.
    """

    vocab_size: int
    end_of_document: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]: ...

    def decode(self, ids: ArrayLike) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a document.

    `decode(encode(text)) == text` for any text.
    """

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """Ends of documents are left out; bytes that are no UTF-8, a cut character, are U+FFFD."""
        ids = np.asarray(ids)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, or the folder that holds it, through the `tokenizers` package.

    Truncation and padding that the file asks for are switched off: both would damage documents.
    Raises ValueError if the file is missing or unreadable, the package is missing, or no token ends
    a document (eos_token in the tokenizer_config.json beside it, or a usual name).
    """

    def __init__(self, path: str | Path):
        self._name = f"config.data.tokenizer={str(path)!r}"
        path = Path(os.path.expanduser(path))
        path = path / "tokenizer.json" if os.path.isdir(path) else path
        with telling(f"{self._name} cannot be read", "make it readable, or copy it again"):
            if not is_file(path):
                raise ValueError(
                    f"{self._name} is no file, and no folder with a tokenizer.json; give 'bytes' "
                    "or the path of a tokenizer.json"
                )
            content = path.read_bytes()
        self._tokenizer = _load(self._name, content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        if self.vocab_size > MOST_IDS:
            raise ValueError(f"{self._name} has id {self.vocab_size - 1}; ids are int32")
        self.end_of_document = _end_of_document(path, vocabulary, name=self._name)
        self.fingerprint = hashlib.sha256(content + b"%d" % self.end_of_document).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with _telling_damage(f"{self._name} cannot encode text"):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens, the end of a document among them, are left out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def open_tokenizer(name: str) -> Tokenizer:
    """The Tokenizer for config.data.tokenizer: 'bytes', or the path of a tokenizer.json."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def train_bpe(documents: Iterable[str], folder: Path, *, vocab_size: int) -> None:
    """Trains a byte-level BPE (Radford et al. 2019, section 2.2) and writes its two files.

    vocab_size: with the 256 bytes and the end of a document; a text with fewer pairs of tokens
    gives a smaller one, with a warning. The same documents give the same tokenizer. The words of
    the text, each once, must fit into memory.
    """
    tokenizers = _require_tokenizers("a tokenizer to be trained")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        log.warning("the text gives %d tokens, not the %d asked for", found, vocab_size)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2).encode())


def _require_tokenizers(name: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"{name} needs the package `tokenizers`: pip install 'jaxscale[data]'"
        ) from error
    return tokenizers


def _load(name: str, content: bytes) -> Any:
    tokenizers = _require_tokenizers(name)
    with _telling_damage(f"{name} is not a tokenizer.json", "; copy it again, or name another"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _telling_damage(what: str, fix: str = "") -> Iterator[None]:
    """`tokenizers` raises bare Exceptions, and BaseExceptions where its Rust panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}{fix}") from error


def _end_of_document(path: Path, vocabulary: dict[str, int], *, name: str) -> int:
    wanted = _named_token(path.with_name("tokenizer_config.json"))
    if wanted in vocabulary:
        return vocabulary[wanted]
    found = next((token for token in END_OF_DOCUMENT_NAMES if token in vocabulary), None)
    if found is None:
        raise ValueError(
            f"{name} has no token that ends a document: none of {END_OF_DOCUMENT_NAMES}; "
            'name it in a tokenizer_config.json beside it: {"eos_token": "..."}'
        )
    if wanted:
        log.warning(
            "%s: the eos_token %r of its tokenizer_config.json is not in its vocabulary; documents "
            "end with %r",
            name,
            wanted,
            found,
        )
    return vocabulary[found]


def _named_token(path: Path) -> str:
    """The eos_token of a tokenizer_config.json; "" if there is none."""
    with telling(f"{path} cannot be read", "make it readable, or move it away"):
        content = path.read_bytes() if is_file(path) else b"{}"
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        config = None
    token = config.get("eos_token") if isinstance(config, dict) else MISSHAPEN
    token = token.get("content", MISSHAPEN) if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise ValueError(
            f'{path} is not of the shape {{"eos_token": "..."}}, or {{"eos_token": {{"content": '
            '"..."}}; correct it, or move it away'
        )
    return token or ""
