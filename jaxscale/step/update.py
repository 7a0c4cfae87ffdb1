"""One update: gradients over microbatches, optimiser, metrics. And the loss of held-out batches.

B rows, S sequence, D model, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.data.batch import Batch
from jaxscale.models.decoder import Output, forward
from jaxscale.optim import adamw8bit
from jaxscale.step import delayed, layout, loss_scale, stages
from jaxscale.step.loss import cross_entropy_of, documents_of_batch
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, metered, replaced


def update(
    state: TrainState, batch: Batch, *, plan: Plan, loss_limit: jax.Array | None = None
) -> tuple[TrainState, dict]:
    """(state, batch) -> (state, metrics); call it inside `sharding.use(plan.mesh, plan.rules)`.

    The arrays of the batch are [microbatches, rows, seq]. The loss is the mean over all tokens of
    the batch that count, however they fall on microbatches and devices. metrics: loss, grad_norm
    (before clipping), learning_rate, tokens, skipped; scalars, float32 (the last two int32).

    Where loss or grad_norm is not finite, or the loss above loss_limit (float32, a scalar), the
    update is skipped: skipped is 1, and of the state its step alone changes. The choice is made
    element by element in the fusions of the optimiser, which read the old values anyway.

    With float16 also loss_scale, and overflow: 1 where a scaled gradient was too large, and the
    scale may be lowered for it (`step/loss_scale.py`). With delayed scales also saturated: how many
    operands of the layers' products had values out of range (`step/delayed.py`).
    """
    num_tokens = count_tokens(batch)
    if plan.pipeline is None:
        (extra, counts), loss, gradients, _ = loss_and_gradients(
            state, batch, plan=plan, num_tokens=num_tokens
        )
    else:
        extra = state.extra
        counts, loss, gradients = stages.loss_and_gradients(
            state, batch, plan=plan, num_tokens=num_tokens
        )
    with jax.named_scope("optimizer"):
        gradients = loss_scale.unscaled(layout.summed(gradients, plan), by=state.loss_scale)
        grad_norm = optax.tree.norm(gradients)
        # The barrier keeps XLA from summing loss and gradients over devices in one call, which
        # holds buffers of the loss until then: 0.9 GiB of 8B on HSDP 8 x 8, 2 of 70B with tensor 8.
        loss = loss_scale.unscaled(jax.lax.optimization_barrier(loss), by=state.loss_scale)
        is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        scale, of_scale = _next_scale(state, loss, grad_norm=grad_norm, plan=plan)
        if loss_limit is not None:
            is_good &= loss <= loss_limit
        params, opt_state = _apply(gradients, state, plan=plan, is_good=is_good)
        extra = _chosen(is_good, extra, old=state.extra)
        amax, of_amax = delayed.after(state.amax, counts, config=plan.config)
        amax = _chosen(is_good, amax, old=state.amax)
        with jax.numpy_dtype_promotion("standard"):
            learning_rate = jnp.asarray(plan.schedule(_num_applied(state)), jnp.float32)
    metrics = dict(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens=num_tokens,
        skipped=1 - is_good.astype(jnp.int32),
        **of_scale,
        **of_amax,
    )
    state = TrainState(state.step + 1, params, state.frozen, extra, opt_state, scale, amax)
    return state, metrics


def _next_scale(state: TrainState, loss, *, grad_norm, plan: Plan) -> tuple[Any, dict]:
    """The loss scale of the next step, and its metrics; none but with float16."""
    before, settings = state.loss_scale, plan.config.loss_scale
    if not before:
        return before, {}
    # Of a loss that is not finite itself no scale is the cause.
    is_finite = jnp.isfinite(loss)
    has_overflow = is_finite & ~jnp.isfinite(grad_norm)
    following = loss_scale.after(before, has_overflow=has_overflow, settings=settings)
    following = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), following, before)
    return following, loss_scale.metrics_of(before, has_overflow=has_overflow, settings=settings)


def loss_and_gradients(
    state: TrainState,
    batch: Batch,
    *,
    plan: Plan,
    num_tokens,
    observe: Callable[[Output], Any] = lambda output: (),
):
    """((extra, counts), loss, gradients, seen), all but extra and seen summed over microbatches.

    With float16 loss and gradients are multiplied by the loss scale.
    counts: of the operands' largest values, for `delayed.after`.
    seen: what `observe` makes of each microbatch's output, arrays [microbatches, ...].
    """
    held, no_counts = layout.hold(state.params, plan), delayed.zero_counts(plan)
    loss_of = functools.partial(
        _loss, plan=plan, state=state, num_tokens=num_tokens, observe=observe
    )

    def sums_of(extra, microbatch):
        of_held = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, (extra, seen)), (gradients, counts) = of_held(
            held, no_counts, extra=extra, microbatch=microbatch
        )
        return extra, (counts, loss, layout.land(gradients, plan)), seen

    def add(carry, microbatch):
        (extra, total), (extra, sums, seen) = carry, sums_of(carry[0], microbatch)
        return (extra, jax.tree.map(jnp.add, total, sums)), seen

    if batch.tokens.shape[0] == 1:
        extra, sums, seen = sums_of(state.extra, jax.tree.map(lambda x: x[0], batch))
        seen = jax.tree.map(lambda x: x[None], seen)
    else:
        zeros = no_counts, jnp.zeros((), jnp.float32), layout.zero_gradients(held, plan)
        (extra, sums), seen = jax.lax.scan(add, (state.extra, zeros), batch)
    counts, loss, gradients = sums
    return (extra, counts), loss, gradients, seen


def held_out_loss(state: TrainState, batch: Batch, *, plan: Plan):
    """(sum of -log p over the batch's tokens, float32, without z-loss; their number, int32)."""
    if plan.pipeline is not None:
        return stages.held_out_loss(state, batch, plan=plan), count_tokens(batch)

    def add(total, microbatch):
        output = _forward(state.params, state.extra, plan=plan, state=state, batch=microbatch)
        return total + cross_entropy_of(output, microbatch.targets, plan=plan, z_loss=0.0), None

    return jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)[0], count_tokens(batch)


def count_tokens(batch: Batch) -> jax.Array:
    """The tokens whose prediction counts in the loss."""
    return (batch.targets >= 0).sum(dtype=jnp.int32)


def _loss(
    held,
    counts,
    *,
    extra,
    microbatch: Batch,
    plan: Plan,
    state: TrainState,
    num_tokens,
    observe: Callable,
):
    """(the microbatch's part of the loss, (the new extra variables, what is observed))."""
    params = layout.read(held, state.params, plan=plan)
    output = _forward(params, extra, counts=counts, plan=plan, state=state, batch=microbatch)
    share = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)
    share = loss_scale.scaled(share, by=state.loss_scale)
    loss = cross_entropy_of(
        output,
        microbatch.targets,
        plan=plan,
        z_loss=plan.config.z_loss,
        enlarged=loss_scale.of_logits(share, by=state.loss_scale),
    )
    aux_loss = output.aux_loss / plan.config.grad_accumulation
    loss = loss * share + loss_scale.scaled(aux_loss, by=state.loss_scale)
    return loss, (replaced(extra, output.extra), observe(output))


def _forward(params, extra, *, plan: Plan, state: TrainState, batch: Batch, counts=None) -> Output:
    model = model_of(state._replace(params=params, extra=extra), plan, counts=counts)
    documents = documents_of_batch(batch, plan)
    return forward(model, batch.tokens, documents=documents, execution=plan.execution)


def model_of(state: TrainState, plan: Plan, *, counts=None):
    """The model with the state's arrays, for a plan without stages.

    counts: zeros that largest values are counted in, if they are asked for (`step/delayed.py`).
    """
    factors = delayed.factors(state.amax, config=plan.config)
    counts = delayed.zero_counts(plan) if counts is None else counts
    params, frozen = (
        metered(tree, factors=factors, counts=counts) for tree in (state.params, state.frozen)
    )
    return nnx.merge(plan.graphdef, frozen, params, state.extra)


def _apply(gradients, state: TrainState, *, plan: Plan, is_good):
    """New parameters and new optimiser state; the old ones unless is_good."""
    # Where the optimiser's state is split further than the weights (ZeRO-1 and 2), the update runs
    # on the parts and the new weights are gathered.
    params = shd.constrain(state.params, plan.update_shardings)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to an int32 count
        moved = _moved_in_place(
            gradients, state.opt_state, params=params, plan=plan, is_good=is_good
        )
        if moved is None:
            optimizer = optax.with_extra_args_support(plan.optimizer)
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, params, is_good=is_good
            )
            params = _chosen(is_good, optax.apply_updates(params, updates), old=params)
        else:
            params, opt_state = moved
    params = shd.constrain(params, plan.update_shardings)  # chosen before they are gathered
    opt_state = _chosen(is_good, opt_state, old=state.opt_state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.state.params)
    return shd.constrain(params, shardings), opt_state


def _moved_in_place(gradients, opt_state, *, params, plan: Plan, is_good):
    """(parameters, optimiser state), if the optimiser has programs of its own for both, else None.

    They leave both as they were unless is_good, but for what the schedule counts.
    """
    moved = getattr(plan.config.optim, "moved", None)
    if moved is None:
        return None
    return moved(
        gradients,
        opt_state,
        params=params,
        schedule=plan.schedule,
        is_good=is_good,
        shardings=plan.update_shardings,
        platform=plan.execution.platform,
        compute_capability=plan.execution.compute_capability,
    )


def _chosen(is_good, new, *, old):
    def chosen(new, old):
        # Adam's state has been chosen (`optim/adamw.py`, `optim/adamw8bit.py`).
        return new if _is_adam(new) else jnp.where(is_good, new, old)

    return jax.tree.map(chosen, new, old, is_leaf=_is_adam)


def _is_adam(part) -> bool:
    return isinstance(part, optax.ScaleByAdamState | adamw8bit.State)


def _num_applied(state: TrainState):
    """The updates that the learning rate's schedule has counted: those that were not skipped."""

    def is_schedule(part) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    parts = jax.tree.leaves(state.opt_state, is_leaf=is_schedule)
    return next((part.count for part in parts if is_schedule(part)), state.step)
