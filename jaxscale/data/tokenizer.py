"""Text to token ids and back."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

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
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"config.data.tokenizer={str(path)!r} is no file; "
                "give 'bytes' or the path of a tokenizer.json"
            )
        content = path.read_bytes()
        self._tokenizer = _load(path, content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = _end_of_document(path, vocabulary)
        self.fingerprint = hashlib.sha256(content + b"%d" % self.end_of_document).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens, the end of a document among them, are left out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def open_tokenizer(name: str) -> Tokenizer:
    """The Tokenizer for config.data.tokenizer: 'bytes', or the path of a tokenizer.json."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _load(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"config.data.tokenizer={str(path)!r} needs the package `tokenizers`: "
            "pip install 'jaxscale[data]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"config.data.tokenizer={str(path)!r} is not a tokenizer.json: {error}"
        ) from error


def _end_of_document(path: Path, vocabulary: dict[str, int]) -> int:
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            return vocabulary[token]
    for token in END_OF_DOCUMENT_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"config.data.tokenizer={str(path)!r} has no token that ends a document: "
        f"none of {END_OF_DOCUMENT_NAMES}; "
        'name it in a tokenizer_config.json beside it: {"eos_token": "..."}'
    )
