"""Running a stack of layers: the loop over them, and what the backward pass finds saved.

The names of saved tensors are put on by the blocks (`checkpoint_name`) and by the forward rules of
attention kernels. An attention kernel whose output *and* statistics are saved is not run again in
the backward pass; saving the output alone would repeat it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import AsyncTensor, Remat
from jaxscale.ops import delayed, halves, ring
from jaxscale.ops.documents import Documents
from jaxscale.ops.execution import Execution
from jaxscale.ops.linear import GATHERED, SCALES, gathered

ATTENTION = ("attention_out", "attention_lse")

# What each policy keeps of a layer besides its input; docs/decisions.md has the memory of each.
SAVED: dict[Remat, tuple[str, ...]] = {
    Remat.FULL: (),
    Remat.ATTENTION: ATTENTION,
    Remat.ATTENTION_MLP: (*ATTENTION, "gate_up"),
    Remat.GEMMS_LEAN: (*ATTENTION, "qkv", "residual", "gate_up"),
}
# The same names: in unrolled layers XLA keeps more of its own accord, see `_remat`.
SAVED[Remat.GEMMS] = SAVED[Remat.GEMMS_LEAN]
# Before compile/fit.py has chosen, and in evaluations, which save nothing.
SAVED[Remat.AUTO] = SAVED[Remat.GEMMS]
# Those that are not there for their memory.
RICH = (Remat.NONE, Remat.GEMMS, Remat.AUTO)

# (x, weights of one layer, what the stack shares, execution) -> (x, aux)
Block = Callable[[Any, Any, Any, Execution], tuple[Any, dict]]

# The leading axis of stacked weights.
LAYERS = "layers"
# Of aux, with execution.watches_finite: int32, 1 where the layer's output is finite, else 0.
FINITE = "finite"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that run one after the other; their weights have the same shapes.

    weights: a module or tree whose arrays have a leading axis for the layers (`stack_layers`).
    blocks: what a layer computes; several take turns (local, local, global, local, ...).
    share: of the documents, what all layers read, computed once: positions as angles, say.
    reads_by_linear: each weight with an axis `embed` is read by `ops.linear` alone, and once.
    sums_in_ring: what the blocks add to x they make in `ops.ring.summed`.
    """

    weights: Any
    blocks: tuple[Block, ...]
    share: Callable[[Documents], Any] = lambda documents: documents
    reads_by_linear: bool = False
    sums_in_ring: bool = False

    @property
    def num_layers(self) -> int:
        leaf = jax.tree.leaves(self.weights, is_leaf=_is_unstacked)[0]
        return len(leaf.layers) if _is_unstacked(leaf) else leaf.shape[0]


def stack_layers(make: Callable[[jax.Array], Any], keys: jax.Array):
    """The modules `make(key)`, stacked along a first axis whose logical name is LAYERS."""
    stacked = jax.vmap(make)(keys)
    return map_axes(lambda axes: (LAYERS, *axes), stacked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unstacked:
    """A stack's weight as one array a layer, where no backward pass wants them together.

    is_turned: their first axis is stored as the last.
    """

    layers: tuple
    is_turned: bool = dataclasses.field(default=False, metadata={"static": True})

    def __getitem__(self, number: int):
        layer = self.layers[number]
        return jnp.moveaxis(layer, -1, 0) if self.is_turned else layer


def layer_of(weights, number: int):
    """The weights of one layer, out of a stack's whose leaves are `Unstacked`."""
    mine = jax.tree.map(lambda leaf: leaf[number], weights, is_leaf=_is_unstacked)
    return map_axes(lambda axes: axes[1:], mine)


def _is_unstacked(leaf) -> bool:
    return isinstance(leaf, Unstacked)


def map_axes(function: Callable[[tuple[str, ...]], tuple[str, ...]], module):
    """The module with other logical axes of its arrays."""

    def renamed(box):
        axes = shd.axes_of(box)
        return box if axes is None else box.replace(axes=function(axes))

    return jax.tree.map(renamed, module, is_leaf=lambda x: isinstance(x, nnx.Variable))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parted:
    """A stack's weight that is whole, and whose gradient is that of a part of it (ZeRO-2).

    part: the weight split further, as its gradient is to be; nobody reads its values.
    """

    whole: Any
    part: Any


def run_layers(stack: Stack, x, *, documents: Documents, execution: Execution):
    """x after every layer of the stack, and the layers' aux, stacked along a first axis.

    Where the layers are unrolled, XLA puts most weight gradients off to the end of the backward
    pass, and what was recomputed for them lives until then. With a policy that is there for its
    memory, the pass therefore waits for the weight gradients of the layer LAYERS_AHEAD before: 32
    layers of 8B take 28.9 GiB instead of 61.4 with `attention` (compiled for 8 H100, 2 rows of 8192
    tokens each). So it does where their parts are summed over copies: XLA makes all those sums at
    the end, one after the other with nothing beside them, 4.5 GB of 8B in two copies on 8 GPUs.
    """
    if execution.async_tensor == AsyncTensor.RING:
        if not stack.sums_in_ring:
            raise ValueError(
                "config.mesh.async_tensor='ring': layers of config.model need the rows of all "
                "devices at once; set it to 'halves' or 'off'"
            )

        def layers(weights, x, *, parts):
            mine = dataclasses.replace(stack, weights=weights)
            return _run_layers(mine, x, shared=[*map(stack.share, parts)], execution=execution)

        return ring.run(layers, stack.weights, x, documents=documents)
    if execution.async_tensor == AsyncTensor.HALVES:
        x, shared = halves.split(x), [*map(stack.share, halves.split_documents(documents))]
        x, aux = _run_layers(stack, x, shared=shared, execution=execution)
        return halves.join(x), aux
    return _run_layers(stack, x, shared=stack.share(documents), execution=execution)


def _run_layers(stack: Stack, x, *, shared, execution: Execution):
    num_layers = stack.num_layers
    is_unrolled, is_rich = execution.scan_unroll >= num_layers, execution.remat in RICH
    # Whether there is no loop, and the policy is there for its memory.
    is_lean = is_unrolled and not is_rich
    execution = dataclasses.replace(execution, is_lean=is_lean, is_rich=is_unrolled and is_rich)
    if _ends(execution) and execution.scan_unroll < num_layers:
        return _run_with_ends(stack, x, shared=shared, execution=execution)
    layers = layers_of(stack, execution)
    num_turns, num_left = divmod(num_layers, len(layers))
    waits = is_lean or (is_unrolled and execution.sums_parts)
    if waits or (is_unrolled and len(layers) > 1):
        layers = _one_for_each(stack, execution)
        tied = _tied_leaves(stack, execution) if waits else None
        return _run_unrolled(layers, x, weights=stack.weights, shared=shared, tied=tied)
    if len(layers) == 1:
        return jax.lax.scan(
            lambda x, weights: layers[0](x, weights, shared),
            x,
            stack.weights,
            unroll=min(execution.scan_unroll, num_layers),
        )

    def turn(x, weights):
        return _run_unrolled(layers, x, weights=weights, shared=shared)

    whole = jax.tree.map(lambda leaf: _in_turns(leaf, num_turns, length=len(layers)), stack.weights)
    unroll = max(1, min(execution.scan_unroll // len(layers), num_turns))
    x, aux = jax.lax.scan(turn, x, whole, unroll=unroll)
    aux = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), aux)
    if num_left:
        left = jax.tree.map(lambda leaf: leaf[num_layers - num_left :], stack.weights)
        x, more = _run_unrolled(layers[:num_left], x, weights=left, shared=shared)
        aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), aux, more)
    return x, aux


def layers_of(stack: Stack, execution: Execution) -> list[Callable]:
    """(x, weights of one layer, shared) -> (x, aux), under the run's remat, for each kind of layer.

    The weights' logical axes begin with LAYERS, which their arrays no longer have.
    """
    return [_remat(_layer(block, execution), execution) for block in stack.blocks]


def _one_for_each(stack: Stack, execution: Execution) -> list[Callable]:
    """Of the stack's layers; the first with the leaner policy, those at its ends without fp8."""
    leaner, num_layers = execution.is_lean and execution.remat.leaner, stack.num_layers
    kinds: dict[Execution, list[Callable]] = {}

    def layer(number: int) -> Callable:
        mine = execution
        if leaner and number < execution.leaner_layers:
            mine = dataclasses.replace(mine, remat=leaner)
        if _is_at_an_end(number, num_layers, execution=execution):
            mine = dataclasses.replace(mine, fp8=None)
        layers = kinds.setdefault(mine, layers_of(stack, mine))
        return layers[number % len(layers)]

    return [layer(number) for number in range(num_layers)]


def _ends(execution: Execution) -> tuple[int, int] | None:
    """The numbers of the first and the last layers whose products are not in 8 bits, if any."""
    fp8 = execution.fp8
    return (fp8.num_first, fp8.num_last) if fp8 and (fp8.num_first or fp8.num_last) else None


def _is_at_an_end(number: int, num_layers: int, *, execution: Execution) -> bool:
    first, last = _ends(execution) or (0, 0)
    return number < first or number >= num_layers - last


def _run_with_ends(stack: Stack, x, *, shared, execution: Execution):
    """A loop over the layers at each end, without fp8, and one over those between."""
    ends, fp8 = _ends(execution), execution.fp8
    assert ends is not None and fp8 is not None
    first, last = ends
    sizes = first, stack.num_layers - first - last, last
    inner = dataclasses.replace(execution, fp8=dataclasses.replace(fp8, num_first=0, num_last=0))
    outer = dataclasses.replace(execution, fp8=None)
    leaves, treedef = jax.tree.flatten(stack.weights)
    # Their transpose is one concatenation; that of slices is a sum of padded arrays.
    parts = zip(*(jax.lax.split(leaf, sizes, axis=0) for leaf in leaves), strict=True)
    begin, all_aux = 0, []
    for size, mine, part in zip(sizes, (outer, inner, outer), parts, strict=True):
        if size:
            turned = begin % len(stack.blocks)
            blocks = stack.blocks[turned:] + stack.blocks[:turned]
            weights = jax.tree.unflatten(treedef, part)
            layers = dataclasses.replace(stack, weights=weights, blocks=blocks)
            x, aux = _run_layers(layers, x, shared=shared, execution=mine)
            all_aux.append(aux)
        begin += size
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *all_aux)


def _layer(block: Block, execution: Execution):
    def layer(x, weights, shared):
        weights = jax.tree.map(
            lambda leaf: _cut(leaf) if _is_row(leaf) else leaf, weights, is_leaf=_is_row
        )
        weights, meters = delayed.taken_out(weights)
        mine = dataclasses.replace(execution, meters=meters)
        weights = map_axes(lambda axes: axes[1:], weights)
        weights = jax.tree.map(
            lambda leaf: _landed(leaf, execution) if isinstance(leaf, Parted) else leaf,
            weights,
            is_leaf=lambda leaf: isinstance(leaf, Parted),
        )
        if execution.async_tensor != AsyncTensor.OFF:
            x, aux = _in_parts(block, x, weights=weights, shared=shared, execution=mine)
        else:
            x, aux = block(x, weights, shared, mine)
        return x, aux | ({FINITE: is_finite(x)} if execution.watches_finite else {})

    return layer


def is_finite(tree):
    """int32: 1 where all values of the arrays are, else 0."""
    found = [jnp.isfinite(leaf).astype(jnp.int32).min() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(found).min()


def _in_parts(block: Block, x, *, weights, shared, execution: Execution):
    """Of all parts of the rows, with one gather of the weights and one sum of their gradients."""

    def whole(box):
        axes = shd.axes_of(box)
        if axes is None or "embed" not in axes:
            return box
        names = " ".join(axes)
        return jax.tree.map(lambda leaf: gathered(leaf, execution, axes=names), box)

    weights = jax.tree.map(whole, weights, is_leaf=lambda box: shd.axes_of(box) is not None)
    mine = dataclasses.replace(execution, is_gathered=True)
    if execution.async_tensor == AsyncTensor.RING:
        x, aux = block(x, weights, shared, mine)
    else:
        results = [block(x, weights, shared, mine) for x, shared in zip(x, shared, strict=True)]
        x, aux = tuple(x for x, _ in results), results[0][1]
    if aux:
        raise ValueError(
            "config.mesh.async_tensor: layers that have losses or variables of their own need all "
            "rows at once; set it to 'off'"
        )
    return x, {}


def _in_turns(leaf, num_turns: int, *, length: int):
    """[L, ...] as [turns, length of a turn, ...], without the layers that are left over."""
    leaf = leaf[: num_turns * length]
    shape = (num_turns, length, *leaf.shape[1:])
    sharding = jax.typeof(leaf).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf.reshape(shape)
    spec = sharding.spec
    return jax.lax.reshape(
        leaf, shape, out_sharding=P(None, *spec.partitions, reduced=spec.reduced)
    )


def _landed(parted: Parted, execution: Execution):
    """The whole weight; its gradient is the part's, reduce-scattered to where that is."""
    whole, part = parted.whole, parted.part
    part_spec, whole_spec = (jax.typeof(leaf).sharding.spec for leaf in (part, whole))
    tokens = shd.mesh_axes("batch seq")

    @jax.custom_vjp
    def land(part, whole):
        # Only products read it, so that its gradient can stay each device's own sum until here.
        narrow = whole.astype(execution.gradient_dtype)
        return jax.sharding.reshard(narrow, P(*whole_spec.partitions, reduced=set(tokens)))

    def backward(_, grad):
        left = set(tokens) - set(jax.tree.leaves(tuple(part_spec.partitions)))
        grad = jax.sharding.reshard(grad, P(*part_spec.partitions, unreduced=left))
        return jax.sharding.reshard(grad, part_spec).astype(part.dtype), None

    land.defvjp(lambda part, whole: (land(part, whole), None), backward)
    return land(part, whole)


# What is saved.


def _remat(layer, execution: Execution):
    """`layer` under `jax.checkpoint` with the run's policy; as it is for NONE, which saves all."""
    if execution.remat == Remat.NONE:
        return layer
    names = (*SAVED[execution.remat], SCALES, *((GATHERED,) if execution.keep_gathered else ()))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # prevent_cse: inside a scan XLA cannot undo the recomputation, and its barriers cost fusions.
    # Without a loop it does undo it, and a lean policy would save nothing. `gemms` is for speed and
    # keeps what XLA makes of it: norms and activations too, 0.45 GiB a layer of 8B and 8192 tokens.
    return jax.checkpoint(layer, policy=policy, prevent_cse=execution.is_lean)


# Layers that the backward pass may be ahead of its weight gradients. With 1, half of the
# reduce-scatters have nothing to hide behind; with 2, each has 16 ms (Llama 3 8B, 8 H100).
LAYERS_AHEAD = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Row:
    """A layer's part of a stacked weight, cut out of it where it is read.

    Cut out before `jax.checkpoint`, it would be a copy in float32, kept for the backward pass: 13
    GiB of Llama 3 8B on two GPUs. part: the same values; its gradient is wanted, nobody reads it.
    """

    part: Any
    stack: Any
    number: Any


def _is_row(leaf) -> bool:
    return isinstance(leaf, _Row)


@jax.custom_vjp
def _cut(row: _Row):
    return jax.lax.dynamic_index_in_dim(row.stack, row.number, keepdims=False)


_cut.defvjp(
    lambda row: (_cut(row), None),
    lambda _, grad: (_Row(grad, None, None),),
)


def _run_unrolled(layers, x, *, weights, shared, tied=None):
    """layers: as many as the weights are of. tied: of `_tied_leaves`, if there is to be waited."""
    leaves, treedef = jax.tree.flatten(weights)
    of_layers = [list(parts) for parts in zip(*map(_unstack, leaves), strict=True)]
    stacks = jax.lax.stop_gradient(leaves)
    # XLA is not to know which part is which: it would cast the whole stack and copy the parts out
    # of that, 870 MB a layer of Llama 3 8B.
    numbers = jax.lax.optimization_barrier([jnp.int32(i) for i in range(len(of_layers))])
    all_aux = []
    for number, mine in enumerate(of_layers):
        if tied and number + LAYERS_AHEAD < len(of_layers):
            later = of_layers[number + LAYERS_AHEAD]
            x, matrices = _tie(x, [later[i] for i in tied], dtypes=tied.values())
            for i, matrix in zip(tied, matrices, strict=True):
                later[i] = matrix
        rows = [
            _Row(part, stack, numbers[number]) for part, stack in zip(mine, stacks, strict=True)
        ]
        x, aux = layers[number](x, jax.tree.unflatten(treedef, rows), shared)
        all_aux.append(aux)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_aux)


def _tied_leaves(stack: Stack, execution: Execution) -> dict[int, Any]:
    """The leaves whose gradients the backward pass waits for, by number: those of matrices.

    With the dtype in which it holds them. Vectors' gradients are sums over all devices, better done
    together: 2 all-reduces instead of 12.
    """
    weights = stack.weights
    tied = jax.tree.map(
        lambda leaf: Parted(False, True) if isinstance(leaf, Parted) else leaf.ndim > 2,
        weights,
        is_leaf=lambda leaf: isinstance(leaf, Parted),
    )

    def read_by_linear(box):
        found = stack.reads_by_linear and "embed" in (shd.axes_of(box) or ())
        return jax.tree.map(lambda _: found, box)

    narrow = jax.tree.map(
        read_by_linear, weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    of_leaves = zip(jax.tree.leaves(tied), jax.tree.leaves(narrow), strict=True)
    return {
        number: execution.gradient_dtype if is_narrow else jnp.dtype(jnp.float32)
        for number, (is_tied, is_narrow) in enumerate(of_leaves)
        if is_tied
    }


def _tie(x, weights, *, dtypes):
    """As they are; x's gradient goes on once there are those of the weights, held in `dtypes`.

    `linear` casts a weight first of all, so its gradient is cast back last of all, and to undo that
    rounds nothing; nor are the counts of `delayed.py`, small whole numbers. Held as stored, in
    float32, gradients are written and read so by the update: 8.7 GB of the 140 that one of 6 layers
    of 8B's width moves besides its products, 16.4 of 297 of 8B's on each of four GPUs (compiled for
    H200).
    """

    @jax.custom_vjp
    def tie(x, weights):
        return x, weights

    def backward(_, gradients):
        dx, of_weights = gradients
        held = [leaf.astype(dtype) for leaf, dtype in zip(of_weights, dtypes, strict=True)]
        dx, held = jax.lax.optimization_barrier((dx, held))
        return dx, [part.astype(leaf.dtype) for part, leaf in zip(held, of_weights, strict=True)]

    tie.defvjp(lambda x, weights: ((x, weights), None), backward)
    return tie(x, weights)


@jax.custom_vjp
def _unstack(leaf):
    """The parts along the first axis; their gradients are stacked in one operation.

    Those of slices would be a sum of padded arrays.
    """
    return tuple(leaf[i] for i in range(leaf.shape[0]))


def _stacked(parts):
    """`jnp.stack`, also of gradients that are each device's own sums.

    It makes arrays [1, ...] on the way without saying that those too are sums yet to be made: XLA
    makes them there, and sums what they give once more (jax 0.10.2 and 0.11.2).
    """
    return jnp.concatenate([jnp.expand_dims(part, 0) for part in parts])


_unstack.defvjp(lambda leaf: (_unstack(leaf), None), lambda _, gradients: (_stacked(gradients),))
