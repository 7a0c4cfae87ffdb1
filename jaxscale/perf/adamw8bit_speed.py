"""An update of AdamW with moments of 8 bits, timed beside one with float32 moments and a copy."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.kernels import adamw8bit as kernel
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
IN_PLACE = "8 bits, one launch"
OPTIMIZERS = {
    "float32 moments": adamw.Config(),
    "8 bits, XLA": adamw8bit.Config(),
    IN_PLACE: adamw8bit.Config(),
}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each optimiser of each case.

    GB/s count what is read and written once: parameter, gradient and moments. Parameter and moments
    are updated in place, as in a step.
    """
    device = jax.devices()[0]
    yield f"{device.device_kind}, jax {jax.__version__}, updates without clipping"
    reason = kernel.device_supported(
        jax.default_backend(), getattr(device, "compute_capability", "0")
    )
    if reason:
        yield f"{IN_PLACE} is left out: {reason}"
    kinds = {kind: optim for kind, optim in OPTIMIZERS.items() if not reason or kind != IN_PLACE}
    for name in names:
        shape, axes = CASES[name]
        yield f"{name}: {list(shape)}"
        gradient = jax.random.normal(jax.random.key(0), shape)
        if IN_PLACE in kinds:
            yield f"  {IN_PLACE}: {_differing(gradient, axes)} values differ from XLA's"
        rivals = {
            kind: _rival(kind, optim, shape=shape, axes=axes) for kind, optim in kinds.items()
        }
        yield from lines_of(rivals, (gradient,))


def _rival(
    kind: str, optim: adamw.Config, *, shape: tuple[int, ...], axes: tuple[str, ...]
) -> Rival:
    optim = dataclasses.replace(optim, clip_norm=0.0)
    given = _start(optim, shape=shape, axes=axes)
    how: Any = _in_place if kind == IN_PLACE else _by_xla
    step = jax.jit(how(optim), donate_argnums=0)
    kept: list[Any] = [given]

    def run(gradient):
        kept[0] = step(kept[0], gradient)
        return kept[0]

    params, state = given
    return Rival(run, 3 * size_of(params) + 2 * size_of(state))


def _differing(gradient: jax.Array, axes: tuple[str, ...]) -> int:
    """Of the parameter, its codes and scales, after an update by XLA and one in place."""
    optim = dataclasses.replace(adamw8bit.Config(), clip_norm=0.0)
    start = _start(optim, shape=gradient.shape, axes=axes)
    by_xla, in_place = (
        jax.tree.leaves(jax.jit(how(optim))(start, gradient)) for how in (_by_xla, _in_place)
    )
    return sum(int((a != b).sum()) for a, b in zip(by_xla, in_place, strict=True))


def _start(optim: adamw.Config, *, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple:
    params = {"w": nnx.Param(jax.random.normal(jax.random.key(1), shape), axes=axes)}
    return params, optim.build(SCHEDULE).init(params)


SCHEDULE = optax.constant_schedule(1e-4)


def _by_xla(optim: adamw.Config) -> Callable:
    optimizer = optim.build(SCHEDULE)

    def step(given, gradient):
        params, state = given
        gradients = jax.tree.map(lambda _: gradient, params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _in_place(optim: adamw8bit.Config) -> Callable:
    device = jax.devices()[0]
    alone = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def step(given, gradient):
        params, state = given
        moved = optim.moved(
            jax.tree.map(lambda _: gradient, params),
            state,
            params=params,
            schedule=SCHEDULE,
            is_good=True,
            shardings=jax.tree.map(lambda _: alone, params),
            platform=jax.default_backend(),
            compute_capability=device.compute_capability,
        )
        assert moved is not None
        return moved

    return step
