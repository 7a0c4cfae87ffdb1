"""What a run needs, opened in the order in which it can be refused, and closed at its end."""

import contextlib
import dataclasses
import functools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxscale import config as run_config
from jaxscale import distributed
from jaxscale import sharding as shd
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.checkpoint.pinned import Pinning, pin_ahead
from jaxscale.checkpoint.stored import CheckpointError
from jaxscale.checkpoint.tiers import TieredCheckpointer, open_checkpoints
from jaxscale.command_line import with_setting
from jaxscale.compile.fit import CompiledUpdate, compile_to_fit
from jaxscale.config import Config
from jaxscale.data.batch import Batch
from jaxscale.data.loader import Corpus
from jaxscale.metrics.goodput import Goodput
from jaxscale.metrics.writers import last_step
from jaxscale.models.model_folder import ModelFolder
from jaxscale.step import delayed, loss_scale, nonfinite
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import Plan, corpus_of_run, plan_of_run
from jaxscale.step.pretrained import open_pretrained, with_pretrained
from jaxscale.step.relayout import LEAD, Relayout, saved_lead
from jaxscale.step.remarks import remarks
from jaxscale.step.rounding import Rounded, Rounding
from jaxscale.step.state import TrainState, from_flat, init_state, to_flat
from jaxscale.step.update import update
from jaxscale.train import preflight
from jaxscale.train.bad_steps import BadStepError, BadSteps
from jaxscale.train.beside import Beside
from jaxscale.train.evaluate import make_evaluate
from jaxscale.train.integrity import Integrity
from jaxscale.train.pace import Progress
from jaxscale.train.recorder import HeldOut, Recorder, still
from jaxscale.train.sample import sample_text
from jaxscale.train.stop import Interrupts, interrupts, raising_later
from jaxscale.train.timer import Timer
from jaxscale.train.workdir import (
    check_same_run,
    check_workdir,
    keep_companions,
    only_run,
    tell_changes,
    write_config,
)
from jaxscale.xla import environment, options
from jaxscale.xla.cache import enable_compilation_cache

# Of a checkpoint's metadata: the batches left out so far, and the losses that a spike is told by.
LEFT_OUT, LOSSES = "batches_left_out", "losses"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(config: Config, workdir: Path, *, command: str) -> Iterator["Run"]:
    """Yields the run, with its mesh and rules in use and its update compiled.

    Raises ValueError for a mistake of the user's: before devices are touched wherever that is
    possible, and before there is a state where the update cannot fit.
    """
    goodput = Goodput()
    run_config.validate(config)
    check_workdir(workdir, config)
    corpus = corpus_of_run(config)
    # The first agreement: processes that differ would wait for each other in later ones.
    preflight.check(config, workdir, data=corpus.description)
    # Asking who leads touches the devices, so a process that is alone is not asked.
    leads = not jax.distributed.is_initialized() or distributed.is_lead()
    with contextlib.ExitStack() as stack:
        if leads:
            stack.enter_context(only_run(workdir))
        with raising_later():
            devices = distributed.describe()
        log.info(devices)
        log.info(corpus.source)
        checkpoints = open_checkpoints(config.checkpoint, workdir / "checkpoints")
        stack.enter_context(checkpoints)
        latest = _check_latest(config, workdir, checkpoints=checkpoints, corpus=corpus)
        pretrained = open_pretrained(config) if latest is None else None
        enable_compilation_cache()
        plan = plan_of_run(config, corpus=corpus)
        corpus.check_in_background(part=jax.process_index(), parts=jax.process_count())
        log.info(describe(plan, corpus))
        hosts = distributed.every_process_says(socket.gethostname())
        for remark in remarks(plan, host_of=lambda device: hosts[device.process_index]):
            log.warning(remark)
        platform = plan.mesh.devices.flat[0].platform
        if settings := options.describe(plan.compiler_options, config, platform=platform):
            log.info(settings)
        with shd.use(plan.mesh, plan.rules), interrupts() as interrupted:
            stops = distributed.any_process(interrupted)
            run = Run(
                config,
                plan,
                corpus,
                checkpoints,
                workdir,
                command,
                stops,
                interrupted,
                goodput,
                hosts,
                pretrained,
            )
            if latest is not None:
                saved = checkpoints.metadata(latest)["config"]
                tell_changes(config, saved=saved, step=latest)
            if (latest or 0) < config.steps:
                run.pinning = stack.enter_context(run.pin_host_memory())
                run.compile()
            if leads:
                write_config(workdir, config, saved_step=latest)
                if pretrained is not None:
                    keep_companions(workdir, pretrained.companions())
            with distributed.closing_is_bounded():
                yield run


def _check_latest(config: Config, workdir: Path, *, checkpoints, corpus: Corpus) -> int | None:
    """The newest step that is saved. Raises ValueError if it is not of this run."""
    latest = checkpoints.latest_step()
    if latest is None:
        return None
    saved = checkpoints.metadata(latest)
    corpus.check_same(saved["data"])
    check_same_run(workdir, config, saved=saved["config"])
    if not config.checkpoint.enabled:
        raise ValueError(
            f"config.checkpoint.enabled=False, and --workdir={workdir} holds step {latest}: choose "
            f"another --workdir, or leave checkpoints on to continue"
        )
    return latest


@dataclasses.dataclass
class Run:
    """The parts of a run, and what the loop asks of them.

    config: as the user wrote it; the plan's has what the data adds. stops: whether any process was
    told to stop. interrupted: whether this one was, and how. hosts: of each process. pretrained:
    the first weights, if config.init_from names some.
    """

    config: Config
    plan: Plan
    corpus: Corpus
    checkpoints: Checkpointer | TieredCheckpointer
    workdir: Path
    command: str
    stops: Callable[[], bool]
    interrupted: Interrupts
    goodput: Goodput
    hosts: list[str]
    pretrained: ModelFolder | None = None
    # Batches that the run went back over, and leaves out.
    num_left_out: int = 0
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    restore_seconds: float = 0.0
    pinning: Pinning = dataclasses.field(default_factory=Pinning)

    @functools.cached_property
    def update(self) -> CompiledUpdate:
        """`step.update.update`, compiled. Raises ValueError if it does not fit the memory."""
        return compile_to_fit(update, self.plan)

    def compile(self) -> None:
        """Compiles the update now: what cannot fit is refused while nothing is allocated."""
        with still("compiling the update"), self.goodput.phase("compile"):
            _ = self.update

    def pin_host_memory(self) -> Pinning:
        """Begins to pin what saves pass through; `restore_or_init` waits for it."""
        if not self.config.checkpoint.enabled:
            return Pinning()
        return pin_ahead(
            to_flat(self.plan.state),
            host_memory_gib=environment.host_memory_gib(),
            num_processes=self.hosts.count(self.hosts[jax.process_index()]),
        )

    @functools.cached_property
    def integrity(self) -> Integrity:
        return Integrity(self.update.plan, hosts=self.hosts, command=self.command)

    @functools.cached_property
    def rounding(self) -> Callable[[TrainState, int], dict[str, Rounded]]:
        """What rounding to 8 bits loses of a batch, by its number; nothing if it does not fit."""
        seen = Rounding()
        beside = self._beside(seen.program, "looking at what rounding to 8 bits loses")

        def look(state: TrainState, number: int) -> dict[str, Rounded]:
            beside.first(state, number=number)
            return seen.taken()

        return look

    @functools.cached_property
    def place(self) -> Callable[[TrainState, int], str | None]:
        """Where the values of a batch stop being finite; None if they do not, or it does not fit.

        The state is of an update or two behind that batch: what makes a step bad is seldom gone by
        then, and never while all steps since were bad, as those change nothing.
        """
        beside = self._beside(nonfinite.program, "looking for where values stop being finite")

        return lambda state, number: beside.first(state, number=number, read=nonfinite.first_place)

    def _beside(self, program: Callable, doing: str) -> Beside:
        return Beside(self.plan, self.corpus.train, program=program, doing=doing)

    @functools.cached_property
    def evaluate(self) -> Callable[[TrainState, Progress], float]:
        """The mean loss over the first config.evaluation.batches held-out batches."""
        return make_evaluate(self.plan, self.corpus)

    def first_loss(self, state: TrainState) -> float:
        """The held-out loss that the run begins with."""
        with self.goodput.phase("evaluation"):
            return self.evaluate(state, Progress())

    def restore_or_init(self) -> tuple[TrainState, int]:
        """The newest sound state and its step, else the first."""
        # Kernels cannot be launched meanwhile: a step would be taken to hang.
        with still("pinning host memory for checkpoints"):
            self.pinning.wait()
        began = time.perf_counter()
        with self.goodput.phase("restore"):
            restored = self._restore()
            if restored is not None:
                self.restore_seconds = time.perf_counter() - began
                self._tell_restored(restored[1])
                return restored
        state = init_state(self.plan)
        if self.pretrained:
            state = with_pretrained(state, self.pretrained, plan=self.plan)
        return state, 0

    def _restore(self, *, before: int | None = None) -> tuple[TrainState, int] | None:
        """The newest sound state, of a step before that one, and what else its run knew."""
        plan, wanted = self.plan, to_flat(self.plan.state)

        def relayout(metadata: dict) -> Relayout:
            saved = saved_lead(metadata, self.config)
            return Relayout(saved, plan.lead, num_layers=self.config.model.num_layers)

        def asked(leaves: dict, metadata: dict):
            there = delayed.for_checkpoint(loss_scale.for_checkpoint(wanted, leaves), leaves)
            return relayout(metadata).as_saved(there, leaves)

        restored = self.checkpoints.restore(asked, before=before)
        if restored is None:
            return None
        step, flat, metadata = restored
        self.num_left_out = metadata.get(LEFT_OUT, 0)
        self.losses = metadata.get(LOSSES, [])
        flat = loss_scale.of_checkpoint(flat, wanted, config=self.config)
        flat = delayed.of_checkpoint(relayout(metadata).as_wanted(flat, wanted), wanted)
        return from_flat(plan.state, flat), step

    def roll_back(
        self, state: TrainState, *, record: Recorder, batches: "Batches"
    ) -> tuple[TrainState, int]:
        """The state before the steps that were skipped, and its step; their batches are left out.

        The state that is given is deleted first: two do not fit. Raises CheckpointError if there is
        no checkpoint from before.
        """
        bad, left_out = record.bad_steps, self.num_left_out
        last, first = bad.go_back_from, bad.first_of_streak
        assert last is not None
        jax.tree.map(lambda leaf: leaf.delete(), state)
        restored = self._restore(before=first)
        if restored is None:
            raise BadStepError(
                f"steps {first} to {last} were skipped, and there is no checkpoint from before to "
                "go back to; set config.checkpoint.every lower, or config.bad_steps.roll_back=0"
            )
        state, step = restored
        # Beyond what that checkpoint left out: what was left out since, and what is to be now.
        self.num_left_out = left_out + last - step
        bad.num_roll_backs += 1
        log.warning(
            "steps %d to %d were skipped: going back to step %d, and leaving out the batches since",
            first,
            last,
            step,
        )
        record.rolled_back(step, self.losses)
        self.integrity.compared_step = -1
        batches.go_to(self.batch_of(step + 1))
        return state, step

    def batch_of(self, step: int) -> int:
        """The number of the batch that the update of this step reads."""
        return step - 1 + self.num_left_out

    def recorder(self, first_step: int) -> Recorder:
        """The update's facts go on record with the first step."""
        if first_step < self.config.steps:
            self.compile()  # the newest checkpoint may be damaged, and an earlier one was taken
            facts = self.update.facts()
        else:
            facts = {}
        if self.restore_seconds:
            facts["restore_seconds"] = self.restore_seconds
        return Recorder(
            self.config,
            self.workdir,
            first_step=first_step,
            facts=facts,
            held_out=self._held_out,
            bad_steps=BadSteps(
                self.config,
                self.workdir,
                rows=self.corpus.train,
                batch_of=self.batch_of,
                losses=self.losses,
            ),
            goodput=self.goodput,
            locate=lambda step, state: self.place(state, self.batch_of(step)),
        )

    def batches(self, step: int) -> contextlib.closing["Batches"]:
        """The training batches behind this step, on the devices."""
        return contextlib.closing(Batches(self, self.batch_of(step + 1)))

    def do_what_is_due(
        self, step: int, state: TrainState, *, batch: Batch, record: Recorder
    ) -> None:
        """The checks, the evaluation and the checkpoint of a step; the clock stands meanwhile.

        batch: any will do; a replay reads it. Raises IntegrityError, on every process.
        """
        if self.is_check_due(step):
            with record.paused("integrity"):
                self.check(step, state, batch=batch, record=record)
        if self.is_due(self.config.precision.statistics_every, step):
            with record.paused("other"):
                record.rounding(step, self.rounding(state, self.batch_of(step)))
        if self.is_due(self.config.evaluation.every, step):
            with record.paused("evaluation") as progress:
                record.evaluation(step, self.evaluate(state, progress))
        if self.is_save_due(step):
            with record.paused("checkpoint"):
                self.save(step, state, record=record)

    def is_due(self, every: int, step: int) -> bool:
        """True every so many steps (0: never), but not at the last, which has its own."""
        return every > 0 and step % every == 0 and step < self.config.steps

    def is_check_due(self, step: int) -> bool:
        """As config.integrity has it."""
        settings = self.config.integrity
        return self.is_due(settings.replicas_every, step) or self.is_due(
            settings.replay_every, step
        )

    def check(self, step: int, state: TrainState, *, batch: Batch, record: Recorder) -> None:
        """What is due of config.integrity. Raises IntegrityError, on every process.

        batch: any will do; a replay reads it.
        """
        saved = record.describe_saved()
        if self.is_due(self.config.integrity.replay_every, step):
            self.integrity.replay(step, state, batch=batch, saved=saved)
        if self.is_due(self.config.integrity.replicas_every, step):
            self.integrity.compare_replicas(step, state, saved=saved)

    def is_save_due(self, step: int) -> bool:
        """As config.checkpoint.every and every_minutes have it; all processes call it alike."""
        minutes = self.config.checkpoint.every_minutes
        is_time = minutes > 0 and self._timer.is_up()
        return self.is_due(self.config.checkpoint.every, step) or (
            is_time and step < self.config.steps
        )

    @functools.cached_property
    def _timer(self) -> Timer:
        return Timer(60 * self.config.checkpoint.every_minutes)

    def save(self, step: int, state: TrainState, *, record: Recorder) -> None:
        """Starts saving; nothing with config.checkpoint.enabled=False.

        A save that fails on any process is told, and training goes on: the next one is tried. Not
        at the end (`finish_saving`).
        """
        try:
            self._start_saving(step, state, record=record)
        except CheckpointError as error:
            # As the lead sees the folder: what is saved at the end depends on it.
            latest = self.checkpoints.latest_step() or 0
            (record.saved_step,) = distributed.lead_says([latest])
            if distributed.is_lead():
                log.error("%s. Training goes on; the last checkpoint is of step %d", error, latest)
            if error.step != step:  # the save before; this one has not begun
                self.save(step, state, record=record)

    def finish_saving(self, step: int, state: TrainState, *, record: Recorder) -> None:
        """Saves the last step, if it is not, and waits. Raises CheckpointError if that failed."""
        if step > record.saved_step:
            try:
                self.checkpoints.wait()
            except CheckpointError as error:  # of the save before
                if distributed.is_lead():
                    log.error("%s", error)
            self._start_saving(step, state, record=record)
        self.checkpoints.wait()

    def _start_saving(self, step: int, state: TrainState, *, record: Recorder) -> None:
        if not self.config.checkpoint.enabled:
            return
        if self.config.integrity.replicas_every:
            self.integrity.compare_replicas(step, state, saved=record.describe_saved())
        record.saving(step)
        began = time.perf_counter()
        metadata = metadata_of(self.config, self.corpus, plan=self.plan)
        metadata |= {LEFT_OUT: self.num_left_out, LOSSES: record.bad_steps.losses}
        self.checkpoints.save(step, to_flat(state), metadata=metadata)
        record.saved(step, stall_seconds=time.perf_counter() - began)

    def sample(self, state: TrainState) -> str | None:
        """Text from the model; None without a tokenizer, or with config.sample.tokens=0."""
        if not self.config.sample.tokens or self.corpus.tokenizer is None:
            return None
        with still("sampling"):
            text = sample_text(self.plan, state, tokenizer=self.corpus.tokenizer)
        log.info("sample (temperature %g):\n%s", self.config.sample.temperature, text)
        return text

    def exit_code(self) -> int:
        """Of a run that was stopped: the same on each process, though one alone was told."""
        return int(distributed.largest([self.interrupted.code])[0])

    # What it tells.

    def _tell_restored(self, step: int) -> None:
        lost = last_step(self.workdir / "metrics.jsonl") - step
        again, every = "", self.config.checkpoint.every
        if lost > 0:
            again = f"; {lost} steps behind it were lost with the process, and are done again"
        if 0 < every < lost:
            again += (
                f", more than config.checkpoint.every={every}: a save was in flight, failed or "
                "damaged; lower it, or set config.checkpoint.local"
            )
        log.info("continuing from the checkpoint of step %d%s", step, again)

    def tell_start(self, step: int, loss: float, *, record: Recorder) -> None:
        """The held-out loss beside the unigram entropy; that of step 0 goes on record."""
        held_out = self._held_out
        log.info(
            f"held-out loss at step {step}: {held_out.describe(loss)} "
            f"(unigram entropy {held_out.unigram_entropy:.4f})"
        )
        if step == 0:
            record.evaluation(step, loss)
        if step >= self.config.steps:
            log.info(
                "nothing to train: step %d is done, and config.steps=%d", step, self.config.steps
            )

    @functools.cached_property
    def _held_out(self) -> HeldOut:
        return HeldOut(self.corpus.unigram_entropy(), bytes_per_token=self.corpus.bytes_per_token())

    def tell_losses(self, first_step: int, step: int, *, losses: tuple[float, float]) -> None:
        """The held-out loss before and after."""
        before, after = map(self._held_out.describe, losses)
        log.info(
            f"held-out loss: {before} before (step {first_step}); {after} after (step {step}); "
            f"unigram entropy {self._held_out.unigram_entropy:.4f}"
        )

    def tell_stop(self, step: int) -> None:
        """Where it stopped, once that is saved, and how to go on."""
        self.checkpoints.wait()
        if not self.config.checkpoint.enabled:
            fate = "not saved (config.checkpoint.enabled=False); start again with"
        else:
            fate = "and saved; continue with" if step else "before the first; start again with"
        log.info("stopped at step %d of %d %s: %s", step, self.config.steps, fate, self.command)

    def tell_end(self, step: int) -> None:
        """Where everything is, once all is saved, and how to train on."""
        self.checkpoints.wait()
        config = self.config
        files = ["config.json", "metrics.jsonl"]
        files += ["checkpoints/"] * config.checkpoint.enabled
        files += ["tensorboard/"] * config.log.tensorboard
        total = "" if step > config.steps else f" of {config.steps}"
        text = f"done: step {step}{total}. In {self.workdir}: {', '.join(files)}"
        if config.checkpoint.enabled:
            command = with_setting(self.command, "steps", value=2 * step)
            text += f"\ntrain on with: {command}"
        log.info(text)


class Batches:
    """An iterator over the training batches, on the devices, that can be sent elsewhere."""

    def __init__(self, run: Run, start: int):
        self._run = run
        self._batches = device_batches(run.plan, run.corpus.train, start=start)

    def go_to(self, start: int) -> None:
        """Batch `start` is the next."""
        self._batches.close()
        self._batches = device_batches(self._run.plan, self._run.corpus.train, start=start)

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


def metadata_of(config: Config, corpus: Corpus, *, plan: Plan) -> dict[str, Any]:
    """What a checkpoint says beside its arrays.

    The position in the data is the step itself, and the batches that were left out: batch n is a
    function of (seed, n).
    """
    return {
        "config": run_config.to_json(config),
        "data": corpus.description,
        "jax": jax.__version__,
        LEAD: plan.lead,
    }


def describe(plan: Plan, corpus: Corpus) -> str:
    """The run in a few lines: model, data, mesh, memory of the state."""
    config, data = plan.config, corpus.description
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
    splits_state = plan.mesh.shape["fsdp"] * plan.mesh.shape["context"] > 1
    zero = f", ZeRO-{config.mesh.zero}" if splits_state else ""
    is_split = plan.mesh.shape["context"] > 1
    exchange = f", context by {plan.execution.exchange}" if is_split else ""
    table = shd.explain(plan.state.params, mesh=plan.mesh, rules=plan.rules)
    if plan.pipeline is not None:
        table = f"pipeline: {plan.pipeline.reason}\n{table}"
    return (
        f"model: {config.model.num_params() / 1e6:,.1f} M parameters; "
        f"data: {data['num_tokens']:,} tokens in {data['num_documents']:,} documents; "
        f"mesh: {axes or 'one device'} ({config.mesh.axis_types}{zero}{exchange}); "
        f"{config.steps:,} steps of {config.batch_size} x {config.seq_len} tokens\n{table}"
    )
