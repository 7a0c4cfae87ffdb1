"""Rows of a table, whose gradient is summed in a fixed order.

A scatter that adds does so atomically on a GPU: in another order, and to other bits, each time.
Told to be deterministic, XLA sorts all its numbers, one key for each (67 million for 32,768 tokens
of a width of 2,048, jaxlib 0.11.2). Here the tokens are sorted, and rows of one token are summed by
doubling: log2(tokens) passes over the rows.

T tokens, V rows of the table, D its width.
"""

import functools

import jax
import jax.numpy as jnp


def rows_in_order(table_VD, index_T):
    """table_VD[index_T] as [T, D]; zeros for an index outside of the table."""
    # Where devices share the table and have other tokens, their gradients are summed outside.
    index, table = (jax.typeof(x).manual_axis_type for x in (index_T, table_VD))
    axes = tuple(index.varying - table.varying)
    table_VD = jax.lax.pcast(table_VD, axes, to="varying") if axes else table_VD
    return _rows(table_VD, index_T, table_VD.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table_VD, index_T, num_rows):
    return table_VD.at[index_T].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _forward(table_VD, index_T, num_rows):
    return _rows(table_VD, index_T, num_rows), index_T


def _backward(num_rows, index_T, gradient_TD):
    order_T = jnp.argsort(index_T, stable=True)
    index_T, sums_TD = index_T[order_T], gradient_TD[order_T]
    num_tokens = index_T.shape[0]
    for shift in (2**n for n in range((num_tokens - 1).bit_length())):
        # Of the tokens up to `shift` before, those that are the same one.
        is_same_T = jnp.pad(index_T[shift:] == index_T[:-shift], (shift, 0))
        earlier_TD = jnp.pad(sums_TD[:-shift], ((shift, 0), (0, 0)))
        sums_TD += jnp.where(is_same_T[:, None], earlier_TD, 0)
    is_last_T = jnp.append(index_T[1:] != index_T[:-1], True)
    is_inside_T = is_last_T & (index_T >= 0) & (index_T < num_rows)
    # Each row once: without atomics. The others go to rows that are not there.
    target_T = jnp.where(is_inside_T, index_T, num_rows + jnp.arange(num_tokens))
    zeros_VD = jnp.zeros((num_rows, gradient_TD.shape[1]), gradient_TD.dtype)
    return zeros_VD.at[target_T].set(sums_TD, mode="drop", unique_indices=True), None


_rows.defvjp(_forward, _backward)
