"""A model for EleutherAI's lm-evaluation-harness: `pip install 'jaxscale[eval]'`.

from jaxscale.inference.harness import JaxscaleLM
lm_eval.simple_evaluate(model=JaxscaleLM(engine, tokenizer), tasks=["hellaswag"])
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import LM

from jaxscale.data.tokenizer import Tokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.sampling import Sampling
from jaxscale.inference.score import Passage, scores, windows
from jaxscale.inference.text import Continuations

# What the harness means where a task says nothing.
MAX_TOKENS, MAX_LENGTH = 256, 2048


class JaxscaleLM(LM):
    """Answers the harness's three kinds of requests."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, max_length: int | None = None):
        """max_length: tokens that a text may have; the model's own, at most 2048, unless given."""
        super().__init__()
        self._engine, self._tokenizer = engine, tokenizer
        self._length = max_length or min(engine.model.max_seq_len or MAX_LENGTH, MAX_LENGTH)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log p of the continuation after the context, whether it is the likeliest one)."""
        passages = [self._passage(*request.args) for request in requests]
        return [(-score.loss, score.is_likeliest) for score in scores(self._engine, passages)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of whole texts, of any length."""
        return [-sum(s.loss for s in scores(self._engine, self._windows(r))) for r in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each context, up to one of its `until`."""
        return [self._continuation(*request.args) for request in requests]

    def _passage(self, context: str, continuation: str) -> Passage:
        before = [self._tokenizer.end_of_document]
        # Blanks belong to the word after them, as they do in one text.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        known = self._tokenizer.encode(stripped) if stripped else np.array(before)
        whole = self._tokenizer.encode(stripped + continuation)
        judged = whole[len(known) :] if stripped else whole
        judged = judged[-(self._length - 1) :]
        tokens = np.concatenate([known, judged]).astype(np.int32)[-self._length :]
        return Passage(tokens, len(tokens) - len(judged))

    def _windows(self, request: Any) -> Iterable[Passage]:
        tokens = self._tokenizer.encode(request.args[0]).tolist()
        return windows(tokens, before=self._tokenizer.end_of_document, length=self._length)

    def _continuation(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
        max_tokens = int(settings.get("max_gen_toks", MAX_TOKENS))
        kept = self._tokenizer.encode(context)[-(self._length - max_tokens) :]
        pieces = Continuations(
            self._engine,
            self._tokenizer,
            [self._tokenizer.decode(kept)],
            sampling=Sampling(temperature=temperature, top_p=float(settings.get("top_p", 1.0))),
            max_tokens=max_tokens,
            stop=[until] if isinstance(until, str) else until,
        )
        return "".join(piece for (piece,) in pieces)
