"""Runs a batch once more beside a run's state, to look at it, where there is memory."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxscale import distributed
from jaxscale import sharding as shd
from jaxscale.compile.fit import USABLE, pool_of, predicted_memory_gib
from jaxscale.config import Remat
from jaxscale.data.batch import Batch
from jaxscale.data.rows import TokenRows
from jaxscale.step.device_sums import num_bytes_read
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import Plan
from jaxscale.step.stages import without_stages
from jaxscale.step.state import TrainState
from jaxscale.train.recorder import still

log = logging.getLogger(__name__)


class Beside:
    """A program that changes nothing, of a state without its optimiser's and a batch.

    It is compiled when it is first run, and given up for good where it does not fit or fails: the
    run goes on without it.
    """

    def __init__(
        self,
        plan: Plan,
        rows: TokenRows,
        *,
        program: Callable[[Plan], jax.stages.Wrapped],
        doing: str,
    ):
        """rows: those that the run's batches are of. program: for a plan without stages.

        doing: what it does, for messages.
        """
        self._plan, self._rows, self._program, self._doing = plan, rows, program, doing
        self._compiled: Callable | None = None
        self._can = True

    def first(
        self,
        state: TrainState,
        *,
        number: int,
        read: Callable[[Any], str | None] = lambda result: None,
    ) -> str | None:
        """What `read` makes of the run's batch of this number; None where it was given up.

        It is run at once, or with stages a few rows at a time, until `read` has something: their
        layers are run one after the other on every device. Every process calls it, and reads the
        same.
        """
        if not self._can:
            return None
        try:
            with still(self._doing):
                return self._first(state, number, read=read)
        except jax.errors.JaxRuntimeError as error:
            # Whatever is wrong besides, the next step meets too.
            self._give_up(str(error).splitlines()[0])
            return None

    def _first(self, state: TrainState, number: int, *, read: Callable) -> str | None:
        here, plan = state._replace(opt_state=()), self._plan
        if plan.pipeline is not None:
            here, plan = without_stages(state, plan)
        with shd.use(plan.mesh, plan.rules):
            for batch in self._batches(number, plan):
                if self._compiled is None:
                    compiled = self._program(lean(plan)).lower(here, batch).compile()
                    if not self._fits(compiled, here, whole=state):
                        return None
                    self._compiled = compiled
                if found := read(jax.block_until_ready(self._compiled(here, batch))):
                    return found
        return None

    def _batches(self, number: int, plan: Plan) -> Iterator[Batch]:
        """Those of the plan, which may be smaller, that have the rows of this batch of the run."""
        size, here = self._plan.config.batch_size, plan.config.batch_size
        start, end = number * size // here, -(-(number + 1) * size // here)
        with contextlib.closing(device_batches(plan, self._rows, start=start)) as batches:
            for _ in range(start, end):
                yield next(batches)

    def _fits(self, compiled: jax.stages.Compiled, state: TrainState, *, whole: TrainState) -> bool:
        """Beside what else there is of the whole state."""
        here = {id(leaf) for leaf in jax.tree.leaves(state)}
        besides = [leaf for leaf in jax.tree.leaves(whole) if id(leaf) not in here]
        gib = predicted_memory_gib(compiled) + num_bytes_read(besides) / 2**30
        (needed_gib,), usable_gib = distributed.largest([gib]), USABLE * pool_of(self._plan)
        if needed_gib > usable_gib:
            self._give_up(f"it takes {needed_gib:.1f} GiB of {usable_gib:.1f}")
        return self._can

    def _give_up(self, why: str) -> None:
        self._can = False
        log.warning("%s is left out from here on: %s", self._doing, why)


def lean(plan: Plan) -> Plan:
    """Takes the least memory there is, and is compiled soon: all is recomputed, in a loop."""
    execution = dataclasses.replace(
        plan.execution, remat=Remat.FULL, leaner_layers=0, keep_gathered=False, scan_unroll=1
    )
    return dataclasses.replace(plan, execution=execution)
