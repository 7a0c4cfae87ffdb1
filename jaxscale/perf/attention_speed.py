"""Attention kernels timed beside one another, and checked against float32 in the same run.

Tensors: B rows, S sequence, N query heads, K key heads, H head size.
"""

import dataclasses
import functools
import itertools
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import Attention
from jaxscale.data.text import STDLIB, find_files
from jaxscale.kernels import xla_attention
from jaxscale.ops.attention import KERNELS
from jaxscale.ops.documents import Documents, documents_of
from jaxscale.perf.turns import error, in_turns

Function = Callable[..., jax.Array]

# A float32 check holds one key head's scores: 0.5 GiB a query head at 8192 tokens.
MAX_CHECKED_SEQ = 8192


class Packed(NamedTuple):
    """Documents that fill rows: tokens of each, and the most that a row of such data can hold."""

    lengths: list[list[int]]
    most: int

    @property
    def bound(self) -> int:
        """What a run would round it up to."""
        return 2 ** math.ceil(math.log2(self.most))


def one_document(rows: int, seq: int) -> Packed:
    return Packed([[seq]] * rows, most=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is attended to. packed: what fills so many rows of so many tokens."""

    rows: int
    seq: int
    _: dataclasses.KW_ONLY
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    # Of the values, if not that of the keys.
    v_head_size: int | None = None
    packed: Callable[[int, int], Packed] = one_document
    window: int | None = None
    cap: float | None = None

    @functools.cached_property
    def documents(self) -> Packed:
        return self.packed(self.rows, self.seq)

    def segments(self) -> np.ndarray:
        """int32 [rows, seq], from 1."""
        rows = self.documents.lengths
        return np.stack([np.repeat(1 + np.arange(len(row), dtype=np.int32), row) for row in rows])

    def pairs(self) -> int:
        """Of a query and a key that it sees, over all rows and heads."""
        window = self.window or self.seq
        lengths = itertools.chain(*self.documents.lengths)
        return self.heads * sum(int(np.minimum(np.arange(n) + 1, window).sum()) for n in lengths)

    def flop(self) -> int:
        """Of the forward pass: two products for each pair."""
        return 2 * (self.head_size + (self.v_head_size or self.head_size)) * self.pairs()

    def flop_of_both(self) -> int:
        """With the backward pass: four products over the head size, three over the values'."""
        return 2 * (4 * self.head_size + 3 * (self.v_head_size or self.head_size)) * self.pairs()


def log_normal(rows: int, seq: int) -> Packed:
    """Log-normal documents with a mean of 1,000 tokens, the same in each row."""
    rng = np.random.default_rng(1)
    return _same(rows, seq, lengths=(rng.lognormal(math.log(1000) - 0.5, 1) for _ in range(seq)))


def some_files(rows: int, seq: int) -> Packed:
    """Files of Python's standard library in a fixed order, the same in each row."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("[a-z]*.py"))
    return _same(rows, seq, lengths=np.random.default_rng(1).permutation(_tokens(paths)))


def files(rows: int, seq: int) -> Packed:
    """Rows from all over Python's standard library, as training packs it: file after file."""
    _, named = find_files(STDLIB)
    tokens = _tokens(path for _, path in named)
    ends = np.cumsum(tokens[tokens > 0])
    # The fullest row begins with a file's last token.
    most = int((np.searchsorted(ends, ends - 1 + seq) - np.arange(len(ends))).max()) + 1
    lengths = []
    for begin in np.arange(rows) * (ends[-1] // rows):
        inside = ends[(ends > begin) & (ends < begin + seq)]
        lengths.append(np.diff([begin, *inside, begin + seq]).tolist())
    return Packed(lengths, most)


def _tokens(paths: Iterable[Path]) -> np.ndarray:
    """Of each file, of four bytes."""
    return np.asarray([path.stat().st_size // 4 for path in paths])


def _same(rows: int, seq: int, *, lengths: Iterable) -> Packed:
    """Up to `seq` tokens of documents; the last is cut."""
    taken: list[int] = []
    for length in lengths:
        if not (left := seq - sum(taken)):
            break
        taken.append(min(max(1, int(length)), left))
    return Packed([taken] * rows, len(taken))


CASES = {
    "causal_8k": Case(2, 8192),
    "causal_2k": Case(8, 2048),
    "causal_1k": Case(16, 1024),
    "causal_512": Case(32, 512),
    "one_row_2k": Case(1, 2048),
    "causal_32k": Case(1, 32768),
    "packed": Case(2, 8192, packed=log_normal),
    "packed_stdlib": Case(2, 8192, packed=some_files),
    "files": Case(8, 8192, packed=files),
    "window_32k": Case(1, 32768, window=1024),
    "head_64": Case(4, 4096, heads=16, kv_heads=16, head_size=64),
    "head_64_8k": Case(2, 8192, head_size=64),
    "head_64_1k": Case(16, 1024, heads=16, kv_heads=16, head_size=64),
    "head_64_512": Case(32, 512, heads=16, kv_heads=16, head_size=64),
    "head_64_packed": Case(2, 8192, head_size=64, packed=log_normal),
    "head_256": Case(2, 8192, heads=16, kv_heads=8, head_size=256),
    "head_256_2k": Case(8, 2048, heads=16, kv_heads=8, head_size=256),
    "gemma_2": Case(2, 8192, heads=16, kv_heads=8, head_size=256, cap=50.0),
    "latent": Case(1, 8192, heads=16, kv_heads=16, head_size=192, v_head_size=128),
    "tiny": Case(
        1,
        128,
        heads=2,
        kv_heads=1,
        head_size=16,
        packed=lambda rows, seq: Packed([[100, seq - 100]] * rows, most=2),
    ),
}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each kernel of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {dtype_here().name}"
    for name in names:
        yield from _case(name, CASES[name])


def dtype_here() -> np.dtype:
    """Of the arrays: CPUs have no kernel but XLA's."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _case(name: str, case: Case) -> Iterator[str]:
    lengths, most = case.documents
    numbers = [len(row) for row in lengths]
    yield (
        f"{name}: rows {case.rows}, sequence {case.seq}, heads {case.heads}/{case.kv_heads} x "
        f"{case.head_size}/{case.v_head_size or case.head_size}, documents a row {min(numbers)} to "
        f"{max(numbers)} of {most} at most, window {case.window}, cap {case.cap}"
    )
    arrays = _random(case)
    kernels = _kernels(case, arrays)
    forward_ms = in_turns({kernel: jax.jit(f) for kernel, f in kernels.items()}, arrays[:3])
    both_ms = in_turns({kernel: jax.jit(_both(f)) for kernel, f in kernels.items()}, arrays)
    for kernel, errors in _errors(case, kernels, arrays=arrays).items():
        forward, both = forward_ms[kernel], both_ms[kernel]
        yield (
            f"  {kernel:12s} forward {forward:8.3f} ms {case.flop() / forward / 1e9:4.0f} TFLOP/s  "
            f"both {both:8.3f} ms {case.flop_of_both() / both / 1e9:4.0f} TFLOP/s  {errors}"
        )


def _errors(case: Case, kernels: dict[str, Function], *, arrays: Sequence[jax.Array]):
    """What to say of each kernel's output and gradients beside the reference in float32."""
    if case.seq > MAX_CHECKED_SEQ:
        return dict.fromkeys(kernels, "not checked")
    reference = _exactly(_packed(xla_attention.reference, case))
    expected = reference(*_first_head(case, arrays, dtype=jnp.float32))
    found = {
        kernel: _exactly(function)(*_first_head(case, arrays, dtype=dtype_here()))
        for kernel, function in kernels.items()
    }
    return {
        kernel: "errors of out dq dk dv "
        + " ".join(f"{error(*pair):.1e}" for pair in zip(each, expected, strict=True))
        for kernel, each in found.items()
    }


def _random(case: Case) -> list[jax.Array]:
    """q, k, v and the gradient of the output."""
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    v_head_size = case.v_head_size or case.head_size
    sizes = (case.head_size, case.head_size, v_head_size, v_head_size)
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (case.rows, case.seq, *shape), dtype_here())
        for key, *shape in zip(keys, heads, sizes, strict=True)
    ]


def _kernels(case: Case, arrays: Sequence[jax.Array]) -> dict[str, Function]:
    """Those that can run the case here; cuDNN without packing where a row is one document, and with
    documents as a mask where it has several."""
    kernels = kernels_for(*arrays[:2], cap=case.cap, v_head_size=case.v_head_size)
    found = {name: _packed(kernel.attention, case) for name, kernel in kernels.items()}
    if Attention.CUDNN in found and case.documents.most == 1:

        def dense(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
            window = None if case.window is None else (case.window - 1, 0)
            return jax.nn.dot_product_attention(
                q_BSNH,
                k_BSKH,
                v_BSKH,
                is_causal=True,
                local_window_size=window,
                implementation="cudnn",
            )

        found["cudnn dense"] = dense
    elif Attention.CUDNN in found and case.window is None:
        found["cudnn mask"] = with_mask(case)
    return found


def with_mask(case: Case) -> Function:
    """cuDNN's causal kernel, whose mask is an array [rows, 1, seq, seq] and leaves nothing out."""
    segments = case.segments()

    def masked(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        segments_BS = jnp.asarray(segments[: q_BSNH.shape[0]], jnp.int32)
        mask = segments_BS[:, None, :, None] == segments_BS[:, None, None]
        options: dict[str, Any] = dict(is_causal=True, implementation="cudnn")
        return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, mask=mask, **options)

    return masked


def kernels_for(
    q_BSNH: Any, k_BSKH: Any, *, cap: float | None = None, v_head_size: int | None = None
) -> dict[str, ModuleType]:
    """Those that can run these shapes here in memory that does not grow with a row's square; XLA's
    on a CPU."""
    platform = jax.default_backend()
    options: dict[str, Any] = dict(platform=platform, cap=cap, v_head_size=v_head_size)
    return {
        name: kernel
        for name, kernel in KERNELS.items()
        if kernel.supported(q_BSNH, k_BSKH, **options) is None
        and (platform == "cpu" or not kernel.HAS_QUADRATIC_MEMORY)
    }


def _packed(attention: Function, case: Case) -> Function:
    """Of arrays with the case's rows, or fewer."""
    segments = case.segments()
    bound = case.documents.bound
    options = dict(scale=case.head_size**-0.5, window=case.window, cap=case.cap)

    def function(q_BSNH: jax.Array, *keys_and_values: jax.Array) -> jax.Array:
        segments_BS = jnp.asarray(segments[: q_BSNH.shape[0]], jnp.int32)
        documents: Documents = documents_of(segments_BS, segments_BS, max_documents=bound)
        return attention(q_BSNH, *keys_and_values, documents=documents, **options)

    return function


def _both(function: Function) -> Callable[..., tuple[jax.Array, ...]]:
    def both(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(function, *arrays[:3])
        return out, *pull(arrays[3])

    return both


def _exactly(function: Function) -> Callable[..., tuple[jax.Array, ...]]:
    """Output and gradients, with products of float32 in float32."""
    # Not timed: trying out ways to multiply in float32 takes 20 seconds a case.
    options = {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0}

    def exactly(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with jax.default_matmul_precision("highest"):
            return jax.jit(_both(function), compiler_options=options)(*arrays)

    return exactly


def _first_head(case: Case, arrays: Sequence[jax.Array], *, dtype) -> list[jax.Array]:
    """One row's first key head, and the query heads that share it."""
    group = case.heads // case.kv_heads
    counts = (group, 1, 1, group)
    return [x[:1, :, :n].astype(dtype) for x, n in zip(arrays, counts, strict=True)]
