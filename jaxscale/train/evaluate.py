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
from jaxscale.train.pace import Progress
from jaxscale.train.recorder import still


def make_evaluate(plan: Plan, corpus: Corpus) -> Callable[[TrainState, Progress], float]:
    """`evaluate(state, progress)`: the mean loss of the first config.evaluation.batches batches."""
    rows = corpus.eval
    assert rows is not None, "config.validate() refuses an eval_fraction of 0"
    sums_of = jax.jit(
        functools.partial(held_out_loss, plan=plan), compiler_options=plan.shared_options
    )

    def evaluate(state: TrainState, progress: Progress) -> float:
        sums, num_batches = [], plan.config.evaluation.batches
        with (
            still(f"evaluating {num_batches} held-out batches"),
            contextlib.closing(device_batches(plan, rows, start=0)) as batches,
        ):
            for number in range(1, num_batches + 1):
                progress.reading(number)
                batch = next(batches)
                progress.running(number)
                sums.append(sums_of(state, batch))
                if number > 1:  # the devices have this one to do while the host waits for the last
                    jax.block_until_ready(sums[-2])
                    progress.done()
            jax.block_until_ready(sums[-1])
            progress.done()
            loss, tokens = (sum(float(x) for x in column) for column in zip(*sums, strict=True))
        return loss / max(tokens, 1)

    return evaluate
