"""Named sharding: a mesh, rules from logical axes to mesh axes, and the few calls that apply them.

A parameter or activation is described by *logical* axes ("embed mlp", "batch seq act_embed"); `Rules` say which *mesh*
axes split each of them; a layout is one mesh and one set of rules, and the model's code never changes with it:

    from jaxscale import sharding as shd

    mesh = shd.make_mesh(fsdp=4, tensor=2)
    rules = shd.Rules(batch="fsdp", embed="fsdp", mlp="tensor", act_embed=None)
    with shd.use(mesh, rules):
        params = jax.jit(init, out_shardings=shd.shardings(jax.eval_shape(init, key)))(key)
        y_BSF = shd.einsum("BSD,DF->BSF", x_BSD, shd.gather(params["up"]), out="batch seq mlp")

With `Explicit` mesh axes (the default) JAX carries the sharding in every type and a contraction whose output axes are
missing is a trace-time error; with `Auto` axes the same calls become sharding constraints. Outside `use` they do nothing,
so the same model runs on one device. This file needs jax alone; `param` needs flax as well.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Slow to fast: the last ones stay inside a node.
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True, init=False)
class Rules:
    """Which mesh axes split each logical axis: `Rules(batch=("data", "fsdp"), embed="fsdp", act_embed=None)`.

    A logical axis that is not listed is an error where it is used; `_` in a list of axes is never split.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(
        self, rules: Mapping[str, Any] | None = None, /, **more: str | Sequence[str] | None
    ):
        table = {**(rules or {}), **more}
        object.__setattr__(
            self, "axes", tuple((name, _as_tuple(value)) for name, value in table.items())
        )

    def replace(self, **more: str | Sequence[str] | None) -> "Rules":
        """These rules with some logical axes changed or added."""
        return Rules(dict(self.axes) | more)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that split a logical axis. Raises ValueError for a name without a rule."""
        if name == "_":
            return ()
        table = dict(self.axes)
        if name not in table:
            raise ValueError(
                f"logical axis {name!r} has no rule; add it to Rules (there are {', '.join(table)})"
            )
        return table[name]

    def spec(
        self, axes: str | Sequence[str | None], shape: Sequence[int] | None = None, *, mesh=None
    ) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes ("embed mlp").

        Raises ValueError if a mesh axis would split two dimensions or, given `shape` and `mesh`, if it does not divide one.
        """
        names = _names(axes)
        entries = [self.mesh_axes(name) for name in names]
        owner: dict[str, str] = {}
        for name, entry in zip(names, entries, strict=True):
            for mesh_axis in entry:
                if mesh_axis in owner:
                    raise ValueError(
                        f"mesh axis {mesh_axis!r} splits both {owner[mesh_axis]!r} and {name!r} of one array "
                        f"({' '.join(names)}); change the rule of one of them"
                    )
                owner[mesh_axis] = name
        if shape is not None and mesh is not None:
            for name, entry, size in zip(names, entries, shape, strict=True):
                _check_divides(name, entry, size, mesh)
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _check_divides(name, mesh_axes, size, mesh):
    parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
    if size % parts:
        shown = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh_axes)
        raise ValueError(
            f"axis {name!r} of size {size} cannot be split over mesh axes {shown}; make the mesh axis a divisor of "
            f"{size} (config.mesh.{mesh_axes[-1]}), pad the size (sharding.padded), or change the rule of {name!r}"
        )


def make_mesh(
    sizes: Mapping[str, int] | None = None, /, *, devices=None, axis_types="explicit", **more: int
) -> Mesh:
    """A mesh of the named axes, `make_mesh(data=2, fsdp=4)`; those of MESH_AXES that are not named have size 1.

    Axes of other names come first, in the order given. axis_types: 'explicit' or 'auto'. Raises ValueError if the
    product is not the number of devices.
    """
    given = {**(sizes or {}), **more}
    sizes = {axis: size for axis, size in given.items() if axis not in MESH_AXES}
    sizes |= {axis: given.get(axis, 1) for axis in MESH_AXES}
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes.values()) != len(devices):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all 1"
        raise ValueError(
            f"mesh ({shown}) needs {math.prod(sizes.values())} devices and {len(devices)} are here"
        )
    kind = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[axis_types]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )


# Part of jit's cache key: the same function under other rules is traced again.
_current_rules = jax.make_user_context(None)


@contextlib.contextmanager
def use(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Makes mesh and rules the ones that the calls below apply, in and out of jit.

    Raises ValueError for a rule that names an axis the mesh has not.
    """
    for name, mesh_axes in rules.axes:
        for axis in mesh_axes:
            if axis not in mesh.shape:
                raise ValueError(
                    f"the rule {name}={mesh_axes} names mesh axis {axis!r}, and the mesh has {mesh.axis_names}"
                )
    with jax.set_mesh(mesh), _current_rules(rules):
        yield


def current_rules() -> Rules:
    """The rules of the innermost `use`. Raises ValueError outside of one."""
    if _current_rules.value is None:
        raise ValueError(
            "no sharding rules are in use; enter `with sharding.use(mesh, rules):` first"
        )
    return _current_rules.value


def _mode() -> AxisType | None:
    """Explicit or Auto inside `use`; None outside, and inside a shard_map, where arrays are local."""
    if _current_rules.value is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or AxisType.Manual in mesh.axis_types else mesh.axis_types[0]


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes that split a logical axis under the current rules; () outside `use`. For collectives in `shard_map`."""
    return () if _current_rules.value is None else current_rules().mesh_axes(axis)


def param(
    rngs,
    shape: Sequence[int],
    axes: str,
    *,
    scale: float | None = None,
    fill: float | None = None,
    dtype=jnp.float32,
):
    """A flax NNX Param that knows its logical axes: truncated normal (+-3 sigma) times `scale`, or the constant `fill`.

    Needs no mesh. Stacked by `jax.vmap`, it gains a leading `layers` axis. The values depend on the key and the shape
    only, never on the layout.
    """
    from flax import nnx

    names = _names(axes)
    if len(names) != len(shape):
        raise ValueError(
            f"axes {axes!r} names {len(names)} dimensions and the shape {tuple(shape)} has {len(shape)}"
        )
    if (scale is None) == (fill is None):
        raise ValueError(f"param of axes {axes!r}: give either scale= or fill=")
    if fill is not None:
        value = jnp.full(shape, fill, dtype)
    else:
        value = jax.random.truncated_normal(
            rngs.params(), -3.0, 3.0, tuple(shape), dtype
        ) * jnp.asarray(scale, dtype)
    return nnx.Param(value, axes=names)


def padded(size: int, multiple: int = 128) -> int:
    """`size` rounded up to a multiple, for vocabularies: any usual tensor axis divides it, in every layout alike."""
    return -(-size // multiple) * multiple


def shardings(
    tree,
    patterns: Sequence[tuple[str, str]] | None = None,
    *,
    rules: Rules | None = None,
    mesh=None,
):
    """The tree with a NamedSharding in place of every array (or ShapeDtypeStruct): for `out_shardings` and restore.

    The axes come from the leaves' metadata (NNX variables made by `param`, Linen's `with_partitioning`), or from
    `patterns`, pairs of a regular expression searched in the leaf's path ("layers/mlp/up") and its axes, first match first.
    An array with one dimension more than it has axes is a stack, and gains a leading `layers` axis. Scalars are
    replicated. Raises ValueError for an array that nothing describes, or that its mesh axes do not divide.
    """
    mesh, rules = _mesh_and_rules(mesh, rules)

    def sharding_of(path, names, leaf):
        try:
            return NamedSharding(mesh, rules.spec(names, leaf.shape, mesh=mesh))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return _map_described(sharding_of, tree, patterns)


def _mesh_and_rules(mesh, rules):
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                "no mesh is in use; pass mesh= or enter `with sharding.use(mesh, rules):`"
            )
    return mesh, current_rules() if rules is None else rules


def _map_described(function: Callable, tree, patterns=None):
    """Maps `function(path, axis names, array)` over the arrays, keeping the boxes that hold them."""

    def visit(path, box):
        path = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return jax.tree.map(
            lambda leaf: function(path, _describe(path, box, leaf, patterns), leaf), box
        )

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=_is_box)


def _describe(path, box, leaf, patterns) -> tuple[str, ...]:
    if leaf.ndim == 0:
        return ()
    names = _axes_of(box) if patterns is None else None
    for pattern, axes in patterns or ():
        if re.search(pattern, path):
            names = _names(axes)
            break
    if names is None:
        how = (
            "make it with sharding.param or pass patterns="
            if patterns is None
            else "add a pattern that matches it"
        )
        raise ValueError(
            f"{path}: nothing says what the axes of this {tuple(leaf.shape)} array are; {how}"
        )
    return _stacked(path, names, leaf.ndim)


def _stacked(path, names, ndim) -> tuple[str, ...]:
    if ndim == len(names) + 1:
        names = ("layers", *names)
    if len(names) != ndim:
        raise ValueError(
            f"{path}: axes {' '.join(names)!r} name {len(names)} dimensions and the array has {ndim}"
        )
    return names


def _is_box(x) -> bool:
    return _axes_of(x) is not None


def _axes_of(box) -> tuple[str, ...] | None:
    """Axis names kept by an NNX Variable (`axes`, or flax's own `out_sharding`) or a Linen Partitioned (`names`)."""
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        axes = metadata.get("axes", metadata.get("out_sharding"))
    elif hasattr(box, "unbox"):
        axes = getattr(box, "names", None)
    else:
        return None
    return None if axes is None else _names(axes)


def constrain(x, axes: str):
    """`x` with the sharding of these logical axes: a reshard if it has another (Explicit), a constraint (Auto)."""
    mode = _mode()
    if mode is None:
        return x
    spec = current_rules().spec(axes, x.shape, mesh=jax.sharding.get_abstract_mesh())
    if mode == AxisType.Explicit:
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def reshard(tree, shardings):
    """The arrays with the NamedShardings of a tree like theirs: moved if they have others (Explicit), constrained (Auto)."""
    mode = _mode()
    if mode is None:
        return tree
    move = jax.sharding.reshard if mode == AxisType.Explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(move, tree, shardings)


def einsum(subscripts: str, *operands, out: str, dtype=None, **options):
    """`jnp.einsum` whose result has the sharding of the logical axes `out`.

    dtype: of the product of two operands, which are cast to it. The gradient of the second, the weight, leaves its product
    in the weight's own dtype: in float32, and never rounded, for what `gather(..., reduce_dtype=jnp.float32)` returns.
    Raises ValueError if `dtype` is given for other than two operands, or without "->".
    """
    if dtype is None:
        return _einsum(subscripts, *operands, out=out, **options)
    if len(operands) != 2 or "->" not in subscripts:
        raise ValueError(
            f"einsum({subscripts!r}) of {len(operands)} operands: with dtype= it takes two and their result, 'BD,DF->BF'"
        )
    x, weight = operands[0].astype(dtype), operands[1]
    product = _einsum if weight.dtype == dtype else _einsum_of_wide_weight
    return product(subscripts, x, weight, out=out, **options)


def _einsum(subscripts, *operands, out, **options):
    if _mode() == AxisType.Explicit:
        return jnp.einsum(subscripts, *operands, out_sharding=current_rules().spec(out), **options)
    result = jnp.einsum(subscripts, *operands, **options)
    return constrain(result, out)


def _einsum_of_wide_weight(subscripts, x, weight, *, out, **options):
    x_axes, weight_axes, out_axes = re.split(",|->", subscripts.replace(" ", ""))
    wide = weight.dtype

    @jax.custom_vjp
    def product(x, weight):
        return _einsum(subscripts, x, weight.astype(x.dtype), out=out, **options)

    def forward(x, weight):
        # Where nothing is recomputed, the weight is kept as narrow as it is multiplied.
        return product(x, weight), (x, weight.astype(x.dtype))

    def backward(residuals, grad):
        x, weight = residuals
        (dx,) = jax.linear_transpose(
            lambda x: _einsum(subscripts, x, weight, out=out, **options), x
        )(grad)
        to_weight = options | {"preferred_element_type": wide}
        if _mode() == AxisType.Explicit:
            to_weight["out_sharding"] = jax.typeof(weight).sharding.spec
        return dx, jnp.einsum(
            f"{x_axes},{out_axes}->{weight_axes}", x, constrain(grad, out), **to_weight
        )

    product.defvjp(forward, backward)
    return product(x, weight)


def reshape(x, shape: Sequence[int], out: str):
    """`jnp.reshape` whose result has the sharding of the logical axes `out`."""
    if _mode() == AxisType.Explicit:
        return jnp.reshape(x, shape, out_sharding=current_rules().spec(out))
    return constrain(jnp.reshape(x, shape), out)


def gather(
    tree,
    *,
    dtype=None,
    reduce_dtype=None,
    over: Sequence[str] = ("fsdp",),
    axes: str | None = None,
    name: str | None = None,
):
    """The arrays whole along the mesh axes `over` and still split along the others, cast to `dtype` first.

    This is FSDP's all-gather; its transpose reduce-scatters the gradient, in `dtype`. Call it where the weights are
    used, inside the checkpointed body of a layer scan, so that one layer is whole at a time. On an Auto mesh, arrays
    without metadata need `axes`.

    reduce_dtype: the gradient's, where it is wider than `dtype`. A gradient has the dtype of its array: the arrays are rounded
    to `dtype` and move as such, but come out in `reduce_dtype`, for products by `einsum(..., dtype=)`.
    name: of the gathered arrays for a checkpoint policy (`jax.ad_checkpoint.checkpoint_name`), as narrow as they moved.
    """

    def gather_box(path, box):
        path = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return jax.tree.map(
            lambda leaf: gather_leaf(leaf, functools.partial(_whole, path, box, over, axes)), box
        )

    def gather_leaf(leaf, whole):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        narrow = jnp.dtype(dtype) if is_float and dtype is not None else leaf.dtype
        wide = jnp.dtype(reduce_dtype) if is_float and reduce_dtype is not None else narrow

        def gathered(leaf):
            moved = whole(leaf.astype(narrow))
            return moved if name is None else checkpoint_name(moved, name)

        if wide.itemsize <= narrow.itemsize:
            return gathered(leaf)
        return _with_gradient_of(
            lambda leaf: whole(leaf.astype(wide)), lambda leaf: gathered(leaf).astype(wide), leaf
        )

    return jax.tree_util.tree_map_with_path(gather_box, tree, is_leaf=_is_box)


def _whole(path, box, over, axes, leaf):
    mode = _mode()
    if mode is None or leaf.ndim == 0:
        return leaf
    if mode == AxisType.Explicit:
        return jax.sharding.reshard(leaf, _without(jax.typeof(leaf).sharding.spec, over))
    names = _names(axes) if axes is not None else _axes_of(box)
    if names is None:
        raise ValueError(
            f"{path or 'gather'}: on an Auto mesh an array without metadata needs axes="
        )
    spec = current_rules().spec(_stacked(path, names, leaf.ndim))
    return jax.lax.with_sharding_constraint(leaf, _without(spec, over))


def _with_gradient_of(linear, function, x):
    """`function(x)` with the gradient of `linear(x)`, whose result is of the same type."""
    transpose = jax.linear_transpose(linear, jax.typeof(x))
    differentiated = jax.custom_vjp(function)
    differentiated.defvjp(lambda x: (function(x), None), lambda _, grad: transpose(grad))
    return differentiated(x)


def _without(spec, over) -> PartitionSpec:
    entries = [tuple(axis for axis in _as_tuple(entry) if axis not in over) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def shard_map(function: Callable, *, in_axes: Sequence[str], out_axes):
    """`function` on each device's own part of its arguments, all mesh axes manual; plain `function` outside `use`.

    in_axes: the logical axes of each argument; out_axes: of the result, a string or a tuple of them ("" for a scalar). Kernels
    need this: a custom call under plain jit gathers its inputs silently. A result must be the same on all devices that
    its axes do not split (reduce it over `mesh_axes(...)` first).
    """
    if _mode() is None:
        return function
    rules = current_rules()
    in_specs = tuple(rules.spec(axes) for axes in in_axes)
    out_specs = jax.tree.map(rules.spec, out_axes)

    def constrained(*args):
        placed = [constrain(arg, axes) for arg, axes in zip(args, in_axes, strict=True)]
        # check_vma: cuDNN's primitives and custom_vjp rules do not track which axes a value varies over.
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
            *placed
        )

    return constrained


def global_array(
    fetch: Callable[[Any], np.ndarray], shape: Sequence[int], axes: str, *, mesh=None, rules=None
):
    """One global array out of what each host has: `fetch(index)` returns the part at this index, for local devices only."""
    mesh, rules = _mesh_and_rules(mesh, rules)
    sharding = NamedSharding(mesh, rules.spec(axes, shape, mesh=mesh))
    return jax.make_array_from_callback(tuple(shape), sharding, fetch)


def explain(
    tree,
    patterns: Sequence[tuple[str, str]] | None = None,
    *,
    rules: Rules | None = None,
    mesh=None,
) -> str:
    """A table, a line an array: path, shape, logical axes, spec and MiB on each device; the last line is the total."""
    mesh, rules = _mesh_and_rules(mesh, rules)
    rows: list[tuple[str, ...]] = [("array", "shape", "logical axes", "spec", "MiB/device")]
    total = 0.0

    def add(path, names, leaf):
        nonlocal total
        spec = rules.spec(names, leaf.shape, mesh=mesh)
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        mib = math.prod(shard) * leaf.dtype.itemsize / 2**20
        total += mib
        shown = ", ".join("+".join(_as_tuple(entry)) or "-" for entry in spec)
        rows.append(
            (
                path,
                "x".join(map(str, leaf.shape)) or "scalar",
                " ".join(names),
                f"({shown})",
                f"{mib:,.3f}",
            )
        )

    _map_described(add, tree, patterns)
    rows.append(("total", "", "", "", f"{total:,.3f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i == 4 else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )  # fmt: skip


def _names(axes) -> tuple[str, ...]:
    if isinstance(axes, str):
        return tuple(axes.split())
    return tuple("_" if axis is None else axis for axis in axes)


def _as_tuple(entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
