"""How likely text is under a model."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxscale.inference.engine import MOST_DOCUMENTS, MULTIPLE, Engine

# Texts are packed into rows of so many tokens, or of one longer text.
ROW_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Passage:
    """Tokens, int32, of which those from `first` on are judged; `first` is 1 or more."""

    tokens: np.ndarray
    first: int = 1


@dataclasses.dataclass(frozen=True)
class Score:
    """loss: the sum of -log p of the judged tokens, nats. is_likeliest: each was the likeliest."""

    loss: float
    num_tokens: int
    is_likeliest: bool


def scores(engine: Engine, passages: Iterable[Passage]) -> Iterator[Score]:
    """The score of each passage, in order; a passage sees no other."""
    for row in _rows(passages):
        yield from _scores_of_row(engine, row)


def windows(tokens: Sequence[int], *, before: int, length: int) -> Iterator[Passage]:
    """Passages of at most `length` tokens that judge each token of a text once.

    before: the token that stands before the text. Each passage but the first begins half a length
    before what it judges, so that no token is judged with little before it.
    """
    text, step = np.array([before, *tokens], np.int32), max(length // 2, 1)
    judged = 1
    while judged < len(text):
        end = min(length if judged == 1 else judged + step, len(text))
        begin = max(0, end - length)
        yield Passage(text[begin:end], judged - begin)
        judged = end


def _rows(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    """As many passages to a row as fit, in order."""
    row: list[Passage] = []
    for passage in passages:
        num_tokens = sum(len(other.tokens) for other in row) + len(passage.tokens)
        if row and (num_tokens > ROW_TOKENS or len(row) == MOST_DOCUMENTS):
            yield row
            row = []
        row.append(passage)
    if row:
        yield row


def _scores_of_row(engine: Engine, row: list[Passage]) -> Iterator[Score]:
    lengths = [len(passage.tokens) for passage in row]
    size = math.ceil(sum(lengths) / MULTIPLE) * MULTIPLE
    size = ROW_TOKENS if size <= ROW_TOKENS else size
    tokens, segments, places, targets = np.zeros((4, size), np.int32)
    begins = np.cumsum([0, *lengths])
    for number, (passage, begin) in enumerate(zip(row, begins, strict=False), 1):
        mine = slice(begin, begin + len(passage.tokens))
        tokens[mine], segments[mine] = passage.tokens, number
        places[mine] = np.arange(len(passage.tokens))
        targets[begin : mine.stop - 1] = passage.tokens[1:]
    loss, is_likeliest = engine.losses(tokens, segments=segments, places=places, targets=targets)
    for passage, begin in zip(row, begins, strict=False):
        judged = slice(begin + passage.first - 1, begin + len(passage.tokens) - 1)
        yield Score(
            float(loss[judged].sum(dtype=np.float64)),
            num_tokens=len(passage.tokens) - passage.first,
            is_likeliest=bool(is_likeliest[judged].all()),
        )
