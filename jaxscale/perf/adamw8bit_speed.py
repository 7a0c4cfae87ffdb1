"""An update of AdamW with moments of 8 bits, timed beside one with float32 moments and a copy."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import optax
from flax import nnx

from jaxscale.optim import adamw, adamw8bit
from jaxscale.perf.bandwidth import Rival, lines_of, size_of

# What one of 8 GPUs holds of Llama 3 8B: gate of its 32 layers, qkv, and the tables.
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "gate": ((32, 512, 14336), ("layers", "embed", "mlp")),
    "qkv": ((32, 512, 8, 6, 128), ("layers", "embed", "kv_heads", "_", "head")),
    "embedding": ((128_256, 512), ("vocab", "embed")),
    "head": ((512, 128_256), ("embed", "vocab")),
    "tiny": ((128, 256), ("embed", "mlp")),
}
OPTIMIZERS = {"float32 moments": adamw.Config(), "8 bits": adamw8bit.Config()}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each optimiser of each case.

    GB/s count what is read and written once: parameter, gradient and moments.
    """
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, updates without clipping"
    for name in names:
        shape, axes = CASES[name]
        yield f"{name}: {list(shape)}"
        gradient = jax.random.normal(jax.random.key(0), shape)
        rivals = {kind: _rival(optim, shape, axes=axes) for kind, optim in OPTIMIZERS.items()}
        yield from lines_of(rivals, (gradient,))


def _rival(optim: adamw.Config, shape: tuple[int, ...], *, axes: tuple[str, ...]) -> Rival:
    optimizer = dataclasses.replace(optim, clip_norm=0.0).build(optax.constant_schedule(1e-4))
    params = {"w": nnx.Param(jax.random.normal(jax.random.key(1), shape), axes=axes)}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, *, gradient):
        gradients = jax.tree.map(lambda _: gradient, params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def run(gradient):
        return step(params, state, gradient=gradient)

    return Rival(run, 3 * size_of(params) + 2 * size_of(state))
