"""How fast a model continues texts, beside what the memory's bandwidth allows."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.inference.engine import CHUNK, Engine
from jaxscale.inference.sampling import Sampling

# Bytes a second that the memory of a card can be read with, as NVIDIA gives them.
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}


@dataclasses.dataclass
class DrawnWeights:
    """Weights of the right shapes and no sense: a model's speed does not depend on them."""

    model: Any
    tokenizer: str = "bytes"
    companions: list[Path] = dataclasses.field(default_factory=list)

    def read(self, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(abstract))
        return {
            path: _draw(leaf)(key) for key, (path, leaf) in zip(keys, abstract.items(), strict=True)
        }


def _draw(leaf: jax.ShapeDtypeStruct):
    draw = functools.partial(jax.random.normal, shape=leaf.shape, dtype=leaf.dtype)
    return jax.jit(lambda key: draw(key) * 0.02, out_shardings=leaf.sharding)


def measure(
    model: Any, *, batches: Sequence[int], prompt_tokens: int, max_tokens: int, sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """A record for each number of texts; seconds are medians of the chunks after the second."""
    engine = Engine(DrawnWeights(model))
    for num_texts in batches:
        rng = np.random.default_rng(0)
        prompts = list(rng.integers(0, model.vocab_size, (num_texts, prompt_tokens)))
        for _ in range(2):  # the second time nothing is compiled
            chunks, first = _timed(engine, prompts, max_tokens=max_tokens, sampling=sampling)
        seconds = statistics.median(chunks[1:]) / CHUNK
        yield {
            "num_texts": num_texts,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "device_kind": jax.devices()[0].device_kind,
            "num_devices": engine.mesh.size,
            "unfused": engine.unfused,
            "first_token_seconds": first,
            "step_seconds": seconds,
            "tokens_per_second": num_texts / seconds,
            "least_seconds": _least_seconds(
                engine, num_texts=num_texts, num_kept=prompt_tokens + max_tokens // 2
            ),
        }


def _timed(engine: Engine, prompts, *, max_tokens: int, sampling: Sampling):
    """(seconds of each chunk, seconds to the first token)."""
    times = [time.perf_counter()]
    for _ in engine.continued(prompts, sampling=sampling, max_tokens=max_tokens):
        times.append(time.perf_counter())
    chunks = [after - before for before, after in itertools.pairwise(times[1:])]
    return chunks, times[1] - times[0]


def _least_seconds(engine: Engine, *, num_texts: int, num_kept: int) -> float | None:
    """To read once what a step has to: every matrix, and the keys and values that are kept.

    None on a card of unknown bandwidth.
    """
    model = engine.model
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params))
    if not model.tie_embeddings:
        num_bytes -= jax.tree.leaves(engine.params["embedding"])[0].nbytes
    kept = 2 * model.num_layers * model.num_kv_heads * model.head_dim()
    num_bytes += num_texts * num_kept * kept * engine.execution.dtype.itemsize
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    return bandwidth and num_bytes / engine.mesh.size / bandwidth
