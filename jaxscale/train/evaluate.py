"""The loss of held-out batches."""

import contextlib
import functools
from collections.abc import Callable

import jax

from jaxscale.data.loader import Corpus
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState
from jaxscale.step.update import held_out_loss
from jaxscale.train.recorder import still


def make_evaluate(plan: Plan, corpus: Corpus) -> Callable[[TrainState], float]:
    """A function of the state: the mean loss over the first config.evaluation.batches batches."""
    rows = corpus.eval
    assert rows is not None, "config.validate() refuses an eval_fraction of 0"
    sums_of = jax.jit(
        functools.partial(held_out_loss, plan=plan), compiler_options=plan.numerics_options
    )

    def evaluate(state: TrainState) -> float:
        sums, num_batches = [], plan.config.evaluation.batches
        with (
            still(f"evaluating {num_batches} held-out batches"),
            contextlib.closing(device_batches(plan, rows, start=0)) as batches,
        ):
            for _ in range(num_batches):
                sums.append(sums_of(state, next(batches)))
            loss, tokens = (sum(float(x) for x in column) for column in zip(*sums, strict=True))
        return loss / max(tokens, 1)

    return evaluate
