"""A step's forward and backward pass, twice from the same state: the same bits, or a device is bad.

On GPUs usual kernels add in any order; these programs are compiled without them (`xla/options.py`).

B rows, S sequence, D model.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxscale import sharding as shd
from jaxscale.data.batch import Batch
from jaxscale.models.decoder import RESIDUAL, Output
from jaxscale.step import layout, stages
from jaxscale.step.device_sums import device_sums, of_every_device
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, to_flat
from jaxscale.step.update import count_tokens, loss_and_gradients
from jaxscale.xla import options

# What is compared, in the order in which it is computed.
OUTPUT, LOSS = "the hidden states", "the loss"


@dataclasses.dataclass(frozen=True)
class Unlike:
    """The first thing in which two replays differ.

    places: of the devices that differ from themselves, in `mesh.devices.flat`. num_others: how many
    things differ besides.
    """

    what: str
    places: tuple[int, ...]
    num_others: int


class Replay:
    """Replays steps of a plan. The state stays as it is, and no second one is made.

    It costs two forward and backward passes, and has the memory of one besides the state.
    """

    def __init__(self, plan: Plan):
        execution = dataclasses.replace(plan.execution, deterministic=True)
        self._plan = plan = dataclasses.replace(plan, execution=execution)
        self._names = replayed(plan)
        platform = plan.mesh.devices.flat[0].platform
        self.sums = jax.jit(
            lambda state, batch: replay_sums(state, batch, plan=plan),
            compiler_options=options.replay_options(
                plan.compiler_options, plan.config, platform=platform
            ),
        )

    def unlike(self, state: TrainState, batch: Batch) -> Unlike | None:
        """None if they are alike, bit for bit; the same on every process, and each calls it."""
        first, second = (
            of_every_device(self.sums(state, batch), self._plan.mesh) for _ in range(2)
        )
        return compare(first, second, names=self._names)


def compare(first: np.ndarray, second: np.ndarray, *, names: list[str]) -> Unlike | None:
    """first, second: uint32 [devices, names, words].

    What differs first was computed by the devices that are named; a collective spreads it to
    others, in what follows.
    """
    differs = (first != second).any(axis=2)
    found = [number for number in range(len(names)) if differs[:, number].any()]
    if not found:
        return None
    places = np.flatnonzero(differs[:, found[0]]).tolist()
    return Unlike(names[found[0]], tuple(places), len(found) - 1)


def replayed(plan: Plan) -> list[str]:
    """What the rows of `replay_sums` are of."""
    gradients = [f"the gradient of {name}" for name in to_flat(plan.state.params)]
    # A stage has hidden states of other microbatches in every tick.
    return [OUTPUT] * (plan.pipeline is None) + [LOSS, *gradients]


def replay_sums(state: TrainState, batch: Batch, *, plan: Plan):
    """uint32 [devices, things, words]: of `replayed`, on each device, of its own part.

    The gradients are those of an update before its optimiser.
    """
    num_tokens = count_tokens(batch)
    if plan.pipeline is not None:
        _, loss, gradients = stages.loss_and_gradients(
            state, batch, plan=plan, num_tokens=num_tokens
        )
        seen = []
    else:
        _, loss, gradients, of_outputs = loss_and_gradients(
            state,
            batch,
            plan=plan,
            num_tokens=num_tokens,
            observe=functools.partial(_sums_of_output, plan=plan),
        )
        seen = [of_outputs.sum(axis=0, dtype=jnp.uint32)]
    # As in the update, whose memory this is to have: 1 GiB less for 8B on HSDP.
    loss = jax.lax.optimization_barrier(loss)
    gradients = list(to_flat(layout.summed(gradients, plan)).values())
    specs = [leaf.spec for leaf in to_flat(plan.update_shardings).values()]
    sums = device_sums([loss, *gradients], [PartitionSpec(), *specs], mesh=plan.mesh)
    return jnp.concatenate([*seen, sums], axis=1)


def _sums_of_output(output: Output, *, plan: Plan):
    x_BSD = shd.constrain(jax.lax.stop_gradient(output.x_BSD), RESIDUAL)
    return device_sums([x_BSD], [plan.rules.spec(RESIDUAL)], mesh=plan.mesh)
