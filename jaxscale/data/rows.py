"""Packing as index arithmetic: row r of epoch e is computed, never stored.

A split is a run of whole documents of the store, its tokens taken as a circle. Epoch e cuts the
circle into `num_rows` windows of seq_len tokens, beginning at a place drawn from (seed, e), and
visits them in an order drawn from (seed, e). So sample i needs nothing but (seed, i): no state to
save, no table to build, and the same batches for any number of hosts and threads. A row wastes
nothing: documents are cut at its ends, and cut elsewhere in the next epoch. (Less than one row of
tokens an epoch is left over.)
"""

import logging
import threading
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.data.batch import Batch
from jaxscale.data.checks import StoreChecks
from jaxscale.data.permutation import NUM_ROUNDS, derive_keys, permute

NUM_CHECKED_ROWS = 64  # at the start; every row is checked again as it is read
PADDING = Batch(tokens=0, targets=-1, segments=0, positions=0)

log = logging.getLogger(__name__)


class TokenStore(Protocol):
    """What rows are cut from, such as an `indexed.IndexedDataset`.

    name: what errors call it. tokens: integers [num_tokens]. document_offsets: int64
    [num_documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
    """

    name: str
    tokens: np.ndarray
    document_offsets: np.ndarray


class TokenRows:
    """The rows of one split of a token store.

    split: "train", or "eval": the last round(eval_fraction * num_documents) documents, at least
        one. Where they or the rest fill no row, the last round(eval_fraction * num_tokens) tokens,
        at least a row, whose first document is cut in two. "train" is everything before; with
        eval_fraction=0 it is everything.
    shuffle: False gives the rows in store order, the same in every epoch.
    max_documents_per_row: where a row has more, its tokens from the next document on are padding.
    checks: of the store's blocks; a row that they leave out becomes one document without targets.

    num_rows: rows in an epoch. num_tokens: tokens in the split. dropped_tokens: tokens that became
    padding in the rows read so far (a loader reads ahead).

    Raises ValueError if there are less tokens than a row for each split, if the dtype holds no
    integers, or if the first, last or one of 62 rows between them holds an id outside
    range(vocab_size).
    """

    def __init__(
        self,
        dataset: TokenStore,
        *,
        seq_len: int,
        seed: int,
        vocab_size: int,
        split: str = "train",
        eval_fraction: float = 0.01,
        shuffle: bool = True,
        max_documents_per_row: int = 32,
        checks: StoreChecks | None = None,
    ):
        _check_split(split, eval_fraction)
        _check_least("seq_len", seq_len, least=1)
        _check_least("vocab_size", vocab_size, least=1)
        _check_least("config.data.max_documents_per_row", max_documents_per_row, least=1)
        _check_least("seed", seed, least=0)
        _check_holds_integers(dataset)
        self.dataset, self.split, self.seed, self.shuffle = dataset, split, seed, shuffle
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.max_documents_per_row, self._checks = max_documents_per_row, checks
        self._offsets = _split_offsets(dataset, split, eval_fraction=eval_fraction, seq_len=seq_len)
        self._begin, self._end = int(self._offsets[0]), int(self._offsets[-1])
        self.num_tokens = self._end - self._begin
        self.num_rows = self.num_tokens // seq_len
        if self.num_rows == 0:
            raise ValueError(self._too_short())
        self.dropped_tokens = 0
        self._lock = threading.Lock()
        self._check_sample()

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return len(self._offsets) - 1

    @property
    def stream(self) -> np.ndarray:
        """The split's tokens in store order, [num_tokens] in the store's dtype; a view."""
        return self.dataset.tokens[self._begin : self._end]

    def check_ids(self, block: slice) -> bool:
        """False if a token of this block of `stream` is outside range(vocab_size), and damaged.

        Raises ValueError if it is as it was written, CorruptionError (a ValueError) as the config's
        on_corruption says.
        """
        begin, end = self._begin + block.start, self._begin + block.stop
        if _max_as_unsigned(self.dataset.tokens[begin:end]) < self.vocab_size:
            return True
        if self._checks is None or not self._checks.is_damaged(begin, end):
            self._refuse_ids(begin, end, wrapped_end=self._begin)
        return False

    def most_documents(self) -> int:
        """The most documents that any row of any epoch can hold.

        No row needs a larger max_documents_per_row.
        """
        beyond_end = np.searchsorted(self._offsets, self._begin + self.seq_len) + 1
        # The circle closes: after the last document come the first ones.
        offsets = np.concatenate([self._offsets, self._offsets[1:beyond_end] + self.num_tokens])
        # The fullest row that begins in a document begins with its last token.
        row_ends = self._offsets[1:] - 1 + self.seq_len
        return int((np.searchsorted(offsets, row_ends) - np.arange(self.num_documents)).max())

    def rows(self, indices: ArrayLike) -> Batch:
        """The Batch of these samples, int32 [len(indices), seq_len] each.

        indices: global sample numbers, any order; sample i is row i % num_rows of epoch
        i // num_rows. Raises ValueError for a token id outside range(vocab_size), naming document
        and position.
        """
        starts = self._starts(np.asarray(indices, np.int64))
        begins, ends = self._pieces(starts)
        is_left_out = np.zeros(len(starts), bool)
        if self._checks is not None:
            is_left_out = self._checks.leave_out(begins, ends)
        tokens, targets = self._read(begins, ends, is_left_out=is_left_out)
        runs = self._runs(begins, ends)
        targets.ravel()[runs.after[runs.is_document_end] - 1] = -1
        batch = Batch(tokens, targets, *_segments_and_positions(runs, targets.shape))
        self._drop_overflow(batch, runs)
        if is_left_out.any():
            self._leave_out(batch, is_left_out)
        return batch

    def documents(self, indices: ArrayLike) -> list[list[int]]:
        """The first and last document of the store in each piece of these samples' rows."""
        begins, ends = self._pieces(self._starts(np.asarray(indices, np.int64)))
        offsets, is_filled = self.dataset.document_offsets, begins < ends
        first = np.searchsorted(offsets, begins[is_filled], side="right") - 1
        last = np.searchsorted(offsets, ends[is_filled] - 1, side="right") - 1
        return np.stack([first, last], axis=1).tolist()

    def _starts(self, indices: np.ndarray) -> np.ndarray:
        """Where each row begins in the store, int64 [rows]."""
        if indices.size and indices.min() < 0:
            raise ValueError(f"sample numbers count from 0, got {indices.min()}")
        epochs, numbers = np.divmod(indices, self.num_rows)
        if not self.shuffle:
            return self._begin + numbers * self.seq_len
        starts = np.empty_like(numbers)
        for epoch in np.unique(epochs):  # nearly always one or two
            here = epochs == epoch
            words = derive_keys(self.seed, int(epoch), num_keys=NUM_ROUNDS + 1)
            order = permute(numbers[here], self.num_rows, keys=words[:-1])
            shift = int(words[-1]) % self.num_tokens
            starts[here] = (order * self.seq_len + shift) % self.num_tokens
        return self._begin + starts

    def _pieces(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Begin and end in the store of the two pieces of each row, int64 [rows, 2] each.

        The second piece is empty except in the one row of an epoch that runs over the split's end.
        """
        first_end = np.minimum(starts + self.seq_len, self._end)
        rest = self.seq_len - (first_end - starts)
        begins = np.stack([starts, np.full_like(starts, self._begin)], axis=1)
        return begins, np.stack([first_end, self._begin + rest], axis=1)

    def _read(
        self, begins: np.ndarray, ends: np.ndarray, *, is_left_out: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets, int32 [rows, seq_len]; no end of a document is masked yet."""
        stream, seq_len = self.dataset.tokens, self.seq_len
        tokens = np.empty((len(begins), seq_len), np.int32)
        targets = np.empty_like(tokens)
        for row, ((begin, _), (end, wrapped_end)) in enumerate(
            zip(begins.tolist(), ends.tolist(), strict=True)
        ):
            window = stream[begin : end + 1]  # with the last target, unless the store ends here
            if end - begin < seq_len:
                window = np.concatenate([stream[begin:end], stream[self._begin : wrapped_end + 1]])
            if _max_as_unsigned(window) >= self.vocab_size and not is_left_out[row]:
                if self._checks is not None:  # says so if it is a flipped bit
                    self._checks.is_damaged(begin, end)
                    self._checks.is_damaged(self._begin, max(self._begin, wrapped_end))
                self._refuse_ids(begin, end, wrapped_end=wrapped_end)
            tokens[row] = window[:seq_len]
            targets[row, : len(window) - 1] = window[1:]
            targets[row, len(window) - 1 :] = -1
        return tokens, targets

    def _runs(self, begins: np.ndarray, ends: np.ndarray) -> "_Runs":
        first = np.searchsorted(self._offsets, begins, side="right") - 1
        counts = np.searchsorted(self._offsets, ends, side="left") - first
        piece = np.repeat(np.arange(counts.size), counts.ravel())
        document = first.ravel()[piece] + _count_within(counts.ravel())
        document_ends, piece_ends = self._offsets[document + 1], ends.ravel()[piece]
        starts = np.maximum(self._offsets[document], begins.ravel()[piece])
        lengths = np.minimum(document_ends, piece_ends) - starts
        numbers = _count_within(counts.sum(axis=1)) + 1
        return _Runs(lengths, np.cumsum(lengths), numbers, document_ends <= piece_ends)

    def _leave_out(self, batch: Batch, is_left_out: np.ndarray) -> None:
        """These rows become one document each, which counts in no loss."""
        for field, value in zip(batch, (0, -1, 1, np.arange(self.seq_len)), strict=True):
            field[is_left_out] = value
        with self._lock:
            self.dropped_tokens += int(is_left_out.sum()) * self.seq_len

    def _drop_overflow(self, batch: Batch, runs: "_Runs") -> None:
        """Pads each row from its document number max_documents_per_row + 1 on."""
        over = runs.numbers == self.max_documents_per_row + 1
        if not over.any():
            return
        dropped = 0
        for start in (runs.after - runs.lengths)[over].tolist():
            row, column = divmod(start, self.seq_len)
            for field, padding in zip(batch, PADDING, strict=True):
                field[row, column:] = padding
            dropped += self.seq_len - column
        with self._lock:
            is_first, self.dropped_tokens = self.dropped_tokens == 0, self.dropped_tokens + dropped
        if is_first:
            log.warning(
                "%s: %d of %d rows hold more than config.data.max_documents_per_row=%d documents; "
                "%d of their %d tokens are padded away (said once, counted in dropped_tokens): "
                "raise it, or lower seq_len=%d",
                self.dataset.name,
                over.sum(),
                len(batch.tokens),
                self.max_documents_per_row,
                dropped,
                over.sum() * self.seq_len,
                self.seq_len,
            )

    def _check_sample(self) -> None:
        last = self.num_tokens - self.seq_len
        for begin in np.linspace(0, last, NUM_CHECKED_ROWS).astype(np.int64).tolist():
            self.check_ids(slice(begin, begin + self.seq_len))

    def _refuse_ids(self, begin: int, end: int, *, wrapped_end: int) -> NoReturn:
        """The first bad id of a row, whose second piece ends at wrapped_end."""
        for low, high in ((begin, end + 1), (self._begin, wrapped_end + 1)):
            ids = self.dataset.tokens[low:high]
            bad = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
            if bad.size:
                token = low + int(bad[0])
                offsets = self.dataset.document_offsets
                document = int(np.searchsorted(offsets, token, side="right")) - 1
                raise ValueError(
                    f"{self.dataset.name}: document {document} holds id {ids[bad[0]]} at position "
                    f"{token - offsets[document]} (token {token} of the store), outside range("
                    f"vocab_size={self.vocab_size}); set config.model.vocab_size to the "
                    "tokenizer's, or config.data.path and config.data.tokenizer to the ones that "
                    "belong together"
                )
        raise AssertionError("no id out of range to report")

    def _too_short(self) -> str:
        return (
            f"the {self.split} split of {self.dataset.name} has {self.num_documents} documents "
            f"with {self.num_tokens} tokens, less than one row of seq_len={self.seq_len}; "
            "lower seq_len, or add text"
        )


class _Runs(NamedTuple):
    """The parts of documents that rows consist of, in row order; [runs] arrays.

    lengths, after: tokens in the run, and in all runs up to and including it. numbers: which run of
    its row, from 1. is_document_end: whether the document's last token is the run's.
    """

    lengths: np.ndarray
    after: np.ndarray
    numbers: np.ndarray
    is_document_end: np.ndarray


def _segments_and_positions(runs: _Runs, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    segments = np.repeat(runs.numbers.astype(np.int32), runs.lengths)
    positions = np.arange(segments.size, dtype=np.int32)
    positions -= np.repeat((runs.after - runs.lengths).astype(np.int32), runs.lengths)
    return segments.reshape(shape), positions.reshape(shape)


def _max_as_unsigned(window: np.ndarray) -> int:
    """The largest id; a negative one shows as a huge one, so that one pass finds both."""
    return int(window.view(f"<u{window.itemsize}").max())


def _count_within(counts: np.ndarray) -> np.ndarray:
    """0..counts[0]-1, 0..counts[1]-1, ... in one array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _split_offsets(
    dataset: TokenStore, split: str, *, eval_fraction: float, seq_len: int
) -> np.ndarray:
    """The bounds of the split's documents, int64 [documents + 1], as in `document_offsets`."""
    offsets = dataset.document_offsets
    if not eval_fraction:
        return offsets
    num_documents, num_tokens = len(offsets) - 1, int(offsets[-1])
    num_eval = max(1, round(eval_fraction * num_documents))
    first = max(0, num_documents - num_eval)
    if min(offsets[first], num_tokens - offsets[first]) >= seq_len:
        return offsets[first:] if split == "eval" else offsets[: first + 1]
    if num_tokens < 2 * seq_len:
        raise ValueError(
            f"{dataset.name} has {num_tokens} tokens, less than two rows of seq_len={seq_len}, "
            "one to train on and one to hold out; lower seq_len, or add text"
        )
    num_eval_tokens = max(seq_len, round(eval_fraction * num_tokens))
    cut = max(seq_len, num_tokens - num_eval_tokens)
    if split == "train":
        return np.append(offsets[offsets < cut], cut)
    log.info(
        "%s: the last %d of %d tokens are held out; the last %d of %d documents would leave less "
        "than a row of seq_len=%d to one of the splits",
        dataset.name,
        num_tokens - cut,
        num_tokens,
        num_eval,
        num_documents,
        seq_len,
    )
    return np.append(cut, offsets[offsets > cut])


def _check_split(split: str, eval_fraction: float) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is neither 'train' nor 'eval'")
    if not 0 <= eval_fraction < 1:
        raise ValueError(
            f"config.data.eval_fraction={eval_fraction} must be at least 0 and below 1"
        )
    if split == "eval" and eval_fraction == 0:
        raise ValueError(
            "config.data.eval_fraction=0 holds nothing out; raise it to have an eval split"
        )


def _check_least(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _check_holds_integers(dataset: TokenStore) -> None:
    if dataset.tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{dataset.name} has dtype {dataset.tokens.dtype.name}, which holds no token ids; "
            "config.data.path needs an integer store"
        )
