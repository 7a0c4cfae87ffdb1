"""A run from start to end: killed, interrupted, continued, on another mesh, in two processes."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxscale.compile import fit
from jaxscale.config import (
    BadStepsConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LogConfig,
    MeshConfig,
    SampleConfig,
    from_json,
    to_json,
)
from jaxscale.data.loader import Corpus
from jaxscale.launch import EXIT_AGAIN
from jaxscale.train import run
from jaxscale.train.bad_steps import BadStepError
from jaxscale.train.loop import Outcome, train
from jaxscale.train.recorder import still
from jaxscale.train.stop import Interrupts
from tests.train.small import config_of, records, write_cats

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "train.py")

# The loss after a checkpoint went to another mesh: float32, sums in another order.
LOSS_RTOL = 1e-5


def run_config(text: Path, **changes) -> Config:
    defaults: dict[str, Any] = dict(checkpoint=CheckpointConfig(every=2, keep_last=9))
    return config_of(text, eval_fraction=0.3, **(defaults | changes))


# Runs the script, and stops at moments: at that named by argv[1] it ends as kill -9 would end it;
# at those named by argv[2] it says so and waits until it is given a line.
CONTROLLED_SCRIPT = """
import os, runpy, signal, sys
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.checkpoint.folders import StepFolders
from jaxscale.metrics.meter import Meter

death, holds = sys.argv[1], sys.argv[2].split(",")
sys.argv = sys.argv[3:]


def stop_at(moment):
    if moment == death:
        os.kill(os.getpid(), signal.SIGKILL)
    if moment in holds:
        print("held at", moment, flush=True)
        sys.stdin.readline()


def hook(owner, name, label):
    original = getattr(owner, name)

    def method(self, step, *arguments, **options):
        stop_at(f"{label} {step}")
        return original(self, step, *arguments, **options)

    setattr(owner, name, method)


def restore(self, abstract_state, original=Checkpointer.restore, **options):
    stop_at("restoring")
    return original(self, abstract_state, **options)


Checkpointer.restore = restore
hook(Meter, "record", "step")
hook(Checkpointer, "_finish", "saving")
hook(StepFolders, "publish", "renaming")
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Seconds after which a process hangs; a busy machine takes less.
PATIENCE = 600


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of small text files, and the run's config.json."""
    doing = "sat on the mat and looked at the moon"
    folder = write_cats(tmp_path_factory.mktemp("text"), documents=12, doing=doing, times=12)
    (folder / "config.json").write_text(json.dumps(to_json(run_config(folder))))
    return folder


class Child:
    """A process of CONTROLLED_SCRIPT; what it prints goes to a file, readable at any time."""

    def __init__(self, process, printed: Path):
        self.process, self.printed = process, printed

    def wait_for(self, text):
        """Until it has printed that."""
        deadline = time.monotonic() + PATIENCE
        while True:
            is_over = self.process.poll() is not None or time.monotonic() > deadline
            if text in self.printed.read_text():
                return
            assert not is_over, self.printed.read_text()
            time.sleep(0.02)

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self, code=0) -> str:
        """All it has printed, once it has ended with that code."""
        returned = self.process.wait(PATIENCE)
        assert returned == code, self.printed.read_text()
        return self.printed.read_text()


@pytest.fixture
def start(text, spawn, sigint_by_default, tmp_path_factory):
    """`start(workdir, *arguments, death="step 3", holds="step 1,step 2") -> Child`."""

    def start(workdir, *arguments, death="", holds="", devices=8, **environment):
        command = [sys.executable, "-c", CONTROLLED_SCRIPT, death, holds, SCRIPT]
        command += [f"--config={text / 'config.json'}", f"--workdir={workdir}", *arguments]
        flags = os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={devices}"
        printed = tmp_path_factory.mktemp("printed") / "output.txt"
        with printed.open("w") as file:
            process = spawn(
                command,
                env=os.environ | {"XLA_FLAGS": flags} | environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Child(process, printed)

    return start


def found(pattern, text) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match, text
    return match.groups()


def losses(workdir):
    """Loss by step; a step must be on record once."""
    pairs = [(record["step"], record["loss"]) for record in records(workdir) if "loss" in record]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def eval_losses(workdir):
    pairs = [
        (record["step"], record["eval_loss"])
        for record in records(workdir)
        if "eval_loss" in record
    ]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def saved_steps(workdir):
    return sorted(
        int(path.name) for path in Path(workdir).glob("checkpoints/*") if path.name.isdigit()
    )


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The workdir of a run that nothing happened to, on the 8 devices of this process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    train(run_config(text), workdir)
    assert list(losses(workdir)) == list(range(1, 13)) and list(eval_losses(workdir)) == [0, 12]
    return workdir


def test_killed_at_any_moment_the_same_command_gives_the_same_losses_bit_for_bit(
    start, undisturbed, tmp_path
):
    draw = random.Random(time.time_ns())
    step, delay = draw.choice([1, 2, 3]), draw.uniform(0, 0.2)
    deaths = [f"saving {draw.choice([4, 6])}", f"renaming {draw.choice([6, 8])}"]
    print(step, delay, deaths)
    # From outside, while it trains or saves; it gets no further than where it is held next.
    child = start(tmp_path, holds=f"step {step},step 4")
    child.wait_for(f"held at step {step}")
    child.go_on()
    time.sleep(delay)
    child.process.kill()
    child.finish(-signal.SIGKILL)
    for death in deaths:
        start(tmp_path, death=death).finish(-signal.SIGKILL)
    assert "continuing from the checkpoint of step" in start(tmp_path).finish()
    assert losses(tmp_path) == losses(undisturbed)
    assert eval_losses(tmp_path) == eval_losses(undisturbed)


def test_interrupted_it_saves_and_the_command_it_names_continues_bit_for_bit(
    start, undisturbed, tmp_path
):
    def interrupted(step, signum, *, code):
        child = start(tmp_path, "--config.checkpoint.every=0", holds=f"step {step}")
        child.wait_for(f"held at step {step}")
        child.process.send_signal(signum)
        child.go_on()
        return child.process.args, child.finish(code)

    arguments, output = interrupted(3, signal.SIGINT, code=130)
    step, command = found(r"stopped at step (\d+) of 12 and saved; continue with: (.*)", output)
    assert int(step) == 3 and saved_steps(tmp_path) == [3]
    # The whole command, its settings included, for a shell in any folder.
    folder, python, *words = shlex.split(command.replace(" && ", " "))[1:]
    assert folder == os.getcwd() and words == arguments[5:]
    assert os.path.join(folder, python) == sys.executable

    # A scheduler's signals: the exit code by which it starts the job again.
    for number, signum in ((5, signal.SIGTERM), (6, signal.SIGUSR1)):
        _, output = interrupted(number, signum, code=EXIT_AGAIN)
        assert f"{signum.name}: finishing the step and saving" in output
        assert saved_steps(tmp_path)[-1] == number
    start(tmp_path).finish()
    assert losses(tmp_path) == losses(undisturbed)


def test_a_second_ctrl_c_stops_at_once(start, tmp_path):
    child = start(tmp_path, holds="restoring")
    child.wait_for("held at restoring")
    child.process.send_signal(signal.SIGINT)
    child.wait_for("SIGINT: finishing the step and saving")
    with pytest.raises(subprocess.TimeoutExpired):  # what it does goes on
        child.process.wait(0.5)
    child.process.send_signal(signal.SIGINT)
    child.finish(-signal.SIGINT)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.usefixtures("sigint_by_default")
def test_interrupted_before_the_first_step_it_stops_there(text, tmp_path, monkeypatch, signum):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    entropy = Corpus.unigram_entropy

    def interrupted(corpus):
        signal.raise_signal(signum)
        return entropy(corpus)

    monkeypatch.setattr(Corpus, "unigram_entropy", interrupted)
    monkeypatch.setattr(
        fit.CompiledUpdate, "__call__", lambda *arguments: pytest.fail("an update was run")
    )
    stopped = tell(run_config(text), tmp_path)
    assert stopped.outcome.interrupted and stopped.outcome.step == 0
    assert (
        "stopped at step 0 of 12 before the first; start again with: cd /runs && python train.py"
        in stopped.said
    )
    assert saved_steps(tmp_path) == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(start, workdir, *arguments, holds=""):
    shared = {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "XDG_CACHE_HOME": str(Path(workdir) / "cache"),  # of what `auto` chose
    }
    return [
        start(workdir, *arguments, holds=holds, devices=4, **shared, JAX_PROCESS_ID=str(number))
        for number in range(2)
    ]


@pytest.mark.slow
def test_two_processes_stop_together_when_one_is_told_and_train_like_one(
    start, undisturbed, tmp_path
):
    both = start_two(start, tmp_path, holds="step 3")
    for child in both:
        child.wait_for("held at step 3")
    both[1].process.send_signal(signal.SIGTERM)  # the one that does not lead
    for child in both:
        child.go_on()
    outputs = [child.finish(EXIT_AGAIN) for child in both]
    step = int(found(r"stopped at step (\d+) of 12 and saved", outputs[0])[0])
    assert 3 <= step < 12 and step in saved_steps(tmp_path)
    assert "stopped at" not in outputs[1]  # one of them speaks

    # `auto` besides: they agree on what they decide by.
    outputs = [child.finish() for child in start_two(start, tmp_path, "--config.remat=auto")]
    assert f"continuing from the checkpoint of step {step}" in outputs[0]
    assert_close(losses(tmp_path), losses(undisturbed))
    assert_close(eval_losses(tmp_path), eval_losses(undisturbed))


def assert_close(mine, theirs):
    assert list(mine) == list(theirs)
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=LOSS_RTOL)


def continued_from(step, source, workdir):
    """A copy of a finished run's workdir as it was when that step had been saved."""
    shutil.copytree(source, workdir)
    for newer in saved_steps(workdir):
        if newer > step:
            shutil.rmtree(workdir / "checkpoints" / str(newer))
    return workdir


def test_continued_on_the_same_mesh_the_losses_are_the_same_bit_for_bit(
    text, undisturbed, tmp_path
):
    workdir = continued_from(6, undisturbed, tmp_path / "run")
    outcome = train(run_config(text), workdir)
    assert outcome.step == 12 and not outcome.interrupted
    assert losses(workdir) == losses(undisturbed)
    assert eval_losses(workdir) == eval_losses(undisturbed)


def test_continued_on_another_mesh_the_losses_are_the_same(text, undisturbed, tmp_path):
    workdir = continued_from(6, undisturbed, tmp_path / "run")
    train(run_config(text, mesh=MeshConfig(data=2, fsdp=1, tensor=4)), workdir)
    assert losses(workdir) != losses(undisturbed)  # it did run, in another order of sums
    assert_close(losses(workdir), losses(undisturbed))


@dataclasses.dataclass
class Told:
    """A workdir, its run's outcome, and what the run said."""

    workdir: Path
    config: Config
    outcome: Outcome
    said: str


@pytest.fixture(scope="module")
def told(text, tmp_path_factory):
    """Six steps with everything a run prints and writes switched on."""
    workdir = tmp_path_factory.mktemp("told")
    config = run_config(
        text,
        steps=6,
        seq_len=256,
        z_loss=0.01,
        evaluation=EvalConfig(batches=1, every=2),
        log=LogConfig(),
        sample=SampleConfig(tokens=200, prompt="The "),
        checkpoint=CheckpointConfig(every=3),
    )
    return tell(config, workdir)


def tell(config, workdir):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jaxscale")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        typed = "--config.steps=0x6 --config.seed 0x10 --config.steps 1_000"
        outcome = train(config, workdir, command=f"cd /runs && python train.py {typed}")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return Told(Path(workdir), config, outcome, "\n".join(lines))


def test_the_held_out_loss_is_told_before_and_after_beside_the_unigram_entropy(told):
    assert told.outcome.last_loss < told.outcome.first_loss
    # An untrained model knows nothing: all ids are as likely. (The z-loss may be part of it.)
    assert -0.1 < told.outcome.first_loss - math.log(257) < 0.4
    loss, bits, entropy = found(
        r"held-out loss at step 0: ([\d.]+) nats/token, ([\d.]+) bits/byte "
        r"\(unigram entropy ([\d.]+)\)",
        told.said,
    )
    assert float(loss) == round(told.outcome.first_loss, 4)
    assert 2 < float(entropy) < math.log(30)  # some 20 letters, unevenly
    last = f"{told.outcome.last_loss:.4f}"
    assert re.search(
        rf"held-out loss: {loss} nats/token, {bits} bits/byte before \(step 0\); "
        rf"{last} nats/token, [\d.]+ bits/byte after \(step 6\); unigram entropy {entropy}",
        told.said,
    )


def test_bits_a_byte_are_the_nats_of_all_tokens_over_the_bytes_of_the_text(told):
    """Documents of 52 or 53 bytes, 12 times, and a token that is no byte at their ends."""
    first = next(record for record in records(told.workdir) if record["step"] == 0)
    length = len("The cat 7 sat on the mat and looked at the moon. ") * 12
    bits = first["eval_loss"] / math.log(2) * (length + 1) / length
    assert first["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-3)
    assert first["unigram_entropy"] < first["eval_loss"]


def test_the_z_loss_of_the_config_is_part_of_the_loss(told):
    assert abs(losses(told.workdir)[1] - math.log(257) - 0.01 * math.log(257) ** 2) < 0.1


def test_a_sample_of_200_characters_is_told(told):
    assert "sample (temperature 0.8):\nThe " in told.said
    # Several bytes that are no UTF-8 may become one replacement; ids of ends are left out.
    assert told.outcome.text.startswith("The ") and 100 < len(told.outcome.text) <= 204


def test_the_last_lines_say_where_everything_is_and_how_to_go_on(told):
    last = told.said[told.said.index("done: ") :]
    assert last.splitlines() == [
        f"done: step 6 of 6. In {told.workdir}: config.json, metrics.jsonl, checkpoints/, "
        "tensorboard/",
        "train on with: cd /runs && python train.py --config.seed 0x10 --config.steps=12",
    ]
    for name in ("config.json", "metrics.jsonl", "checkpoints", "tensorboard"):
        assert (told.workdir / name).exists()
    assert [path for path in (told.workdir / "tensorboard").iterdir() if path.stat().st_size > 100]


def test_the_held_out_text_is_evaluated_every_so_many_steps_and_at_the_end(told):
    assert list(eval_losses(told.workdir)) == [0, 2, 4, 6]
    assert eval_losses(told.workdir)[0] == told.outcome.first_loss
    assert eval_losses(told.workdir)[6] == told.outcome.last_loss
    assert saved_steps(told.workdir) == [3, 6]


def test_a_finished_run_is_not_trained_again_and_says_how_to_go_on(told, monkeypatch):
    before = (told.workdir / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(
        run, "compile_to_fit", lambda *arguments: pytest.fail("an update was compiled")
    )
    again = tell(dataclasses.replace(told.config, sample=SampleConfig(tokens=0)), told.workdir)
    assert "nothing to train: step 6 is done, and config.steps=6" in again.said
    assert "train on with: " in again.said and "--config.steps=12" in again.said
    assert again.outcome.first_loss == again.outcome.last_loss == told.outcome.last_loss
    assert (told.workdir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_goes_on_when_steps_is_raised(told, tmp_path):
    shutil.copytree(told.workdir, tmp_path / "run")
    config = dataclasses.replace(told.config, steps=8, sample=SampleConfig(tokens=0))
    more = tell(config, tmp_path / "run")
    assert more.outcome.step == 8
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 7, 8]
    before, after = losses(told.workdir), losses(tmp_path / "run")
    assert all(after[step] == before[step] for step in before)
    assert more.outcome.first_loss == told.outcome.last_loss


def test_what_changed_since_the_checkpoint_is_told_with_what_it_does_to_the_learning_rate(
    told, tmp_path
):
    workdir = shutil.copytree(told.workdir, tmp_path / "run")
    config = dataclasses.replace(
        told.config, steps=8, sample=SampleConfig(tokens=0), checkpoint=CheckpointConfig(every=4)
    )
    more = tell(config, workdir)
    lines = found(r"going on from step 6 with other settings:\n((?:  .*\n)+)", more.said)[0]
    *changes, rate = [line.strip() for line in lines.splitlines()]
    assert changes == [
        "config.steps: saved 6, now 8",
        "config.checkpoint.every: saved 3, now 4",
        "config.sample.tokens: saved 200, now 0",
        "config.sample.prompt: saved 'The ', now 'def '",
    ]
    now, then, last = map(
        float,
        found(
            r"the learning rate of step 7 becomes (\S+), and would have been (\S+); "
            r"that of the last step, 8, is (\S+)",
            rate,
        ),
    )
    rates = [record["learning_rate"] for record in records(workdir) if "learning_rate" in record]
    assert now == pytest.approx(rates[-2], rel=0.01) and last == pytest.approx(rates[-1], rel=0.01)
    assert then == pytest.approx(3e-4, rel=0.01)  # the tenth at which the cosine of 6 steps ended
    kept = json.loads((workdir / "config.step6.json").read_text())
    assert from_json(kept) == told.config
    assert json.loads((workdir / "config.json").read_text())["steps"] == 8
    # The same again: nothing has changed, and nothing is kept beside.
    again = tell(config, workdir)
    assert "other settings" not in again.said and not (workdir / "config.step8.json").exists()


def test_the_first_line_says_what_it_runs_on(told):
    # But for the conversion of text that no run has read yet.
    first = next(line for line in told.said.splitlines() if "converted in" not in line)
    assert re.fullmatch(r"jax [\d.]+ on cpu: 8 x cpu, 1 process", first)


def test_what_takes_long_is_told_ever_less_often(caplog):
    caplog.set_level(logging.INFO, "jaxscale")
    deadline = time.monotonic() + PATIENCE
    with still("evaluating", after_seconds=0.05):
        while len(caplog.records) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    times = [record.created for record in caplog.records[:4]]
    # A busy machine makes them longer, and none shorter.
    assert (np.diff(times) > [0.09, 0.19, 0.39]).all()
    assert all(re.fullmatch(r"evaluating: \d+ s so far", text) for text in caplog.messages)
    caplog.clear()
    with still("evaluating"):
        pass
    assert not caplog.records


def test_without_checkpoints_nothing_is_saved_and_no_continuation_is_promised(
    text, tmp_path, monkeypatch
):
    off = CheckpointConfig(enabled=False)
    ended = tell(run_config(text, steps=3, checkpoint=off), tmp_path)
    assert ended.outcome.step == 3 and list(losses(tmp_path)) == [1, 2, 3]
    assert saved_steps(tmp_path) == []
    assert "train on with" not in ended.said and "checkpoints/" not in ended.said

    told = Interrupts()
    told.code = 130
    monkeypatch.setattr(run, "interrupts", lambda: contextlib.nullcontext(told))
    stopped = tell(run_config(text, steps=3, checkpoint=off), tmp_path)
    assert "not saved (config.checkpoint.enabled=False); start again with" in stopped.said


def test_a_poisoned_state_is_not_saved_and_the_step_is_named(text, tmp_path, monkeypatch):
    update = fit.CompiledUpdate.__call__

    def poisoned(self, state, batch):
        state, metrics = update(self, state, batch)
        is_sixth = int(state.step) == 6
        return state, metrics | {"loss": metrics["loss"] * (math.nan if is_sixth else 1.0)}

    monkeypatch.setattr(fit.CompiledUpdate, "__call__", poisoned)
    with pytest.raises(
        BadStepError,
        match="step 6: loss is nan. The run stopped; the last checkpoint is of step 3",
    ):
        stop = BadStepsConfig(stop_after=1)
        train(run_config(text, checkpoint=CheckpointConfig(every=3), bad_steps=stop), tmp_path)
    assert saved_steps(tmp_path) == [3] and list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_the_first_step_is_on_record_at_once_and_the_others_one_step_late(
    text, tmp_path, monkeypatch
):
    update, known = fit.CompiledUpdate.__call__, []

    def noting(self, state, batch):
        known.append(list(losses(tmp_path)) if (tmp_path / "metrics.jsonl").exists() else [])
        return update(self, state, batch)

    monkeypatch.setattr(fit.CompiledUpdate, "__call__", noting)
    train(run_config(text, steps=4, checkpoint=CheckpointConfig(enabled=False)), tmp_path)
    assert known == [[], [1], [1], [1, 2]]
