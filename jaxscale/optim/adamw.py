"""AdamW (Loshchilov & Hutter 2019) with clipping by global norm, by optax."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import check_fields, number
from jaxscale.optim.axes import axes_of_boxes


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    b1: float = number(least=0, below=1, default=0.9)
    b2: float = number(least=0, below=1, default=0.95)
    # Not 0: the vocabulary's padding has no gradient, 0 / 0.
    eps: float = number(above=0, most=1, default=1e-8)
    weight_decay: float = number(least=0, default=0.1)
    # Parameters with one of these in their path do not decay.
    no_decay: tuple[str, ...] = ("norm", "bias")
    # Gradients are scaled down to this global norm; 0: never.
    clip_norm: float = number(least=0, default=1.0)

    def validate(self) -> None:
        check_fields(self, "config.optim")

    def build(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """State is float32 like the parameters; `learning_rate` is a function of the step."""
        # identity: the state has the same parts with and without clipping, and a run may switch.
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        return optax.chain(
            clip,
            self._scale_by_adam(),
            optax.add_decayed_weights(self.weight_decay, mask=self.decays),
            optax.scale_by_learning_rate(learning_rate),
        )

    def _scale_by_adam(self) -> optax.GradientTransformationExtraArgs:
        """`optax.scale_by_adam` that leaves its state as it was unless `is_good`.

        The moments are chosen before the update is made of them, so that XLA reads and writes each
        once. Chosen behind optax it copies the old ones: the update's own fusion reads them too.
        """
        optax_adam = optax.scale_by_adam(self.b1, self.b2, self.eps)

        def update(gradients, state, params=None, *, is_good=True):
            del params

            def chosen(new, old):
                return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, old)

            mu, nu = (
                chosen(optax.tree.update_moment(gradients, state.mu, self.b1, 1), state.mu),
                chosen(
                    optax.tree.update_moment_per_elem_norm(gradients, state.nu, self.b2, 2),
                    state.nu,
                ),
            )
            count = optax.safe_increment(state.count)
            mu_hat = optax.tree.bias_correction(mu, self.b1, count)
            nu_hat = optax.tree.bias_correction(nu, self.b2, count)
            updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.eps), mu_hat, nu_hat)
            return updates, state._replace(count=chosen(count, state.count), mu=mu, nu=nu)

        return optax.GradientTransformationExtraArgs(optax_adam.init, update)

    def state_axes(self, state, *, params):
        """The logical axes of the state's arrays: the moments have those of their parameters."""
        del params
        return axes_of_boxes(state)

    def decays(self, params):
        """The tree of params with True where weight decay applies."""

        def decays(path, _):
            return not any(part in jax.tree_util.keystr(path) for part in self.no_decay)

        return jax.tree_util.tree_map_with_path(decays, params)
