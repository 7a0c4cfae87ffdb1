"""The records of a run: of its steps, and of what happens between them."""

import collections
import contextlib
import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxscale import config as run_config
from jaxscale import distributed
from jaxscale.config import Config
from jaxscale.metrics.goodput import Goodput, read
from jaxscale.metrics.meter import Meter
from jaxscale.metrics.writers import Writers, open_writers
from jaxscale.step.rounding import Rounded
from jaxscale.step.state import TrainState
from jaxscale.train.bad_steps import FILE as BAD_BATCHES
from jaxscale.train.bad_steps import BadSteps
from jaxscale.train.pace import Pace, Progress
from jaxscale.train.profile import Profile

# What rounding to 8 bits loses, a line a look.
ROUNDING = "rounding.jsonl"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def still(doing: str, *, after_seconds: float = 5.0) -> Iterator[None]:
    """Says now and then, and ever less often, that this goes on."""
    is_done, began = threading.Event(), time.monotonic()

    def tell():
        seconds = after_seconds
        while not is_done.wait(seconds):
            log.info("%s: %.0f s so far", doing, time.monotonic() - began)
            seconds = min(2 * seconds, 60.0)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


class HeldOut:
    """What a held-out loss is told with.

    unigram_entropy: nats a token that knowing token frequencies gives. bytes_per_token: of the
    held-out text, None where its bytes are not known.
    """

    def __init__(self, unigram_entropy: float, *, bytes_per_token: float | None):
        self.unigram_entropy, self._bytes_per_token = unigram_entropy, bytes_per_token

    def record(self, loss: float) -> dict[str, float]:
        """loss: nats a token."""
        record = {"eval_loss": loss}
        if self._bytes_per_token:
            record["eval_bits_per_byte"] = loss / math.log(2) / self._bytes_per_token
        return record | {"unigram_entropy": self.unigram_entropy}

    def describe(self, loss: float) -> str:
        bits = self.record(loss).get("eval_bits_per_byte")
        return f"{loss:.4f} nats/token" + (f", {bits:.4f} bits/byte" if bits is not None else "")


class Recorder:
    """Measures steps and writes their records, one step late, so that the devices never wait.

    saved_step: the newest that is saved, which a message about a failure names.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        *,
        first_step: int,
        facts: dict[str, float],
        held_out: HeldOut,
        bad_steps: BadSteps,
        goodput: Goodput,
        locate: Callable[[int, TrainState], str | None] = lambda step, state: None,
    ):
        """The clock starts here: the first step's seconds hold what a first execution costs.

        first_step: the step that this process goes on from. facts: go on record with the next.
        locate: of a bad step and a state since, where values stop being finite.
        """
        self.saved_step, self._held_out = first_step, held_out
        self._first_step, self._facts, self._workdir = first_step, facts, workdir
        self._config, self.bad_steps, self._goodput = config, bad_steps, goodput
        self._locate = locate
        self._state: Any = None  # the newest
        # Of steps that have ended, and are not written yet.
        self._unwritten: collections.deque[dict[str, Any]] = collections.deque()
        self._wait_seconds, self._seconds_since_save = 0.0, 0.0
        self._step, self._pace = first_step, Pace(config.watchdog)
        if before := read(workdir / "metrics.jsonl", step=first_step):
            goodput.go_on_from(before)
        self._writers = self._open_writers(first_step)
        self._profile = Profile(config.profile, workdir / "profile", first_step=first_step)
        model, seq_len = config.model, config.seq_len
        self._meter = Meter(
            num_devices=jax.device_count(),
            devices=jax.local_devices(),
            tokens_per_step=config.batch_size * seq_len,
            flops_per_token_full=model.flops_per_token(seq_len, causal=False),
            flops_per_token_causal=model.flops_per_token(seq_len, causal=True),
        )

    def _open_writers(self, step: int) -> Writers:
        config = self._config
        return open_writers(
            self._workdir,
            num_steps=config.steps,
            resume_step=step,
            tensorboard=config.log.tensorboard,
            wandb_project=config.log.wandb_project,
            run_config=run_config.to_json(config),
        )

    def __enter__(self) -> "Recorder":
        self._goodput.begin_steps()
        self._meter.restart()
        self._pace.tell(self._step, "step")
        return self

    def __exit__(self, *exception) -> None:
        self._pace.tell(self._step, "closing")
        self._writers.close()
        self._profile.stop()  # of a run that ended early

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a batch."""
        began = time.perf_counter()
        self._pace.tell(self._step, "data")
        yield
        self._pace.tell(self._step, "step")
        self._wait_seconds = time.perf_counter() - began

    def step(self, step: int, metrics: dict[str, jax.Array], *, state: TrainState) -> None:
        """Takes what an update returned. Raises BadStepError for a step before."""
        self._state = state
        self._write(self._meter.record(step, metrics, data_wait_seconds=self._wait_seconds))
        if step == self._first_step + 1:
            # Without another step behind it, whose launches its scalars may have to wait for: this
            # time is what a start costs.
            self._write(self._meter.flush())
        self._step = step
        self._pace.tell(step, "step")

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[Progress]:
        """Around what is no part of a step: records what is outstanding, then stops the clock.

        phase: its name in a profile, and what its time counts as. Yields what an evaluation tells
        its progress. Raises BadStepError before.
        """
        self._write(self._meter.flush())
        self._pace.tell(self._step, phase)
        with jax.profiler.TraceAnnotation(phase), self._goodput.phase(phase):
            yield Progress(self._pace, step=self._step)
        self._pace.tell(self._step, "step")
        self._meter.restart()

    def evaluation(self, step: int, loss: float) -> None:
        """Held-out nats a token."""
        self._writers.write({"step": step} | self._held_out.record(loss))

    def rounding(self, step: int, rounded: dict[str, Rounded]) -> None:
        """What the lead's devices lose by rounding to 8 bits, by weight and operand."""
        if not distributed.is_lead() or not rounded:
            return
        worst = max(rounded, key=lambda what: rounded[what].lost)
        log.info("rounding to 8 bits: %.3g%% of %s become 0", 100 * rounded[worst].lost, worst)
        line = {"step": step} | {what: dataclasses.asdict(of) for what, of in rounded.items()}
        path = self._workdir / ROUNDING
        try:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("%s cannot be written: %s", path, error.strerror)

    def saving(self, step: int) -> None:
        """What the run has cost so far goes on record with what is saved."""
        self._writers.write({"step": step} | self._goodput.record())
        self._seconds_since_save = 0.0

    def saved(self, step: int, *, stall_seconds: float) -> None:
        """The steps waited so long for the start of this save."""
        self.saved_step = step
        self._writers.write({"step": step, "checkpoint_stall_seconds": stall_seconds})

    def rolled_back(self, step: int, losses: list[tuple[int, float]]) -> None:
        """The run goes on from this step; later records are dropped, as after a restart."""
        self._writers.close()
        self._writers = self._open_writers(step)
        self._goodput.lose_steps(self._seconds_since_save)
        self._seconds_since_save = 0.0
        self.saved_step = self._step = step
        self.bad_steps.reset(losses)

    def tell_end(self) -> None:
        """How much of the time was steps, and how many of them were skipped."""
        if num := self.bad_steps.num_skipped:
            log.warning("%d updates were skipped; %s has their batches", num, BAD_BATCHES)
        if num := self.bad_steps.num_overflows:
            log.info("%d updates were skipped for a loss scale that was too large", num)
        log.info(self._goodput.describe())

    def profile_from(self, step: int) -> None:
        """Starts the profile if it begins after this step."""
        if self._profile.starts_after(step):
            with self.paused("profile"):
                self._profile.start()

    def profile_until(self, step: int) -> None:
        """Writes the profile if it ends with this step."""
        if self._profile.stops_after(step):
            with self.paused("profile"):
                self._profile.stop()

    def _write(self, records: list[dict[str, Any]]) -> None:
        self._unwritten.extend(records)
        while self._unwritten:
            record = self._unwritten.popleft()
            facts = self._facts if record["step"] == self._first_step + 1 else {}
            self._writers.write(record | facts)
            self._goodput.add_step(record)
            self._pace.took("step", record["step_seconds"])
            self._seconds_since_save += record["step_seconds"]
            self.bad_steps.take(record, saved=self.describe_saved(), locate=self._place_of)

    def _place_of(self, step: int) -> str | None:
        """Where the values of this step stop being finite; its batch is run again."""
        self._unwritten.extend(self._meter.flush())
        self._pace.tell(self._step, "other")
        with jax.profiler.TraceAnnotation("locate"), self._goodput.phase("other"):
            place = self._locate(step, self._state)
        self._pace.tell(self._step, "step")
        self._meter.restart()
        return place

    def describe_saved(self) -> str:
        """For messages about what ends a run."""
        if not self.saved_step:
            return "nothing is saved"
        folder = self._workdir / "checkpoints"
        return f"the last checkpoint is of step {self.saved_step} in {folder}"
