"""What the rounding to 8 bits loses of a batch: values that become 0, and the scales."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from jaxscale.data.batch import Batch
from jaxscale.ops.fp8 import EXPONENTS
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState
from jaxscale.step.update import count_tokens, loss_and_gradients


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Of an operand of all layers' products of a name, on the devices of this process.

    lost: the share of the values other than 0 that become 0; full: the share that becomes the most
    there is. scales: how many scales are 2 to which power.
    """

    lost: float
    full: float
    scales: dict[int, int]


class Rounding:
    """Looks on while programs of it run."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = collections.defaultdict(list)

    def program(self, plan: Plan) -> jax.stages.Wrapped:
        """(state, batch) -> nothing of use; a forward and a backward pass, without stages."""
        assert plan.execution.fp8 is not None
        fp8 = dataclasses.replace(plan.execution.fp8, observe=self._note)
        execution = dataclasses.replace(plan.execution, fp8=fp8)
        plan = dataclasses.replace(plan, execution=execution)
        return jax.jit(
            functools.partial(_gradient_norm, plan=plan), compiler_options=plan.shared_options
        )

    def taken(self) -> dict[str, Rounded]:
        """What was seen since the last time.

        By weight and operand ("qkv.x", "qkv.weight", "qkv.gradient").
        """
        jax.effects_barrier()
        seen, self._seen = self._seen, collections.defaultdict(list)
        return {what: _summary(seen[what]) for what in sorted(seen)}

    def _note(self, what: str, numbers: Any, *, scales: Any) -> None:
        self._seen[what].append((np.asarray(numbers), np.asarray(scales)))


def _gradient_norm(state: TrainState, batch: Batch, *, plan: Plan):
    """float32; nobody reads it, but it needs every product."""
    num_tokens = count_tokens(batch)
    _, _, gradients, _ = loss_and_gradients(state, batch, plan=plan, num_tokens=num_tokens)
    return optax.tree.norm(gradients)


def _summary(seen: list[tuple[np.ndarray, np.ndarray]]) -> Rounded:
    numbers, counts = (np.stack(column) for column in zip(*seen, strict=True))
    there, lost, full = numbers.sum(axis=0, dtype=np.float64).tolist()
    scales = dict(zip(EXPONENTS, counts.sum(axis=0, dtype=np.int64).tolist(), strict=True))
    scales = {power: count for power, count in scales.items() if count}
    return Rounded(lost / max(there, 1.0), full / max(there, 1.0), scales)
