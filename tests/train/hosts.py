"""Runs of several processes of one machine, by scripts/launch_local.py, over gloo."""

import subprocess
import sys
import time
from pathlib import Path

from jaxscale.perf.records import read_records

ROOT = Path(__file__).parents[2]
PATIENCE = 600


def launch(num, workdir, *settings, config):
    """A run of so many processes, of two devices each: its launcher, and the file of its output."""
    command = [sys.executable, "scripts/launch_local.py", "-n", str(num), "--cpu-devices=2"]
    command += ["--", "scripts/train.py", f"--config={config}", f"--workdir={workdir}"]
    command += [
        "--config.steps=12",
        "--config.schedule.warmup_steps=2",
        "--config.checkpoint.every=4",
        "--config.checkpoint.keep_last=9",
        "--config.evaluation.batches=1",
        "--config.log.tensorboard=False",
        "--config.sample.tokens=0",
        *settings,
    ]
    output = Path(workdir).with_suffix(".txt").open("w")
    with output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output), output.name


def finish(started, code=0):
    """All that it printed, once it has ended with that code."""
    process, name = started
    try:
        returned = process.wait(PATIENCE)
    finally:
        process.kill()
    output = Path(name).read_text()
    assert returned == code, output
    return output


def losses(workdir):
    """Of each step that is on record, and each is once."""
    records = read_records(Path(workdir) / "metrics.jsonl")
    pairs = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def children(pid):
    """The processes of a launcher, in their order."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def wait_for_step(started, workdir, step):
    deadline = time.monotonic() + PATIENCE
    while max(losses(workdir), default=0) < step:
        assert started[0].poll() is None, Path(started[1]).read_text()
        assert time.monotonic() < deadline, Path(started[1]).read_text()
        time.sleep(0.02)
