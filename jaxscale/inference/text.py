"""Text in, text out, piece by piece."""

from collections.abc import Callable, Iterator, Sequence

from jaxscale.data.tokenizer import Tokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.sampling import Sampling

# What stands in a piece of text for bytes that are no character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Continuations:
    """Iterates over what comes next in each text, again and again; '' for one that has ended.

    A text ends with the tokenizer's end of a document, before the first of `stop`, or after
    max_tokens. Iterating raises ValueError for what the engine refuses.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        max_tokens: int,
        stop: Sequence[str] = (),
    ):
        self._texts = [Text(tokenizer.decode, stop=stop) for _ in prompts]
        self._max_tokens = max_tokens
        self._chunks = engine.continued(
            [tokenizer.encode(prompt) for prompt in prompts],
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=[tokenizer.end_of_document],
        )

    def __iter__(self) -> Iterator[list[str]]:
        for chunk in self._chunks:
            yield [text.add(row.tolist()) for text, row in zip(self._texts, chunk, strict=True)]
            if all(text.has_ended for text in self._texts):
                break
        yield [text.rest() for text in self._texts]

    @property
    def reasons(self) -> list[str]:
        """Why each text ended: "stop", or "length" after max_tokens."""
        return [
            "stop" if text.has_ended or text.num_tokens < self._max_tokens else "length"
            for text in self._texts
        ]


class Text:
    """Tokens that become text: only what no later token changes is given out."""

    def __init__(self, decode: Callable, *, stop: Sequence[str]):
        self._decode, self._stop = decode, [words for words in stop if words]
        self._ids: list[int] = []
        self._num_given = 0
        self.has_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, ids: list[int]) -> str:
        """What these tokens add."""
        if self.has_ended:
            return ""
        self._ids += ids
        text = self._decode(self._ids)
        if (end := self._end(text)) is not None:
            self.has_ended = True
            return self._give(text[:end])
        # A stop may have begun: what could be its beginning waits.
        held = max((_overlap(text, words) for words in self._stop), default=0)
        return self._give(text[: len(text) - held].rstrip(UNFINISHED))

    def rest(self) -> str:
        """What was held back, once no more tokens come."""
        return "" if self.has_ended else self._give(self._decode(self._ids))

    def _end(self, text: str) -> int | None:
        places = [text.find(words) for words in self._stop]
        return min((place for place in places if place >= 0), default=None)

    def _give(self, text: str) -> str:
        piece = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return piece


def _overlap(text: str, words: str) -> int:
    """The longest end of the text that is a beginning of the words."""
    return next((n for n in range(len(words) - 1, 0, -1) if text.endswith(words[:n])), 0)
