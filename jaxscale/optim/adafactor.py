"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) with clipping by global norm, by optax."""

import dataclasses

import jax
import numpy as np
import optax

from jaxscale import sharding as shd
from jaxscale.config import check_fields, number
from jaxscale.optim.axes import axes_of_boxes

# The type of its state, which optax does not export.
FactoredState = type(optax.scale_by_factored_rms().init({}))


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """Second moments of a matrix are kept as their means along rows and along columns."""

    # How fast the second moments forget: 1 - step ** -decay.
    decay: float = number(above=0, below=1, default=0.8)
    # A matrix with a smaller side keeps its second moments whole.
    min_dim_to_factor: int = number(least=2, default=128)
    # An update is scaled down to this root mean square.
    clip_rms: float = number(above=0, default=1.0)
    weight_decay: float = number(least=0, default=0.0)
    # Gradients are scaled down to this global norm; 0: never.
    clip_norm: float = number(least=0, default=1.0)

    def validate(self) -> None:
        """Raises ValueError for values that cannot be."""
        check_fields(self, "config.optim")

    def build(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """State is float32; `learning_rate` is a function of the update's number."""
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        return optax.chain(
            clip,
            optax.scale_by_factored_rms(
                decay_rate=self.decay, min_dim_size_to_factor=self.min_dim_to_factor
            ),
            optax.clip_by_block_rms(self.clip_rms),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    def state_axes(self, state, *, params):
        """The logical axes of the state's arrays.

        The means along rows and columns lack the axis that they are taken over.
        """

        def axes(part):
            if not isinstance(part, FactoredState):
                return axes_of_boxes(part)
            rows, columns = (self._means_axes(params, lost=lost) for lost in (-1, -2))
            whole = self._means_axes(params, lost=None)
            return part._replace(count=(), v_row=rows, v_col=columns, v=whole)

        return jax.tree.map(axes, state, is_leaf=lambda part: isinstance(part, FactoredState))

    def _means_axes(self, params, *, lost: int | None):
        """Axes of means over the `lost` largest side, or of what is not factored (None).

        What a parameter has none of is an array of one element.
        """

        def axes(box):
            names, (param,) = shd.axes_of(box) or (), jax.tree.leaves(box)
            by_size = np.argsort(param.shape)
            is_factored = param.ndim > 1 and param.shape[by_size[-2]] >= self.min_dim_to_factor
            if is_factored == (lost is None):
                left: tuple[str, ...] = ("_",)
            else:
                left = tuple(
                    n for dim, n in enumerate(names) if lost is None or dim != by_size[lost]
                )
            return jax.tree.map(lambda _: left, box)

        return jax.tree.map(axes, params, is_leaf=lambda x: shd.axes_of(x) is not None)
