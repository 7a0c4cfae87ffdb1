"""One update as one jitted function: gradients over microbatches, optimiser, metrics."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.data.batch import Batch
from jaxscale.ops.loss import cross_entropy
from jaxscale.step.state import Plan, TrainState

# Arrays of a Batch are [microbatches, rows, seq].
BATCH_AXES = "_ batch seq"


def make_train_step(plan: Plan) -> jax.stages.Wrapped:
    """(state, batch) -> (state, metrics); the state is donated. Call it inside `sharding.use(plan.mesh, plan.rules)`.

    The loss is the mean over all tokens of the batch that count, however they fall on microbatches and devices. metrics:
    loss, grad_norm (before clipping), learning_rate, tokens; scalars, float32 (tokens int32).
    """

    def train_step(state: TrainState, batch: Batch):
        num_tokens = count_tokens(batch)
        loss, gradients = _accumulate(plan, state.params, batch, num_tokens)
        with jax.named_scope("optimizer"):
            params, opt_state, grad_norm = _update(plan, state, gradients)
            with jax.numpy_dtype_promotion("standard"):
                learning_rate = jnp.asarray(plan.schedule(state.step), jnp.float32)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": num_tokens,
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(plan.shardings, None),
        compiler_options=plan.compiler_options,
    )


def make_eval_step(plan: Plan) -> jax.stages.Wrapped:
    """(params, batch) -> (sum of -log p over the batch's tokens, float32, without z-loss; number of them, int32)."""

    def eval_step(params, batch: Batch):
        def add(total, microbatch):
            return total + _loss(plan, params, microbatch, z_loss=0.0), None

        return jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)[0], count_tokens(batch)

    return jax.jit(eval_step)


def _update(plan: Plan, state: TrainState, gradients):
    """New parameters, new optimiser state, and the gradients' global norm before clipping."""
    # Where the optimiser's state is split further than the weights (ZeRO-1 and 2), the update runs on the parts and the new
    # weights are gathered.
    gradients = shd.reshard(gradients, plan.update_shardings)
    params = shd.reshard(state.params, plan.update_shardings)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to an int32 count
        updates, opt_state = plan.optimizer.update(gradients, state.opt_state, params)
    params = shd.reshard(optax.apply_updates(params, updates), plan.shardings.params)
    return params, opt_state, optax.tree.norm(gradients)


def count_tokens(batch: Batch) -> jax.Array:
    """The tokens whose prediction counts in the loss."""
    return (batch.targets >= 0).sum(dtype=jnp.int32)


def _accumulate(plan: Plan, params, batch: Batch, num_tokens):
    """Loss and float32 gradients, summed over the microbatches."""

    def one(microbatch):
        weight = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)
        loss, gradients = jax.value_and_grad(
            lambda p: _loss(plan, p, microbatch, z_loss=plan.config.z_loss) * weight
        )(params)
        return loss, shd.reshard(gradients, plan.gradient_shardings)

    if batch.tokens.shape[0] == 1:
        return one(jax.tree.map(lambda x: x[0], batch))

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, one(microbatch)), None

    zeros = shd.reshard(jax.tree.map(jnp.zeros_like, params), plan.gradient_shardings)
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), batch)[0]


def _loss(plan: Plan, params, batch: Batch, *, z_loss: float):
    config = plan.config
    model = nnx.merge(plan.graphdef, params)
    x_BSD = model(batch.tokens, batch.segments, batch.positions, plan.execution)
    # The scopes (also `optimizer`, `embedding`, `attention`) are what jaxscale/anatomy.py tells the parts of a step by.
    with jax.named_scope("loss"):
        dtype = jnp.dtype(config.dtype)
        return cross_entropy(
            x_BSD, model.head(), batch.targets, config.model.vocab_size, z_loss, dtype
        )
