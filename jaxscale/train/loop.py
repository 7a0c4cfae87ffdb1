"""The story of a run: data, mesh, state, steps, evaluation, checkpoints, a sample."""

import collections
import contextlib
import dataclasses
import logging
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.compile import fit
from jaxscale.config import Config
from jaxscale.data.loader import Corpus, open_dataset
from jaxscale.distributed import is_lead
from jaxscale.metrics.meter import Meter, open_writers
from jaxscale.step import state as train_state
from jaxscale.step.feed import device_batches
from jaxscale.step.state import Plan, TrainState
from jaxscale.step.update import make_eval_step
from jaxscale.train.profile import Profile
from jaxscale.train.sample import sample
from jaxscale.train.workdir import check_same_run, check_workdir, only_run, write_config
from jaxscale.xla import options as xla

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite."""


@dataclasses.dataclass
class Outcome:
    """How a run ended. step: updates done; losses: held-out nats a token, before and after; text: the sample or None."""

    step: int
    interrupted: bool
    first_loss: float | None
    last_loss: float | None
    text: str | None


def train(config: Config, workdir: str | Path, *, command: str = "the same command") -> Outcome:
    """Trains until config.steps, continuing what `workdir` holds; `command` is what a message tells the user to run again.

    Writes config.json, metrics.jsonl, tensorboard/ and checkpoints/ there. Raises ValueError for a mistake of the user's,
    before devices are touched wherever that is possible; NonFiniteError; CheckpointError.
    """
    run_config.validate(config)
    workdir = Path(workdir)
    check_workdir(workdir, config)
    corpus = open_dataset(
        config.data, seed=config.seed, seq_len=config.seq_len, vocab_size=config.model.vocab_size
    )
    leads = (
        not jax.distributed.is_initialized() or is_lead()
    )  # asking who leads touches the devices
    checkpointing = config.checkpoint
    with (
        only_run(workdir) if leads else contextlib.nullcontext(),
        Checkpointer(
            workdir / "checkpoints",
            keep_last=checkpointing.keep_last,
            keep_every=checkpointing.keep_every,
        ) as checkpoints,
    ):
        if (latest := checkpoints.latest_step()) is not None:
            saved = checkpoints.metadata(latest)
            corpus.check_same(saved["data"])
            check_same_run(workdir, saved["config"], config)
            if not checkpointing.enabled:
                raise ValueError(
                    f"config.checkpoint.enabled=False, and --workdir={workdir} holds step {latest}: choose another "
                    f"--workdir, or leave checkpoints on to continue"
                )
        sizes = run_config.validate_on(config, jax.device_count())
        xla.enable_compilation_cache()
        plan = train_state.plan_for_data(config, corpus, sizes)
        log.info(describe(plan, corpus))
        if settings := xla.describe(
            plan.compiler_options, config, platform=plan.mesh.devices.flat[0].platform
        ):
            log.info(settings)
        with shd.use(plan.mesh, plan.rules), interrupts() as interrupted:
            # Before there is a state: a step that cannot fit is refused while nothing is allocated or written.
            train_step = fit.compile_to_fit(plan) if (latest or 0) < config.steps else None
            if leads:
                write_config(workdir, config)
            return _run(
                plan, train_step, workdir, corpus, checkpoints, agreed(interrupted, plan), command
            )


def _run(
    plan: Plan,
    train_step: fit.Step | None,
    workdir: Path,
    corpus: Corpus,
    checkpoints: Checkpointer,
    interrupted: Callable[[], bool],
    command: str,
) -> Outcome:
    """train_step: None if the newest checkpoint is of the last step."""
    config = plan.config
    state, first_step = _restore_or_init(plan, checkpoints)
    evaluate = _evaluator(plan, corpus)
    first_loss = evaluate(state.params)
    entropy = corpus.unigram_entropy()
    log.info(
        "held-out loss at step %d: %.4f nats/token (unigram entropy %.4f)",
        first_step,
        first_loss,
        entropy,
    )
    if first_step >= config.steps:
        log.info("nothing to train: step %d is done, and config.steps=%d", first_step, config.steps)
    elif train_step is None:  # the newest checkpoint is damaged, and an earlier one was taken
        train_step = fit.compile_to_fit(plan)
    writers = open_writers(
        workdir, num_steps=config.steps, resume_step=first_step, tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb_project, run_config=run_config.to_json(config),
    )  # fmt: skip
    # Its clock starts here: the first step's seconds hold what a first execution costs, but not the compilation.
    meter = Meter(
        num_devices=jax.device_count(), devices=jax.local_devices(), tokens_per_step=config.batch_size * config.seq_len,
        flops_per_token_full=config.model.flops_per_token(config.seq_len, causal=False),
        flops_per_token_causal=config.model.flops_per_token(config.seq_len, causal=True),
    )  # fmt: skip
    profile = Profile(config.profile, workdir / "profile", first_step=first_step)
    step, saved = first_step, first_step
    facts = train_step.facts() if train_step else {}  # for the first record

    def write(records):
        for record in records:
            writers.write(record | facts if record["step"] == first_step + 1 else record)
            check_finite(record, workdir, saved)

    def save():
        nonlocal saved
        write(meter.flush())  # a step that is not finite is never saved
        checkpoints.save(step, train_state.to_flat(state), _metadata(config, corpus))
        saved = step

    loader = device_batches(plan, corpus.train, start=first_step)
    try:
        while step < config.steps and not interrupted():
            assert train_step is not None
            if profile.starts_after(step):
                write(meter.flush())
                profile.start()
                meter.restart()
            began = time.perf_counter()
            batch = next(loader)
            data_wait_seconds = time.perf_counter() - began
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                state, metrics = train_step(state, batch)
            step += 1
            write(meter.record(step, metrics, data_wait_seconds))
            if step == first_step + 1:
                # Without another step behind it, which its scalars may have to wait for (CUDA_DEVICE_MAX_CONNECTIONS=1: 1.2 s
                # of Llama 3 8B on 4 GPUs): this time is what a start costs.
                write(meter.flush())
            if profile.stops_after(step):
                write(meter.flush())
                profile.stop()
                meter.restart()
            if _is_due(step, config.evaluation.every, config.steps):
                write(meter.flush())
                writers.write({"step": step, "eval_loss": evaluate(state.params)})
                meter.restart()
            if config.checkpoint.enabled and _is_due(step, config.checkpoint.every, config.steps):
                save()
                meter.restart()
        write(meter.flush())
        was_interrupted = step < config.steps
        last_loss, text = first_loss, None
        if step > first_step and not was_interrupted:
            last_loss = evaluate(state.params)
            writers.write({"step": step, "eval_loss": last_loss})
        # After the evaluation: what a checkpoint's step has measured is on record, also if the run is killed here.
        if config.checkpoint.enabled and step > saved:
            save()
    finally:
        loader.close()
        writers.close()
        profile.stop()  # of a run that ended early
    if was_interrupted:
        checkpoints.wait()
        log.info(_stopped(config, step, command))
        return Outcome(step, True, first_loss, None, None)
    log.info(
        "held-out loss: %.4f before (step %d), %.4f after (step %d) nats/token; unigram entropy %.4f",
        first_loss, first_step, last_loss, step, entropy,
    )  # fmt: skip
    if config.sample.tokens and corpus.tokenizer is not None:
        text = _sample_text(plan, state.params, corpus.tokenizer)
        log.info("sample (temperature %g):\n%s", config.sample.temperature, text)
    checkpoints.wait()
    log.info(_farewell(config, workdir, step, command))
    return Outcome(step, False, first_loss, last_loss, text)


def check_finite(record: dict, workdir: Path, saved_step: int) -> None:
    """Raises NonFiniteError for a record whose loss or gradient norm is NaN or infinite."""
    bad = [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]
    if bad:
        raise NonFiniteError(
            f"step {record['step']}: " + ", ".join(f"{key} is {record[key]}" for key in bad)
            + ". The run stopped; "
            + (f"the last checkpoint is of step {saved_step} in {workdir / 'checkpoints'}" if saved_step else "nothing is saved")
            + ". Look at the data of that step, lower config.schedule.peak, or set config.dtype='float32' to find out more"
        )  # fmt: skip


@contextlib.contextmanager
def interrupts() -> Iterator:
    """Yields a function that says whether SIGINT or SIGTERM has come; a SIGINT after that ends the process at once."""
    came: list[int] = []

    def note(signum, frame):
        came.append(signum)
        # Not KeyboardInterrupt: it would wait for the save in flight, and for threads. A kill harms no checkpoint.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        log.warning(
            "%s: finishing the step and saving (once more Ctrl-C stops at once)",
            signal.Signals(signum).name,
        )

    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for signum, handler in previous.items():
            signal.signal(
                signum, signal.SIG_DFL if handler is None else handler
            )  # None: not set by Python


def agreed(interrupted: Callable[[], bool], plan: Plan) -> Callable[[], bool]:
    """`interrupted` of any process, the same on all of them at the same step: one that stops alone leaves the others waiting.

    Every process calls it once a step. A step late with several processes: the votes are read when the devices have
    long counted them, so they never wait for the host.
    """
    if jax.process_count() == 1:
        return interrupted
    by_device = NamedSharding(plan.mesh, PartitionSpec(plan.mesh.axis_names))
    count = jax.jit(jnp.any, out_shardings=NamedSharding(plan.mesh, PartitionSpec()))
    votes: collections.deque[jax.Array] = collections.deque()

    def stop() -> bool:
        mine = np.full(plan.mesh.size, interrupted())
        votes.append(
            count(jax.make_array_from_callback(mine.shape, by_device, lambda index: mine[index]))
        )
        return len(votes) > 1 and bool(votes.popleft())

    return stop


def _restore_or_init(plan: Plan, checkpoints: Checkpointer) -> tuple[TrainState, int]:
    restored = checkpoints.restore(train_state.to_flat(train_state.abstract_state(plan)))
    if restored is None:
        return train_state.init_state(plan), 0
    step, flat, _ = restored
    log.info("continuing from the checkpoint of step %d", step)
    return train_state.from_flat(plan.abstract, flat), step


def _metadata(config: Config, corpus: Corpus) -> dict:
    # The position in the data is the step itself: batch n is a function of (seed, n).
    return {
        "config": run_config.to_json(config),
        "data": corpus.description,
        "jax": jax.__version__,
    }


def _evaluator(plan: Plan, corpus: Corpus):
    """A function of the parameters: the mean loss over the first config.evaluation.batches held-out batches."""
    eval_step = make_eval_step(plan)

    def evaluate(params) -> float:
        sums = []
        with contextlib.closing(device_batches(plan, corpus.eval, start=0)) as loader:
            for _ in range(plan.config.evaluation.batches):
                sums.append(eval_step(params, next(loader)))
        loss, tokens = (sum(float(x) for x in column) for column in zip(*sums, strict=True))
        return loss / max(tokens, 1)

    return evaluate


def _sample_text(plan: Plan, params, tokenizer) -> str:
    wanted = plan.config.sample
    prompt = np.asarray(tokenizer.encode(wanted.prompt), np.int32)
    ids = sample(
        plan,
        params,
        prompt,
        num_tokens=wanted.tokens,
        temperature=wanted.temperature,
        seed=plan.config.seed,
    )
    return wanted.prompt + tokenizer.decode([int(i) for i in ids if i < tokenizer.vocab_size])


def _is_due(step: int, every: int, last: int) -> bool:
    """True every so many steps (0: never), but not at the last, which has its own."""
    return every > 0 and step % every == 0 and step < last


def describe(plan: Plan, corpus: Corpus) -> str:
    """The run in a few lines: model, data, mesh, memory of the state."""
    config, data = plan.config, corpus.description
    axes = (
        ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
        or "one device"
    )
    zero = f", ZeRO-{config.mesh.zero}" if plan.mesh.shape["fsdp"] > 1 else ""
    table = shd.explain(plan.abstract.params, mesh=plan.mesh, rules=plan.rules)
    return (
        f"model: {config.model.num_params() / 1e6:,.1f} M parameters; data: {data['num_tokens']:,} tokens in "
        f"{data['num_documents']:,} documents; mesh: {axes} ({config.mesh.axis_types}{zero}); "
        f"{config.steps:,} steps of {config.batch_size} x {config.seq_len} tokens\n{table}"
    )


def _stopped(config: Config, step: int, command: str) -> str:
    if not config.checkpoint.enabled:
        fate = "not saved (config.checkpoint.enabled=False); start again with"
    else:
        fate = "and saved; continue with" if step else "before the first; start again with"
    return f"stopped at step {step} of {config.steps} {fate}: {command}"


def _farewell(config: Config, workdir: Path, step: int, command: str) -> str:
    files = ["config.json", "metrics.jsonl"]
    files += ["checkpoints/"] * config.checkpoint.enabled + [
        "tensorboard/"
    ] * config.log.tensorboard
    command = re.sub(r" --config\.steps[= ]\d+", "", command)
    return (
        f"done: step {step}{'' if step > config.steps else f' of {config.steps}'}. In {workdir}: {', '.join(files)}"
        + (f"\ntrain on with: {command} --config.steps={2 * step}" if config.checkpoint.enabled else "")
    )  # fmt: skip
