"""Named sharding: a mesh, rules from logical axes to mesh axes, and the few calls that apply them.

A parameter or activation is described by *logical* axes ("embed mlp", "batch seq act_embed");
`Rules` say which *mesh* axes split each of them; a layout is one mesh and one set of rules, and the
model's code never changes with it:

    from jaxscale import sharding as shd

    mesh = shd.make_mesh(fsdp=4, tensor=2)
    rules = shd.Rules(batch="fsdp", embed="fsdp", mlp="tensor", act_embed=None)
    with shd.use(mesh, rules):
        params = jax.jit(init, out_shardings=shd.shardings(jax.eval_shape(init, key)))(key)
        y_BSF = shd.einsum("BSD,DF->BSF", x_BSD, shd.gather(params["up"]), out="batch seq mlp")

With `Explicit` mesh axes (the default) JAX carries the sharding in every type and a contraction
whose output axes are missing is a trace-time error; with `Auto` axes the same calls become sharding
constraints. Inside a `jax.shard_map` they apply to the axes that are not manual: the manual ones
drop out of every spec. Outside `use` they do nothing, so the same model runs on one device. This
file needs jax alone; `param` needs flax as well. B batch, S sequence, D model, F mlp in the
examples.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Slow to fast: the last ones stay inside a node.
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True, init=False)
class Rules:
    """Which mesh axes split each logical axis: `Rules(batch=("data", "fsdp"), act_embed=None)`.

    A logical axis that is not listed is an error where it is used; `_` in a list of axes is never
    split.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(
        self, rules: Mapping[str, Any] | None = None, /, **more: str | Sequence[str] | None
    ):
        table = {**(rules or {}), **more}
        object.__setattr__(self, "axes", tuple((k, _as_tuple(v)) for k, v in table.items()))

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

        Mesh axes that are manual where this is called drop out. Raises ValueError if a mesh axis
        would split two dimensions or, given `shape` and `mesh`, if it does not divide one.
        """
        names = _names(axes)
        manual = _manual_axes()
        entries = [_minus(self.mesh_axes(name), manual) for name in names]
        owner: dict[str, str] = {}
        for name, entry in zip(names, entries, strict=True):
            for mesh_axis in entry:
                if mesh_axis in owner:
                    raise ValueError(
                        f"mesh axis {mesh_axis!r} splits both {owner[mesh_axis]!r} and {name!r} of "
                        f"one array ({' '.join(names)}); change the rule of one of them"
                    )
                owner[mesh_axis] = name
        if shape is not None and mesh is not None:
            for name, entry, size in zip(names, entries, shape, strict=True):
                _check_divides(mesh, entry, name=name, size=size)
        return _spec(entries)


def _check_divides(mesh, mesh_axes, *, name, size):
    parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
    if size % parts:
        shown = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh_axes)
        raise ValueError(
            f"axis {name!r} of size {size} cannot be split over mesh axes {shown}; make the mesh "
            f"axis a divisor of {size} (config.mesh.{mesh_axes[-1]}), pad the size, or change the "
            f"rule of {name!r}"
        )


def make_mesh(
    sizes: Mapping[str, int] | None = None, /, *, devices=None, axis_types="explicit", **more: int
) -> Mesh:
    """A mesh of the named axes, `make_mesh(data=2, fsdp=4)`; others of MESH_AXES have size 1.

    Axes of other names come first, in the order given. axis_types: 'explicit' or 'auto'. Raises
    ValueError if the product is not the number of devices.
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
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


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
                    f"the rule {name}={mesh_axes} names mesh axis {axis!r}, and the mesh has "
                    f"{mesh.axis_names}"
                )
    with jax.set_mesh(mesh), _current_rules(rules):
        yield


def mesh_axes(axes: str, *, with_manual: bool = False) -> tuple[str, ...]:
    """The mesh axes that split these logical axes ("batch", or "batch seq"), without manual ones.

    () outside `use`. For collectives: ask before entering the `shard_map` that needs them, as all
    of its axes are manual inside. with_manual: also those that were manual before.
    """
    if _current_rules.value is None:
        return ()
    found = [axis for name in _names(axes) for axis in _rules().mesh_axes(name)]
    return tuple(found) if with_manual else _minus(found, _manual_axes())


def spec_of(axes: str | Sequence[str | None]) -> PartitionSpec:
    """`Rules.spec` by the rules in use."""
    return _rules().spec(axes)


def _rules() -> Rules:
    if _current_rules.value is None:
        raise ValueError(
            "no sharding rules are in use; enter `with sharding.use(mesh, rules):` first"
        )
    return _current_rules.value


def _manual_axes() -> tuple[str, ...]:
    return _axes_of_type(AxisType.Manual)


def _axes_of_type(kind: AxisType) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, its_kind in pairs if its_kind == kind)


def _mode() -> AxisType | None:
    """Explicit or Auto, as the axes that are not manual are; None where none of them is in use."""
    if _current_rules.value is None:
        return None
    kinds = set(jax.sharding.get_abstract_mesh().axis_types) - {AxisType.Manual}
    return kinds.pop() if kinds else None


def param(
    rngs,
    shape: Sequence[int],
    *,
    axes: str,
    scale: float | None = None,
    fill: float | None = None,
    dtype=jnp.float32,
):
    """A flax NNX Param that knows its logical axes.

    Its values are a truncated normal (+-3 sigma) times `scale`, or the constant `fill`; they depend
    on the key and the shape only, never on the layout. Needs no mesh.
    """
    from flax import nnx

    names = _names(axes)
    if len(names) != len(shape):
        raise ValueError(
            f"axes {axes!r} names {len(names)} dimensions and the shape {tuple(shape)} has "
            f"{len(shape)}"
        )
    if (scale is None) == (fill is None):
        raise ValueError(f"param of axes {axes!r}: give either scale= or fill=")
    if fill is not None:
        return nnx.Param(jnp.full(shape, fill, dtype), axes=names)
    normal = jax.random.truncated_normal(rngs.params(), -3.0, 3.0, tuple(shape), dtype)
    return nnx.Param(normal * jnp.asarray(scale, dtype), axes=names)


def axes_of(box) -> tuple[str, ...] | None:
    """The logical axes that a box keeps with its array; None if this is no such box.

    Boxes: an NNX Variable (`axes`, or flax's own `out_sharding`), a Linen Partitioned (`names`).
    """
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        axes = metadata.get("axes", metadata.get("out_sharding"))
    elif hasattr(box, "unbox"):
        axes = getattr(box, "names", None)
    else:
        return None
    return None if axes is None else _names(axes)


def shardings(tree, axes=None, *, rules: Rules | None = None, mesh=None):
    """The tree with a NamedSharding in place of every array (or ShapeDtypeStruct).

    axes: where the logical axes of the arrays are written. None: in the boxes that hold them (see
    `axes_of`). A string: all arrays have these. A sequence of pairs: a regular expression searched
    in the array's path ("layers/mlp/up") and its axes, first match first. Else a tree like `tree`
    with a tuple of names in place of each array. A stack of layers has an axis of its own
    ("layers embed mlp"). Scalars are replicated. Raises ValueError for an array that nothing
    describes, whose axes are too few or too many, or that its mesh axes do not divide.
    """
    mesh, rules = _mesh_and_rules(mesh, rules)

    def sharding_of(path, leaf, *, names):
        try:
            return NamedSharding(mesh, rules.spec(names, leaf.shape, mesh=mesh))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return _map_described(sharding_of, tree, axes=axes)


def _mesh_and_rules(mesh, rules):
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                "no mesh is in use; pass mesh= or enter `with sharding.use(mesh, rules):`"
            )
    return mesh, _rules() if rules is None else rules


def _map_described(function: Callable, tree, *, axes):
    """Maps `function(path, array, names=)` over the arrays, keeping the boxes that hold them.

    names: of the array's axes, in order.
    """

    def of_box(path, leaf, *, box):
        return function(path, leaf, names=_names_of(leaf, axes, path=path, box=box))

    def of_names(path, leaf, names):
        path = _shown(path)
        return function(path, leaf, names=_checked(_names(names), leaf, path=path))

    if axes is None or isinstance(axes, str) or _is_patterns(axes):
        return _map_boxes(of_box, tree)
    return jax.tree_util.tree_map_with_path(of_names, tree, axes)


def _is_patterns(axes) -> bool:
    return isinstance(axes, list | tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in axes
    )


def _map_boxes(function: Callable, tree):
    """Maps `function(path, array, box=)` over the arrays; the box of a bare array is itself."""

    def visit(path, box):
        return jax.tree.map(lambda leaf: function(_shown(path), leaf, box=box), box)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=lambda x: axes_of(x) is not None)


def _shown(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _names_of(leaf, axes, *, path, box) -> tuple[str, ...]:
    """The names of an array's axes, from where `axes` says that they are written."""
    if leaf.ndim == 0:
        return ()
    if axes is None:
        names, how = axes_of(box), "make it with sharding.param or pass axes="
    elif isinstance(axes, str):
        names, how = _names(axes), ""
    else:
        found = (names for pattern, names in axes if re.search(pattern, path))
        names, how = next(map(_names, found), None), "add a pattern that matches it"
    if names is None:
        raise ValueError(
            f"{path}: nothing says what the axes of this {tuple(leaf.shape)} array are; {how}"
        )
    return _checked(names, leaf, path=path)


def _checked(names, leaf, *, path) -> tuple[str, ...]:
    if len(names) != leaf.ndim:
        hint = '; a stack has an axis of its own ("layers embed mlp")' if names else ""
        raise ValueError(
            f"{path}: axes {' '.join(names)!r} name {len(names)} dimensions and the array has "
            f"{leaf.ndim}{hint}"
        )
    return names


def constrain(x, axes):
    """`x` with the sharding of these logical axes; or a tree of arrays with those of a like tree.

    axes: a string, or a tree of NamedShardings. On Explicit axes arrays move (`reshard`), on Auto
    axes it is a constraint.
    """
    if _mode() is None:
        return x
    if not isinstance(axes, str):
        return jax.tree.map(lambda leaf, sharding: _placed(leaf, sharding.spec), x, axes)
    return _placed(x, _rules().spec(axes, x.shape, mesh=jax.sharding.get_abstract_mesh()))


def _placed(x, spec):
    if explicit := _axes_of_type(AxisType.Explicit):
        x = jax.sharding.reshard(x, _like(x, only(spec, explicit)))
    if auto := _axes_of_type(AxisType.Auto):
        x = jax.lax.with_sharding_constraint(x, only(spec, auto))
    return x


def reshape(x, shape: Sequence[int], out: str):
    """`jnp.reshape` whose result has the sharding of the logical axes `out`."""
    spec = _rules().spec(out) if _mode() else None
    if explicit := spec is not None and _axes_of_type(AxisType.Explicit):
        x = jax.lax.reshape(x, shape, out_sharding=_like(x, only(spec, explicit)))
    else:
        x = jnp.reshape(x, shape)
    return x if spec is None else _placed(x, spec)


def _like(x, spec: PartitionSpec) -> PartitionSpec:
    """The spec, with the axes over which gradients of x are yet to be summed (`gather`)."""
    return PartitionSpec(*spec.partitions, reduced=jax.typeof(x).sharding.spec.reduced)


def einsum(subscripts: str, *operands, out: str, **options):
    """`jnp.einsum` whose result has the sharding of the logical axes `out`."""
    if _mode() is None:
        return jnp.einsum(subscripts, *operands, **options)
    spec = _rules().spec(out)
    explicit = _axes_of_type(AxisType.Explicit)
    if not explicit:
        return _placed(jnp.einsum(subscripts, *operands, **options), spec)
    wanted = only(spec, explicit)
    # In two steps, as else the operands of a weight's gradient would be split unlike, which jax
    # refuses where that gradient is to stay a sum of each device's own tokens.
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    summed = _split_contraction(subscripts, specs) if _any_reduced(operands) else ()
    if summed:
        partial = PartitionSpec(*_without(wanted, summed), unreduced=set(summed))
        y = jnp.einsum(subscripts, *operands, out_sharding=partial, **options)
    else:
        y = jnp.einsum(subscripts, *operands, out_sharding=wanted, **options)
    return _placed(y, spec) if summed or _axes_of_type(AxisType.Auto) else y


def product_of_parts(product: Callable, operands, *, subscripts: str, specs, out: PartitionSpec):
    """`product(subscripts, operands)` on each device's own parts, summed over devices.

    For products whose operands a device has in a form of its own, such as scaled by the largest
    value that it has. operands: pytrees whose arrays have the dimensions of the subscripts, or
    size 1 in their place; specs: a PartitionSpec for each operand, out: of the result. The sum over
    the mesh axes that split what is contracted is scattered along those that `out` has, and left to
    be made over those in `out.unreduced`. Has no gradient of its own.
    """
    if _mode() is None:
        return product(subscripts, operands)
    summed = _split_contraction(subscripts, specs)
    made = _scattered(subscripts, specs, out=out)

    def local(*operands):
        y = product(subscripts, operands)
        left = _minus(summed, out.unreduced)
        for dim, entry in enumerate(made.partitions):
            if scattered := tuple(axis for axis in _as_tuple(entry) if axis in left):
                y = jax.lax.psum_scatter(y, scattered, scatter_dimension=dim, tiled=True)
                left = _minus(left, scattered)
        y = jax.lax.psum(y, left) if left else y
        unreduced = tuple(axis for axis in summed if axis in out.unreduced)
        return jax.lax.pcast(y, unreduced, to="unreduced") if unreduced else y

    def spec_of(leaf, spec):
        pairs = zip(leaf.shape, spec.partitions, strict=True)
        return PartitionSpec(*(None if size == 1 else entry for size, entry in pairs))

    all_specs = tuple(
        jax.tree.map(lambda leaf, spec=spec: spec_of(leaf, spec), operand)
        for operand, spec in zip(operands, specs, strict=True)
    )
    y = map_parts(local, operands, specs=all_specs, out=made)
    return y if made == out else _placed(y, out)


def map_parts(function: Callable, operands, *, specs, out):
    """`function(*operands)` on each device's own parts, split by PartitionSpecs.

    specs: trees of them like the operands; out: of the result. For arrays that a device has in a
    form of its own; `shard_map` takes logical axes. Plain `function` outside `use`.
    """
    if _mode() is None:
        return function(*operands)
    manual = _manual_axes()
    mapped = jax.shard_map(
        function,
        axis_names=set(_minus(jax.sharding.get_abstract_mesh().axis_names, manual)),
        in_specs=tuple(specs),
        out_specs=out,
        check_vma=not manual,
    )
    return mapped(*jax.tree.map(_placed, tuple(operands), tuple(specs)))


def _scattered(subscripts: str, specs, *, out: PartitionSpec) -> PartitionSpec:
    """How a product of parts comes out: as `out` where sums can be scattered so."""
    inputs, result = subscripts.split("->")
    own = {
        letter: _as_tuple(entry)
        for letters, spec in zip(inputs.split(","), specs, strict=True)
        for letter, entry in zip(letters, spec.partitions, strict=True)
    }
    summed = _minus(_split_contraction(subscripts, specs), out.unreduced)

    def made(letter, entry):
        mine, wanted = own[letter], _as_tuple(entry)
        is_scattered = set(wanted[len(mine) :]) <= set(summed)
        return wanted if wanted[: len(mine)] == mine and is_scattered else mine

    entries = _spec(made(*pair) for pair in zip(result, out.partitions, strict=True))
    return PartitionSpec(*entries, unreduced=out.unreduced)


def _split_contraction(subscripts: str, specs) -> tuple[str, ...]:
    """The mesh axes that split what a product of operands of these specs sums over."""
    inputs, result = subscripts.replace(" ", "").split("->")
    return tuple(
        dict.fromkeys(
            axis
            for letters, spec in zip(inputs.split(","), specs, strict=True)
            for letter, entry in zip(letters, spec.partitions, strict=True)
            if letter not in result
            for axis in _as_tuple(entry)
        )
    )


def _any_reduced(operands) -> bool:
    return any(jax.typeof(operand).sharding.spec.reduced for operand in operands)


def gather(
    tree,
    *,
    dtype=None,
    over: Sequence[str] | None = None,
    axes: str | None = None,
    summed_over: Sequence[str] = (),
):
    """The arrays whole along the mesh axes `over` and still split along the others, cast first.

    This is FSDP's all-gather; its transpose reduce-scatters the gradient, in `dtype`. Call it where
    the weights are used, inside the checkpointed body of a layer scan, so that one layer is whole
    at a time. On an Auto mesh, arrays without metadata need `axes`.

    over: unless given `fsdp`, and what else splits `embed`.

    summed_over: the mesh axes that split the tokens which the array meets. Named, a gradient stays
    each device's own sum until it is reduce-scattered along `over`, and the shares alone are summed
    over the rest (HSDP); else XLA sums whole gradients over all devices inside a scan. Such an
    array may be read by products (`einsum`) alone. No effect on Auto axes, nor
    where others are manual.
    """
    over = _gathered_axes() if over is None else over

    def gather_leaf(path, leaf, *, box):
        if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(dtype)
        if _mode() is None or leaf.ndim == 0:
            return leaf
        if not _axes_of_type(AxisType.Explicit):
            names = _names(axes) if axes is not None else axes_of(box)
            if names is None:
                raise ValueError(
                    f"{path or 'gather'}: on an Auto mesh an array without metadata needs axes="
                )
            return _placed(leaf, _without(_rules().spec(names), over))
        spec = jax.typeof(leaf).sharding.spec
        whole, split = _without(spec, over), _split_axes(spec)
        rest = _minus(summed_over, split)
        # jax has no such gradients where some axes are manual (0.10.2 and 0.11.2): XLA sums there.
        if set(split) & set(over) and _size(rest) > 1 and not _manual_axes():
            # Its transpose, read backwards: reduce-scatter over `over`, then sum the shares.
            leaf = jax.sharding.reshard(leaf, PartitionSpec(*spec.partitions, reduced=set(rest)))
            left = _minus(summed_over, _split_axes(whole))
            return jax.sharding.reshard(leaf, PartitionSpec(*whole, reduced=set(left)))
        return jax.sharding.reshard(leaf, _like(leaf, whole))

    return _map_boxes(gather_leaf, tree)


def _gathered_axes() -> tuple[str, ...]:
    rules = _current_rules.value
    split = rules.mesh_axes("embed") if rules and "embed" in dict(rules.axes) else ()
    return ("fsdp", *_minus(split, ("fsdp",)))


def shard_map(function: Callable, *, in_axes: Sequence[str], out_axes, check_vma: bool = True):
    """`function` on each device's own part of its arguments; plain `function` outside `use`.

    All mesh axes that are not manual yet become so. in_axes: the logical axes of each argument;
    out_axes: of the result, a string or a tuple of them ("" for a scalar). Kernels need this: a
    custom call under plain jit gathers its inputs silently. A result must be the same on all
    devices that its axes do not split (reduce it over `mesh_axes(...)` first).

    check_vma: JAX proves that, and raises if it is not so. Off for kernels whose primitives do not
    track what a value varies over, and always inside another shard_map, where JAX cannot.
    """
    if _mode() is None:
        return function
    rules, manual = _rules(), _manual_axes()
    free = _minus(jax.sharding.get_abstract_mesh().axis_names, manual)
    mapped = jax.shard_map(
        function,
        axis_names=set(free),
        in_specs=tuple(rules.spec(axes) for axes in in_axes),
        out_specs=jax.tree.map(rules.spec, out_axes),
        check_vma=check_vma and not manual,
    )

    def constrained(*args):
        return mapped(*(constrain(arg, axes) for arg, axes in zip(args, in_axes, strict=True)))

    return constrained


def explain(tree, axes=None, *, rules: Rules | None = None, mesh=None) -> str:
    """A table, a line an array: path, shape, logical axes, spec and MiB on each device.

    axes: as for `shardings`. The last line is the total.
    """
    mesh, rules = _mesh_and_rules(mesh, rules)
    rows: list[tuple[str, ...]] = [("array", "shape", "logical axes", "spec", "MiB/device")]
    total = 0.0

    def add(path, leaf, *, names):
        nonlocal total
        spec = rules.spec(names, leaf.shape, mesh=mesh)
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        mib = math.prod(shard) * leaf.dtype.itemsize / 2**20
        total += mib
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        shown = ", ".join("+".join(_as_tuple(entry)) or "-" for entry in spec)
        rows.append((path, shape, " ".join(names), f"({shown})", f"{mib:,.3f}"))

    _map_described(add, tree, axes=axes)
    rows.append(("total", "", "", "", f"{total:,.3f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        line[-1] = row[-1].rjust(widths[-1])
    return "\n".join("  ".join(line) for line in lines)


# Specs.


def _spec(entries) -> PartitionSpec:
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _without(spec: PartitionSpec, axes) -> PartitionSpec:
    return _spec(_minus(_as_tuple(entry), axes) for entry in spec.partitions)


def only(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """What these mesh axes split."""
    return _without(spec, _minus(_split_axes(spec), axes))


def _split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec.partitions for axis in _as_tuple(entry))


def _minus(axes, others) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in others)


def _size(axes) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes)


def _names(axes) -> tuple[str, ...]:
    if isinstance(axes, str):
        return tuple(axes.split())
    return tuple("_" if axis is None else axis for axis in axes)


def _as_tuple(entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
