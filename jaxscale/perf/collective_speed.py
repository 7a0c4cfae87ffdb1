"""Products of tensor parallelism and what they wait for over NVLink, timed by how the two overlap.

Over all GPUs of the host: tokens are gathered and multiplied by a weight whose columns they split,
or multiplied by one whose rows they split and summed to each GPU's own tokens.

T tokens, K what is summed, N columns of the result, G GPUs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxscale.perf.turns import error, in_turns

AXIS = "tensor"
# Copy engines send what a GPU passes on, and none of NCCL's kernels.
COPIES: dict[str, Any] = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
BY_ROWS, BY_COLUMNS = P(AXIS, None), P(None, AXIS)
# Of the result: a float32 check of all tokens would take longer than what is measured.
CHECKED_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens: of each GPU between blocks."""

    tokens: int
    summed: int
    columns: int
    is_gathered: bool


# Of a layer of Llama 3 70B, a row of 8,192 a GPU: ahead of attention and behind it, ahead of the
# feed-forward layer's activation and behind it.
CASES = {
    "qkv": Case(8192, 8192, 10_240, is_gathered=True),
    "gate_up": Case(8192, 8192, 57_344, is_gathered=True),
    "out": Case(8192, 8192, 8192, is_gathered=False),
    "down": Case(8192, 28_672, 8192, is_gathered=False),
    "tiny": Case(16, 32, 64, is_gathered=True),
    "tiny_sum": Case(16, 32, 64, is_gathered=False),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """Functions of a GPU's own arrays: what x_TK is given as, what is timed, and its y_TN.

    options: XLA's, of what is timed.
    """

    given: Callable
    timed: Callable
    whole: Callable
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each way of each case."""
    size = jax.device_count()
    yield f"{size} x {jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16"
    mesh = jax.make_mesh((size,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for name in names:
        yield from _case(name, CASES[name], mesh=mesh)


def _case(name: str, case: Case, *, mesh: jax.sharding.Mesh) -> Iterator[str]:
    num_tokens = case.tokens * mesh.size
    yield f"{name}: [{num_tokens}, {case.summed}] times [{case.summed}, {case.columns}]"
    axes_x, axes_w, axes_y = (
        (BY_ROWS, BY_COLUMNS, BY_COLUMNS) if case.is_gathered else (BY_COLUMNS, BY_ROWS, BY_ROWS)
    )
    keys = jax.random.split(jax.random.key(0))
    shapes = (num_tokens, case.summed), (case.summed, case.columns)
    x_TK, w_KN = (
        jax.jit(functools.partial(_random, shape=shape), out_shardings=_on(mesh, axes))(key)
        for key, shape, axes in zip(keys, shapes, (axes_x, axes_w), strict=True)
    )
    expected = jax.jit(_in_float32, out_shardings=_on(mesh, P()))(x_TK, w_KN)
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    timed, errors = {}, {}
    for kind, way in _ways(case, mesh.size).items():
        # What a way is given, and gives, is of each GPU: stacked over the axis of them.
        given = jax.jit(over(way.given, in_specs=axes_x, out_specs=P(AXIS)))(x_TK)
        function = jax.jit(
            over(way.timed, in_specs=(P(AXIS), axes_w), out_specs=P(AXIS)),
            compiler_options=way.options,
        )
        whole = jax.jit(over(way.whole, in_specs=P(AXIS), out_specs=axes_y))
        timed[kind] = functools.partial(function, given, w_KN)
        if kind != "collective":
            errors[kind] = error(whole(timed[kind]())[:CHECKED_TOKENS], expected)
    flop = 2 * num_tokens * case.summed * case.columns / mesh.size
    for kind, milliseconds in in_turns(timed, ()).items():
        line = f"  {kind:13s} {milliseconds:8.3f} ms"
        if kind in errors:
            line += f" {flop / milliseconds / 1e9:5.0f} TFLOP/s a GPU  error {errors[kind]:.1e}"
        yield line


def _on(mesh: jax.sharding.Mesh, axes: P) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, axes)


def _random(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _in_float32(x_TK, w_KN):
    checked = x_TK[:CHECKED_TOKENS].astype(jnp.float32)
    return jnp.dot(checked, w_KN.astype(jnp.float32), precision="highest")


def _ways(case: Case, size: int) -> dict[str, Way]:
    return _gathering(size) if case.is_gathered else _summing(case, size)


# Gathered, then multiplied.


def _gathering(size: int) -> dict[str, Way]:
    ways = {
        "product": Way(_gather, jnp.dot, _itself),
        "collective": Way(_itself, lambda x, w: _gather(x), _itself),
        "in turn": Way(_itself, lambda x, w: _gather(x) @ w, _itself),
        "halves": Way(
            lambda x: tuple(jnp.split(x, 2)),
            lambda halves, w: tuple(_gather(half) @ w for half in halves),
            functools.partial(_joined, size=size),
        ),
    }
    ring = Way(_itself, functools.partial(_ring_of_gathered, size=size), _in_order)
    ways |= {"ring": ring, "ring, copies": dataclasses.replace(ring, options=COPIES)}
    if jax.default_backend() == "gpu":
        ways["kernel"] = Way(_itself, _kernel, _itself)
    return ways


def _itself(x):
    return x


def _gather(x):
    return jax.lax.all_gather(x, AXIS, axis=0, tiled=True)


def _joined(halves, *, size: int):
    """y_TN of the results for the first and the second halves of all GPUs' tokens."""
    parts = [half.reshape(size, -1, half.shape[1]) for half in halves]
    return jnp.concatenate(parts, axis=1).reshape(-1, halves[0].shape[1])


def _ring_of_gathered(x, w, *, size: int):
    """Of each GPU's tokens a product by itself, from its own on, while the next ones come."""
    parts = []
    for i in range(size):
        coming = _passed_on(x, to=-1, size=size) if i < size - 1 else None
        parts.append(x @ w)
        if coming is not None:
            # Else XLA sends them all on before the first product.
            x, parts[-1] = jax.lax.optimization_barrier((coming, parts[-1]))
    return tuple(parts)


def _passed_on(x, *, to: int, size: int):
    return jax.lax.ppermute(x, AXIS, [(i, (i + to) % size) for i in range(size)])


def _in_order(parts):
    return jnp.roll(jnp.stack(parts), jax.lax.axis_index(AXIS), axis=0).reshape(
        -1, parts[0].shape[1]
    )


def _kernel(x, w):
    """JAX's example of Mosaic GPU that sends tiles of x to the next GPU as it multiplies them.

    Of twelve settings this one was the fastest for the columns of qkv and of gate_up (4 x H200).
    """
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    rows, columns = hopper_matmul_mgpu.MatmulDimension
    tiles: dict[str, Any] = dict(tile_m=64, tile_n=256, tile_k=64, max_concurrent_steps=4)
    order: dict[str, Any] = dict(grid_minor_dim=columns, grid_tile_width=16, wg_dimension=rows)
    config = hopper_matmul_mgpu.TuningConfig(**tiles, **order)
    return collective_matmul_mgpu.all_gather_lhs_matmul(
        x, w, AXIS, config=config, dtype=jnp.bfloat16
    )


# Multiplied, then summed.


def _summing(case: Case, size: int) -> dict[str, Way]:
    ring = Way(
        functools.partial(_as_sent, size=size),
        functools.partial(_ring_of_sums, size=size),
        jnp.concatenate,
    )
    return {
        "product": Way(_itself, jnp.dot, _scatter),
        "collective": Way(
            lambda x: jnp.broadcast_to(x[:, :1], (x.shape[0], case.columns)),
            lambda y, w: _scatter(y),
            _itself,
        ),
        "in turn": Way(_itself, lambda x, w: _scatter(x @ w), _itself),
        "halves": Way(
            functools.partial(_halves, size=size),
            lambda halves, w: tuple(_scatter(half @ w) for half in halves),
            jnp.concatenate,
        ),
        "ring": ring,
        "ring, copies": dataclasses.replace(ring, options=COPIES),
    }


def _scatter(y):
    return jax.lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def _halves(x, *, size: int):
    """The first and the second halves of all GPUs' tokens."""
    parts = jnp.split(x.reshape(size, -1, x.shape[1]), 2, axis=1)
    return tuple(part.reshape(-1, x.shape[1]) for part in parts)


def _as_sent(x, *, size: int):
    """Halves of the tokens of the GPU before this one first, of its own last."""
    parts = x.reshape(size, 2, -1, x.shape[1])
    at = jax.lax.axis_index(AXIS)
    return tuple(tuple(parts[(at - 1 - i) % size]) for i in range(size))


def _ring_of_sums(parts, w, *, size: int):
    """Of each GPU's tokens a product by itself, added to what others have of it, and sent on.

    Each half's is sent beside the product of the other: cuBLAS adds what has come to a product, so
    that none can begin before it is there.
    """
    sums = [half @ w for half in parts[0]]
    for halves in parts[1:]:
        came = [_passed_on(y, to=1, size=size) for y in sums]
        sums = [y + half @ w for y, half in zip(came, halves, strict=True)]
    return tuple(sums)
