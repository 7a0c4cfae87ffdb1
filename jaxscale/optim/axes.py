"""Logical axes of an optimiser's state."""

import jax

from jaxscale import sharding as shd


def axes_of_boxes(tree):
    """The tree with a tuple of names in place of each array: the axes that its box keeps, or ()."""

    def axes(box):
        return jax.tree.map(lambda leaf: (shd.axes_of(box) or ()) if leaf.ndim else (), box)

    return jax.tree.map(axes, tree, is_leaf=lambda x: shd.axes_of(x) is not None)
