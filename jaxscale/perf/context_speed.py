"""Rows split over `context` timed beside whole rows, and the kernels of their parts checked.

The text is Python's standard library joined to a few long files, so that a row is one document and
attention is what the arithmetic says.

B rows, S sequence, T key sequence, N query heads, K key heads, H head size, M documents a row.
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import sharding as shd
from jaxscale.config import Balance, Dtype, Exchange
from jaxscale.kernels import xla_attention
from jaxscale.ops.attention import KERNELS, attention
from jaxscale.ops.context import NOTHING
from jaxscale.ops.deal import Parts, order
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from jaxscale.perf.attention_speed import kernels_for

LONG_FILES = 4
# Of an array's norm: bfloat16 rounds the softmax's products at 2e-3 (tests/kernels), gradients
# twice.
OUT_RTOL, GRADIENT_RTOL = 5e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of the config: rows of seq_len tokens in all, on a mesh of fsdp x context."""

    exchange: str
    seq_len: int
    rows: int
    fsdp: int = 1
    context: int = 2

    @property
    def settings(self) -> list[str]:
        """As words of a command line; those of the user follow them."""
        values = {
            "seq_len": self.seq_len,
            "batch_size": self.rows,
            "model.max_seq_len": self.seq_len,
            "mesh.fsdp": self.fsdp,
            "mesh.context": self.context,
            "context.exchange": self.exchange,
            "mesh.reshard_after_forward": True,
            "remat": "attention",
            "scan_unroll": 1,
            "schedule.warmup_steps": 10,
            "schedule.peak": 3e-5,
        }
        return [f"--config.{key}={value}" for key, value in values.items()]


# In the order in which they are wanted. The first two have the same rows, and so the same losses.
CASES = {
    "all_to_all_32k": Case("all_to_all", 32_768, 2),
    "fsdp_32k": Case("auto", 32_768, 2, fsdp=2, context=1),
    "all_to_all_128k": Case("all_to_all", 131_072, 1),
    "all_to_all_64k": Case("all_to_all", 65_536, 1),
    "ring_64k": Case("ring", 65_536, 1),
    "all_gather_64k": Case("all_gather", 65_536, 1),
    "fsdp_64k": Case("auto", 65_536, 2, fsdp=2, context=1),
    "ring_128k": Case("ring", 131_072, 1),
    "all_gather_128k": Case("all_gather", 131_072, 1),
}


def write_long_text(folder: Path) -> str:
    """Python's standard library as LONG_FILES text files; returns the glob that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    for number in range(LONG_FILES):
        texts = [path.read_text(errors="replace") for path in sources[number::LONG_FILES]]
        (folder / f"{number}.txt").write_text("\n".join(texts))
    return str(folder / "*.txt")


# The check.


def check(kernel: ModuleType, *, size: int) -> Iterator[tuple[str, float, float]]:
    """(what, error as a share of its norm, how much it may be) of a kernel's parts.

    Against plain XLA in float32, of the same bfloat16 inputs: first calls of some queries and some
    keys, on one device; then whole attention by each exchange over `size` devices.
    """
    for name, parts, causal in _parts():
        yield from _check_call(kernel, name, parts=parts, causal=causal)
    for exchange in (Exchange.ALL_GATHER, Exchange.RING):
        for balance in Balance:
            yield from _check_exchange(kernel, exchange, size=size, balance=balance)
    yield from _check_exchange(kernel, Exchange.ALL_TO_ALL, size=size, balance=Balance.HEAD_TAIL)


ROWS, SEQ, HEADS, KV_HEADS, HEAD_SIZE = 2, 512, 8, 2, 128


def kernels_here() -> dict[str, ModuleType]:
    """Those that `check` can check on this machine."""
    shapes = ((ROWS, SEQ, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS))
    return kernels_for(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


def _parts() -> Iterator[tuple[str, Parts, bool]]:
    starts = np.array([[0, 100, 356], [0, 511, 512]], np.int32)
    lengths = np.array([[100, 256, 100], [511, 1, 0]], np.int32)
    yield "documents with themselves", Parts(starts, lengths, starts, lengths), True
    # A prefix of the queries, and a suffix, or what lies between, of twice as many keys.
    zeros = np.zeros((2, 2), np.int32)
    parts = Parts(
        zeros,
        np.array([[300, 0], [512, 0]], np.int32),
        np.array([[77, 0], [512, 0]], np.int32),
        np.array([[947, 0], [130, 0]], np.int32),
    )
    yield "a prefix over a suffix", parts, False
    yield "nothing in a row", Parts(*(x * np.array([[0], [1]], np.int32) for x in parts)), False


def _arrays(num_keys: int, *, rows: int = ROWS, seq: int = SEQ) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((seq, HEADS), (num_keys, KV_HEADS), (num_keys, KV_HEADS), (seq, HEADS))
    arrays = [rng.normal(size=(rows, *shape, HEAD_SIZE)) for shape in shapes]
    return [jnp.asarray(x, jnp.bfloat16) for x in arrays]


def _wide(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in arrays]


def _check_call(kernel: ModuleType, name: str, *, parts: Parts, causal: bool):
    """With an output and log-sum-exp that other keys had a part in."""
    q, k, v, cotangent = _arrays(SEQ if causal else 2 * SEQ)
    parts = Parts(*(jnp.asarray(x, jnp.int32) for x in parts))
    options = dict(parts=parts, causal=causal, scale=HEAD_SIZE**-0.5)

    def both(module: ModuleType, arrays) -> tuple:
        q, k, v, cotangent = arrays
        out, lse = module.partial_forward(q, k, v, **options)
        merged = jnp.where(lse > NOTHING / 2, lse + 0.7, lse)
        backward = functools.partial(module.partial_backward, out_BSNH=out / 2, lse_BSN=merged)
        return out, lse, *backward(q, k, v, **options, grad_BSNH=cotangent)

    mine = jax.jit(functools.partial(both, kernel))((q, k, v, cotangent))
    with jax.default_matmul_precision("highest"):
        theirs = both(xla_attention, _wide((q, k, v, cotangent)))
    yield from _errors(name, mine, expected=theirs)


def _check_exchange(kernel: ModuleType, exchange: Exchange, *, size: int, balance: Balance):
    seq = 128 * 2 * size
    arrays = _arrays(seq, seq=seq)
    segments = np.zeros((ROWS, seq), np.int32)
    segments[0, : seq - 30] = 1 + (np.arange(seq - 30) > 50) + (np.arange(seq - 30) > seq // 2 + 9)
    segments[1] = 1
    has_whole_rows = exchange == Exchange.ALL_TO_ALL
    places = np.tile(np.arange(seq), (ROWS, 1))
    if not has_whole_rows:
        places = order(segments, size, balance=balance)

    def deal(x):
        indices = places.reshape(*places.shape, *[1] * (x.ndim - 2))
        return np.take_along_axis(np.asarray(x), indices, axis=1)

    run = functools.partial(_attended, kernel=kernel, exchange=exchange, balance=balance)
    rules = shd.Rules(
        batch=None,
        seq="context",
        heads=None,
        head=None,
        attn_seq=None if has_whole_rows else "context",
        attn_heads="context" if has_whole_rows else None,
        attn_kv_heads="context" if has_whole_rows and KV_HEADS % size == 0 else None,
    )
    with shd.use(shd.make_mesh(context=size, devices=jax.devices()[:size]), rules):
        dealt = [jax.device_put(deal(x), shd.shardings(x, "batch seq _ _")) for x in arrays]
        placed = jax.device_put(deal(segments), shd.shardings(segments, "batch seq"))
        mine = [np.asarray(x.astype(jnp.float32)) for x in jax.jit(run)(dealt, placed)]
    whole = functools.partial(_attended, kernel=xla_attention, exchange=Exchange.ALL_TO_ALL)
    with jax.default_matmul_precision("highest"):
        out, *gradients = jax.jit(whole)(_wide(arrays), segments)
    theirs = [deal(x) for x in (out, *gradients)]
    name = f"{exchange} over {size}, {balance}"
    yield from _errors(name, _with_no_lse(mine), expected=_with_no_lse(theirs))


def _with_no_lse(arrays):
    out, *gradients = arrays
    return out, None, *gradients


def _attended(
    arrays,
    segments_BS,
    *,
    kernel: ModuleType,
    exchange: Exchange,
    balance: Balance = Balance.HEAD_TAIL,
):
    """The output, and the gradients of queries, keys and values."""
    execution = Execution(
        dtype=Dtype.FLOAT32 if kernel is xla_attention else Dtype.BFLOAT16,
        attention=next(name for name, each in KERNELS.items() if each is kernel),
        exchange=exchange,
        balance=balance,
        max_documents=4,
    )
    documents = documents_of(segments_BS, segments_BS, max_documents=4)
    run = functools.partial(attention, documents=documents, execution=execution)
    *qkv, cotangent = arrays
    out, vjp = jax.vjp(lambda *qkv: run(*qkv), *qkv)
    return out, *vjp(cotangent)


def _errors(name: str, mine, *, expected) -> Iterator[tuple[str, float, float]]:
    bounds = (OUT_RTOL, OUT_RTOL, *[GRADIENT_RTOL] * 3)
    whats = ("output", "log-sum-exp", "dq", "dk", "dv")
    for what, here, there, bound in zip(whats, mine, expected, bounds, strict=True):
        if here is None:
            continue
        here, there = (np.asarray(x, np.float64) for x in (here, there))
        is_counted = there > NOTHING / 2
        assert not (here > NOTHING / 2)[~is_counted].any(), f"{name}: {what} of no keys"
        difference, norm = (float(np.linalg.norm(x[is_counted])) for x in (here - there, there))
        yield f"{name}: {what}", difference / max(norm, 1.0), bound


def describe(errors: Iterable[tuple[str, float, float]]) -> Iterator[str]:
    """A line for each of those of `check`, and last whether all are small enough."""
    all_hold = True
    for what, error, bound in errors:
        holds = error < bound
        all_hold &= holds
        yield f"{what:45s} {error:.1e} {'<' if holds else 'IS NOT BELOW'} {bound:.0e}"
    yield "all are as plain XLA has them" if all_hold else "NOT ALL are as plain XLA has them"
