"""The records of a run: of its steps, and of what happens between them."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxscale import config as run_config
from jaxscale.config import Config
from jaxscale.metrics.meter import Meter
from jaxscale.metrics.writers import open_writers
from jaxscale.train.profile import Profile

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite."""


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
    ):
        """The clock starts here: the first step's seconds hold what a first execution costs.

        first_step: the step that this process goes on from. facts: go on record with the next.
        """
        self.saved_step, self._held_out = first_step, held_out
        self._first_step, self._facts, self._workdir = first_step, facts, workdir
        self._wait_seconds = 0.0
        self._writers = open_writers(
            workdir,
            num_steps=config.steps,
            resume_step=first_step,
            tensorboard=config.log.tensorboard,
            wandb_project=config.log.wandb_project,
            run_config=run_config.to_json(config),
        )
        self._profile = Profile(config.profile, workdir / "profile", first_step=first_step)
        model, seq_len = config.model, config.seq_len
        self._meter = Meter(
            num_devices=jax.device_count(),
            devices=jax.local_devices(),
            tokens_per_step=config.batch_size * seq_len,
            flops_per_token_full=model.flops_per_token(seq_len, causal=False),
            flops_per_token_causal=model.flops_per_token(seq_len, causal=True),
        )

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception) -> None:
        self._writers.close()
        self._profile.stop()  # of a run that ended early

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a batch."""
        began = time.perf_counter()
        yield
        self._wait_seconds = time.perf_counter() - began

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes what an update returned. Raises NonFiniteError for a step before."""
        self._write(self._meter.record(step, metrics, data_wait_seconds=self._wait_seconds))
        if step == self._first_step + 1:
            # Without another step behind it, whose launches its scalars may have to wait for: this
            # time is what a start costs.
            self._write(self._meter.flush())

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Around what is no part of a step: records what is outstanding, then stops the clock.

        phase: its name in a profile. Raises NonFiniteError before, so that a step that is not
        finite is never evaluated or saved.
        """
        self._write(self._meter.flush())
        with jax.profiler.TraceAnnotation(phase):
            yield
        self._meter.restart()

    def evaluation(self, step: int, loss: float) -> None:
        """Held-out nats a token."""
        self._writers.write({"step": step} | self._held_out.record(loss))

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
        for record in records:
            facts = self._facts if record["step"] == self._first_step + 1 else {}
            self._writers.write(record | facts)
            self._check_finite(record)

    def _check_finite(self, record: dict[str, Any]) -> None:
        bad = [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]
        if not bad:
            return
        saved = "nothing is saved"
        if self.saved_step:
            folder = self._workdir / "checkpoints"
            saved = f"the last checkpoint is of step {self.saved_step} in {folder}"
        raise NonFiniteError(
            f"step {record['step']}: {', '.join(f'{key} is {record[key]}' for key in bad)}. "
            f"The run stopped; {saved}. Look at the data of that step, lower "
            "config.schedule.peak, or set config.dtype='float32' to find out more"
        )
