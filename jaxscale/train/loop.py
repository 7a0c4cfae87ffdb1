"""The story of a run: data, mesh, state, steps, evaluation, checkpoints, a sample."""

import dataclasses
from pathlib import Path

import jax

from jaxscale.config import Config
from jaxscale.train.profile import STEP
from jaxscale.train.run import open_run


@dataclasses.dataclass
class Outcome:
    """How a run ended. step: updates done; losses: held-out nats a token, before and after.

    text: the sample, or None. exit_code: that of a run that was interrupted, else 0.
    """

    step: int
    interrupted: bool
    first_loss: float | None
    last_loss: float | None
    text: str | None
    exit_code: int = 0


def train(config: Config, workdir: str | Path, *, command: str = "the same command") -> Outcome:
    """Trains until config.steps, continuing what `workdir` holds.

    Writes config.json, metrics.jsonl, tensorboard/ and checkpoints/ there. command: what a message
    tells the user to run again. Raises ValueError for a mistake of the user's, before devices are
    touched wherever that is possible; BadStepError; IntegrityError; CheckpointError.
    """
    with open_run(config, Path(workdir), command=command) as run:
        state, first_step = run.restore_or_init()
        first_loss = last_loss = run.first_loss(state)
        step = first_step
        with run.recorder(first_step) as record, run.batches(first_step) as batches:
            run.tell_start(first_step, first_loss, record=record)
            while step < config.steps and not run.stops():
                record.profile_from(step)
                with record.waiting():
                    batch = next(batches)
                with jax.profiler.StepTraceAnnotation(STEP, step_num=step + 1):
                    limits = record.bad_steps.limits(step + 1)
                    state, metrics = run.update(state, batch, **limits)
                step += 1
                record.step(step, metrics, state=state)
                if record.bad_steps.go_back_from is not None:
                    with record.paused("restart"):
                        state, step = run.roll_back(state, record=record, batches=batches)
                    continue
                record.profile_until(step)
                run.do_what_is_due(step, state, batch=batch, record=record)
            is_interrupted = step < config.steps
            with record.paused("evaluation") as progress:
                if step > first_step and not is_interrupted:
                    last_loss = run.evaluate(state, progress)
                    record.evaluation(step, last_loss)
            # After the evaluation: what a checkpoint's step has measured is on record, also if the
            # run is killed here.
            with record.paused("checkpoint"):
                run.finish_saving(step, state, record=record)
            record.tell_end()
        if is_interrupted:
            run.tell_stop(step)
            return Outcome(step, True, first_loss, None, None, run.exit_code())
        run.tell_losses(first_step, step, losses=(first_loss, last_loss))
        text = run.sample(state)
        run.tell_end(step)
        return Outcome(step, False, first_loss, last_loss, text)
