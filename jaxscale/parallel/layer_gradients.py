"""A layer's forward pass and its gradients as functions of flat residuals.

`jax.vjp` hides what it keeps between the passes; a pipeline has to put that into buffers of its
own. Weights are never among the residuals: they are there in the backward pass too.

The two gradients can be had apart. The equations of the backward pass that the input's gradient
depends on come first; the rest, most of them products, make the weights' later, out of the values
that cross over. Cheap equations that depend on the residuals alone are repeated rather than kept.

And the weights' gradients can leave their products wider than the weights are: a sum over
microbatches is then what the product is added to, where it is written, without rounding before.
"""

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Calls whose equations are taken apart.
INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)
# Never repeated: products, kernels, collectives and loops.
DEAR = (
    "dot_general",
    "shard_map",
    "all_gather",
    "all_to_all",
    "psum",
    "psum_scatter",
    "reduce_scatter",
    "ppermute",
    "reshard",
    "mesh_cast",
    "sharding_constraint",
    "scan",
    "while",
    "cond",
)
# What may stand between a product and the gradient that it makes.
MOVES = ("transpose", "reshape", "reshard", "sharding_constraint")


class LayerGradients:
    """Of `layer(weights, x, shared) -> y`, for arguments of the types of these.

    weights, shared: pytrees of arrays; all that the layer reads must be among its arguments,
    but for constants, which are the same on each device.
    y, residuals, crossing: the types of what the functions below give.
    """

    def __init__(self, layer: Callable, weights, *, x, shared, splits: bool, wide=None):
        """splits: whether `input_gradient` and `weight_gradient` are asked for.

        wide: the dtype in which weights' gradients leave products that no devices share, if not in
        the weights' own.
        """
        self._layer = layer
        abstract = jax.tree.map(_struct, (weights, x, shared))
        self.y, *self.residuals = jax.make_jaxpr(self._trace)(*abstract).out_avals
        self._weights_tree = jax.tree.structure(weights)
        self.crossing: list[Any] = []
        self._abstract_weights, _, self._abstract_shared = abstract
        self._wide = wide
        if splits:
            self._split(self._jaxpr)

    def forward(self, weights, x, *, shared):
        """(y, residuals)."""
        y, kept, _ = self._vjp(weights, x, shared=shared)
        return y, kept

    def backward(self, weights, residuals, *, shared, dy):
        """(gradient of x, gradients of the weights)."""
        env = self._environment(weights, residuals, shared=shared, dy=dy)
        self._evaluate(self._jaxpr.eqns, env)
        return _read(env, self._jaxpr.outvars[0]), self._weights_from(env)

    def _pulled_back(self, weights, residuals, *, shared, dy):
        known = [*jax.tree.leaves(weights), *jax.tree.leaves(shared), *residuals]
        leaves = [known[place] if is_known else leaf for is_known, place, leaf in self._recipe]
        dweights, dx, _ = jax.tree.unflatten(self._vjp_tree, leaves)(dy)
        return dx, dweights

    def input_gradient(self, weights, residuals, *, shared, dy):
        """(gradient of x, what crosses over to `weight_gradient`)."""
        env = self._environment(weights, residuals, shared=shared, dy=dy)
        self._evaluate(self._first, env)
        return _read(env, self._jaxpr.outvars[0]), [env[var] for var in self._crossing]

    def weight_gradient(self, weights, residuals, *, shared, crossing):
        """The gradients of the weights."""
        env = self._environment(weights, residuals, shared=shared)
        env |= dict(zip(self._crossing, crossing, strict=True))
        self._evaluate(self._rest, env)
        return self._weights_from(env)

    def _trace(self, weights, x, shared):
        y, kept, (self._recipe, self._vjp_tree) = self._vjp(weights, x, shared=shared)
        return y, kept

    def _vjp(self, weights, x, *, shared):
        """(y, residuals, how to put the pullback together again).

        A leaf of the pullback that is one of the arguments is recognised as the same object.
        """
        y, pullback = jax.vjp(self._layer, weights, x, shared)
        known = [*jax.tree.leaves(weights), *jax.tree.leaves(shared)]
        place_of = {id(leaf): place for place, leaf in enumerate(known)}
        leaves, tree = jax.tree.flatten(pullback)
        kept: list[Any] = []
        recipe: list[tuple[bool, int, Any]] = []
        for leaf in leaves:
            if id(leaf) not in place_of and isinstance(leaf, jax.Array):
                place_of[id(leaf)] = len(known) + len(kept)
                kept.append(leaf)
            place = place_of.get(id(leaf))
            recipe.append((False, 0, leaf) if place is None else (True, place, None))
        return y, kept, (recipe, tree)

    # The backward pass as equations.

    @property
    def _jaxpr(self) -> Jaxpr:
        """(weights, residuals, shared, dy) -> (dx, dweights); an evaluation never traces it."""
        return self._closed.jaxpr

    @functools.cached_property
    def _closed(self) -> ClosedJaxpr:
        residuals = [_struct(leaf) for leaf in self.residuals]
        arguments = self._abstract_weights, residuals, self._abstract_shared, _struct(self.y)

        def backward(weights, residuals, shared, dy):
            return self._pulled_back(weights, residuals, shared=shared, dy=dy)

        return _flat(jax.make_jaxpr(backward)(*arguments))

    @functools.cached_property
    def _widened(self) -> set[Var]:
        return _products_of(self._jaxpr, wide=self._wide) if self._wide else set()

    def _evaluate(self, eqns: list[JaxprEqn], env: dict[Var, Any]) -> None:
        _evaluate(eqns, env, wide=self._wide, widened=self._widened)

    def _weights_from(self, env: dict[Var, Any]):
        gradients = [_read(env, var) for var in self._jaxpr.outvars[1:]]
        return jax.tree.unflatten(self._weights_tree, gradients)

    def _split(self, jaxpr: Jaxpr) -> None:
        (*known, dy), (dx, *dweights) = [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars
        # A vector's gradient is a sum over tokens: it crosses as a vector, and not as its terms.
        vectors = [var for var in dweights if _is_var(var) and len(_struct(var.aval).shape) < 2]
        self._first, _ = _needed_for([dx, *vectors], jaxpr.eqns)
        made_first = {var for eqn in self._first for var in eqn.outvars} | {dy}
        repeated = _cheap(jaxpr.eqns, known=known)
        stop = (made_first - repeated) | {*known}
        self._rest, needed = _needed_for(dweights, jaxpr.eqns, stop=stop)
        self._crossing = [var for var in _in_order(jaxpr) if var in needed and var in made_first]
        self._crossing = [var for var in self._crossing if var not in repeated]
        self.crossing = [var.aval for var in self._crossing]

    def _environment(self, weights, residuals, *, shared, dy=None) -> dict[Var, Any]:
        """The values of what goes in; without dy, all but that."""
        values = [*jax.tree.leaves(weights), *residuals, *jax.tree.leaves(shared)]
        env = dict(zip(self._jaxpr.constvars, self._closed.consts, strict=True))
        env |= dict(zip(self._jaxpr.invars[:-1], values, strict=True))
        return env if dy is None else env | {self._jaxpr.invars[-1]: dy}


def _struct(leaf) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and sharding.mesh.empty:
        sharding = None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _is_var(var) -> bool:
    return not isinstance(var, Literal)


def _in_order(jaxpr: Jaxpr) -> list[Var]:
    return [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


def _needed_for(
    outputs: Iterable, eqns: list[JaxprEqn], *, stop=frozenset()
) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that make these values out of those in `stop`, and all values they read."""
    needed = {var for var in outputs if _is_var(var)}
    found = []
    for eqn in reversed(eqns):
        if any(var in needed and var not in stop for var in eqn.outvars):
            found.append(eqn)
            needed |= {var for var in eqn.invars if _is_var(var)}
    return found[::-1], needed


def _cheap(eqns: list[JaxprEqn], *, known: list[Var]) -> set[Var]:
    """What the known values give without a product or a collective."""
    cheap = set(known)
    for eqn in eqns:
        inputs = [var for var in eqn.invars if _is_var(var)]
        if eqn.primitive.name not in DEAR and all(var in cheap for var in inputs):
            cheap |= set(eqn.outvars)
    return cheap - set(known)


def _flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The equations with calls taken apart."""

    def evaluate(*args):
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, args, strict=True))
        _evaluate(closed.jaxpr.eqns, env, inlines=True)
        return [_read(env, var) for var in closed.jaxpr.outvars]

    return jax.make_jaxpr(evaluate)(*(_struct(var.aval) for var in closed.jaxpr.invars))


def _read(env: dict[Var, Any], var):
    return env[var] if _is_var(var) else var.val


def _products_of(jaxpr: Jaxpr, *, wide) -> set[Var]:
    """What products make that give weights' gradients, and nothing else, on each device alone.

    Of those narrower than `wide`. Split sums would be sent as wide.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    readers = collections.Counter(var for eqn in jaxpr.eqns for var in eqn.invars if _is_var(var))
    found = set()
    for output in filter(_is_var, jaxpr.outvars[1:]):
        var: Any = output
        while var in made_by and made_by[var].primitive.name in MOVES:
            var = made_by[var].invars[0]
        eqn = made_by.get(var)
        if eqn is None or eqn.primitive.name != "dot_general" or _is_shared(eqn):
            continue
        if readers[var] == (var is not output):
            found.add(var)
    return {var for var in found if _struct(var.aval).dtype.itemsize < jnp.dtype(wide).itemsize}


def _is_shared(product: JaxprEqn) -> bool:
    """Whether devices have a part each of the sum."""
    (dims, _), _ = product.params["dimension_numbers"]
    factor: Any = product.invars[0].aval
    mesh, spec = factor.sharding.mesh, factor.sharding.spec
    return any(
        mesh.shape[axis] > 1 for dim in dims for axis in jax.tree.leaves(spec.partitions[dim])
    )


def _evaluate(
    eqns: list[JaxprEqn],
    env: dict[Var, Any],
    *,
    inlines: bool = False,
    wide=None,
    widened=frozenset(),
) -> None:
    """Adds to `env` what the equations make, the products in `widened` in the dtype `wide`."""
    for eqn in eqns:
        values = [_read(env, var) for var in eqn.invars]
        if inlines and eqn.primitive.name == "optimization_barrier":
            # It keeps values of the forward pass apart, which here come out of buffers. A barrier
            # would have them copied: 470 MB a layer of Llama 3 8B and row of 8192.
            results = values
        elif inlines and eqn.primitive.name in INLINED:
            results = _call(eqn, values)
        else:
            with eqn.ctx.manager:
                parameters = eqn.primitive.get_bind_params(eqn.params)
                if not widened.isdisjoint(eqn.outvars):
                    parameters |= dict(preferred_element_type=jnp.dtype(wide))
                results = eqn.primitive.bind(*values, **parameters)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))


def _call(eqn: JaxprEqn, values: list) -> list:
    inner: Any = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    _evaluate(jaxpr.eqns, env, inlines=True)
    return [_read(env, var) for var in jaxpr.outvars]
