"""Kills at random moments and damage of every kind; each run must end as if nothing had happened.

`make test-faults` tries JAXSCALE_FAULTS of each kind of kill and damage (default 1; 34 in
docs/reliability.md), with seeds from JAXSCALE_FAULTS_SEED on. What was found goes, a line of JSON
a trial, to the file that JAXSCALE_FAULTS_LOG names.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.children import Children, Ended

pytestmark = pytest.mark.faults

TRIALS = int(os.environ.get("JAXSCALE_FAULTS", "1"))
FIRST_SEED = int(os.environ.get("JAXSCALE_FAULTS_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + TRIALS)
STEPS, EVERY, HALF = 40, 5, 20

CONFIG = """
from jaxscale.config import (
    BadStepsConfig, CheckpointConfig, Config, DataConfig, Dtype, EvalConfig, LogConfig, SampleConfig
)
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg=""):
    return Config(
        model=llama.Config(
            vocab_size=257, model_dim=64, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=256
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=3e-3, warmup_steps=2),
        steps=40,
        batch_size=8,
        seq_len=64,
        dtype=Dtype.FLOAT32,
        data=DataConfig(path="text", cache_dir="cache", eval_fraction=0.3),
        checkpoint=CheckpointConfig(every=5, keep_last=3),
        evaluation=EvalConfig(batches=1, every=15),
        sample=SampleConfig(tokens=0),
        log=LogConfig(tensorboard=False),
    )
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    with Children(tmp_path_factory.mktemp("outputs")) as children:
        yield children


def new_folder(folder: Path) -> Path:
    (folder / "text").mkdir(parents=True)
    (folder / "config.py").write_text(CONFIG)
    for number in range(60):
        path = folder / "text" / f"{number}.txt"
        path.write_text(f"The cat {number} sat on the mat and looked at the moon. " * 12)
        os.utime(path, (1, 1))
    return folder


@pytest.fixture(scope="module")
def undisturbed(children, tmp_path_factory):
    """A folder whose run nothing happened to, and what it read."""
    folder = new_folder(tmp_path_factory.mktemp("undisturbed") / "folder")
    ended = children.run(folder)
    assert ended.code == 0, ended.output
    return folder, batches_of([ended])


@pytest.fixture(scope="module")
def half(children, tmp_path_factory):
    """A folder whose run was killed in the save behind its checkpoint of half the steps."""
    folder = new_folder(tmp_path_factory.mktemp("half") / "folder")
    ended = children.run(folder, die_in_save=[0, 1 + HALF // EVERY])
    assert ended.code == -signal.SIGKILL, ended.output
    return folder, ended


@pytest.fixture
def halfway(half, tmp_path):
    """A copy of it, for one trial, and the process that made it."""
    folder, ended = half
    # With the times of its files: the cache goes by them.
    return shutil.copytree(folder, tmp_path / "folder"), ended


# What must be the same.


def records(folder: Path, key: str) -> dict[int, float]:
    """By step; a step must be on record once."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    pairs = [(r["step"], r[key]) for r in map(json.loads, lines) if key in r]
    assert len(dict(pairs)) == len(pairs), "a step is on record twice"
    return dict(pairs)


def batches_of(children: list[Ended]) -> dict[int, str]:
    """What each step read, as far as it counts: a step that was lost is done again."""
    read: dict[int, str] = {}
    for ended in children:
        for _, line in ended.said:
            if match := re.match(r"batch of step (\d+): (\d+)", line):
                read[int(match[1])] = match[2]
    return read


def assert_undisturbed(folder: Path, lives: list[Ended], undisturbed) -> None:
    expected, read = undisturbed
    assert lives[-1].code == 0, lives[-1].output
    assert "Traceback" not in "".join(ended.output for ended in lives)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert records(folder, key) == records(expected, key)
    assert sorted(read) == list(range(1, STEPS + 1)) and len(set(read.values())) == STEPS
    assert batches_of(lives) == read


def steps_lost(before: Ended, after: Ended) -> int:
    """Steps that the process after had to do again."""
    done = max(batches_of([before]), default=0)
    first = min(batches_of([after]), default=STEPS + 1)
    return max(0, done - first + 1)


def note(fault: str, *, seed: int, **found) -> None:
    """Of a trial that survived, for the table in docs/reliability.md; any other fails its test."""
    line = json.dumps(dict(fault=fault, seed=seed, survived=True, **found))
    print(line)
    if path := os.environ.get("JAXSCALE_FAULTS_LOG"):
        with open(path, "a") as file:
            file.write(line + "\n")


# Kills.


def unfinished(folder: Path) -> set[tuple[str, int]]:
    """What kills in a save have left; by inode, as the next process may leave the same names."""
    paths = (folder / "run" / "checkpoints").glob("*")
    found = (path for path in paths if re.fullmatch(r"\d+\.(saving|replaced|deleting)", path.name))
    return {(path.name, path.stat().st_ino) for path in found}


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_again_and_again_a_run_ends_as_if_nothing_had_happened(
    children, undisturbed, tmp_path, seed
):
    """Three kills a run: two at any moment, one while a checkpoint is written."""
    draw, folder = random.Random(seed), new_folder(tmp_path / "folder")
    lives: list[Ended] = []
    kinds = ["any", "any", "save"]
    draw.shuffle(kinds)
    for kind in kinds:
        before = unfinished(folder)
        if kind == "save":
            lives.append(children.run(folder, die_in_save=[seed, draw.choice([1, 2])]))
        else:
            lives.append(children.run(folder, kill_after=draw.uniform(0, 0.4)))
        if lives[-1].code == 0:  # it was faster
            break
        assert lives[-1].code == -signal.SIGKILL, lives[-1].output
        lives[-1].was_in_save = bool(unfinished(folder) - before)
    lives.append(children.run(folder))
    assert_undisturbed(folder, lives, undisturbed)
    for killed, after in itertools.pairwise(lives):
        told = [t for t, line in after.said if "continuing from the checkpoint" in line]
        note(
            "SIGKILL in a checkpoint write" if killed.was_in_save else "SIGKILL elsewhere",
            seed=seed,
            seconds=min(told, default=None),
            steps_lost=steps_lost(killed, after),
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_terminated_at_any_moment_it_saves_and_goes_on(children, undisturbed, tmp_path, seed):
    draw, folder = random.Random(seed), new_folder(tmp_path / "folder")
    first = children.run(folder, kill_after=draw.uniform(0, 0.2), signum=signal.SIGTERM)
    assert first.code in (75, 0), first.output
    second = children.run(folder)
    assert_undisturbed(folder, [first, second], undisturbed)
    note(
        "SIGTERM",
        seed=seed,
        seconds=first.seconds_to("SIGTERM") if first.code else None,
        steps_lost=steps_lost(first, second),
    )


# Damage to what a run of half the steps left. Each gives what is to be said.


def newest(folder: Path) -> Path:
    steps = (path for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdigit())
    return max(steps, key=lambda path: int(path.name))


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip_in_checkpoint(folder, draw):
    flip(draw.choice(files_of(newest(folder))), draw)
    return "is damaged and not used"


def cut_in_checkpoint(folder, draw):
    path = draw.choice(files_of(newest(folder)))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return "is damaged and not used"


def remove_in_checkpoint(folder, draw):
    draw.choice(files_of(newest(folder))).unlink()
    return "is damaged and not used"


def rename_checkpoint(folder, draw):
    step = newest(folder)
    step.rename(step.with_name(str(int(step.name) + draw.randint(1, 30))))
    return f"it holds step {step.name}, saved under that name"


def stray_file(folder, draw):
    step = draw.choice([HALF + 5, HALF + 10, STEPS])
    path = newest(folder).with_name(str(step))
    if draw.random() < 0.5:
        path.write_bytes(b"nothing")
    else:
        path.symlink_to("nowhere")
    return f"to {step}.stray"


def delete_checkpoints(folder, draw):
    shutil.rmtree(folder / "run" / "checkpoints")
    return "there is no checkpoint to go on from"


def garble_records(folder, draw):
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = [b'{"step": null}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b"7\n"]
    lines.insert(draw.randrange(len(lines)), draw.choice(odd))
    path.write_bytes(b"".join(lines))
    return "held other records"


def flip_in_store(folder, draw):
    flip(
        draw.choice(
            [p for p in files_of(folder / "cache") if p.suffix in (".bin", ".idx", ".crc")]
        ),
        draw,
    )
    return "the cached store is damaged, converting again"


DAMAGE = {
    "bit flipped in a checkpoint": flip_in_checkpoint,
    "file of a checkpoint cut": cut_in_checkpoint,
    "file of a checkpoint removed": remove_in_checkpoint,
    "checkpoint under another step's name": rename_checkpoint,
    "file or dead link where a step goes": stray_file,
    "checkpoints deleted": delete_checkpoints,
    "metrics.jsonl garbled": garble_records,
    "bit flipped in the cached store": flip_in_store,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_and_the_run_ends_as_if_it_had_not_been(
    children, undisturbed, halfway, damage, seed
):
    folder, first = halfway
    told = DAMAGE[damage](folder, random.Random(seed))
    second = children.run(folder)
    seconds = second.seconds_to(told)
    if damage == "checkpoints deleted":
        first = second  # every step is done again
    assert_undisturbed(folder, [first, second], undisturbed)
    lost = HALF if damage == "checkpoints deleted" else steps_lost(first, second)
    note(damage, seed=seed, seconds=seconds, steps_lost=lost)


def config_of_another_shape(folder, draw):
    odd = ['{"model": 3}', "null", '{"model": {}, "optim": 1, "data": {}}', '{"steps": ', ""]
    (folder / "run" / "config.json").write_text(draw.choice(odd))
    return folder / "run" / "config.json"


def folder_for_config(folder, draw):
    (folder / "run" / "config.json").unlink()
    (folder / "run" / "config.json").mkdir()
    return folder / "run" / "config.json"


REFUSED = {"config.json of another shape": config_of_another_shape, "folder": folder_for_config}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", REFUSED)
def test_what_cannot_be_read_is_named_and_nothing_is_changed(
    children, undisturbed, halfway, damage, seed
):
    folder, first = halfway
    path = REFUSED[damage](folder, random.Random(seed))
    refused = children.run(folder)
    assert refused.code == 2 and "Traceback" not in refused.output
    (line,) = [line for line in refused.output.splitlines() if line.startswith("error: ")]
    assert str(path.relative_to(folder)) in line
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    second = children.run(folder)
    assert_undisturbed(folder, [first, second], undisturbed)
    name = "folder in the place of config.json" if damage == "folder" else damage
    note(name, seed=seed, seconds=refused.seconds, steps_lost=steps_lost(first, second))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_disk_is_told_training_goes_on_and_the_last_checkpoint_stays(
    children, undisturbed, halfway, seed
):
    folder, first = halfway
    draw = random.Random(seed)
    full_from = draw.choice([HALF + 5, HALF + 10])
    # Enough for what is heard, and for metrics.jsonl; not for the arrays.
    size = draw.randrange(30_000, 60_000)
    second = children.run(folder, file_size=size, full_from=full_from)
    seconds = second.seconds_to(f"saving step {full_from} to")
    assert second.code == 1 and "Traceback" not in second.output
    assert len(re.findall(r"^error: saving step 40 to", second.output, re.MULTILINE)) == 1
    assert "Training goes on; the last checkpoint is of step" in second.output
    third = children.run(folder)
    assert_undisturbed(folder, [first, third], undisturbed)
    note(
        "disk full",
        seed=seed,
        seconds=seconds - second.seconds_to(f"batch of step {full_from}:"),
        steps_lost=steps_lost(second, third),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_while_converting_it_converts_again_and_leaves_nothing(
    children, undisturbed, tmp_path, seed
):
    folder = new_folder(tmp_path / "folder")
    (leftover,) = [folder / "cache" / "0123.tmp-1-ab"]
    leftover.mkdir(parents=True)
    for name in ("lock", "in_order.bin.tmp-1-ab"):
        (leftover / name).write_bytes(b"x" * 1000)
    began = time.monotonic()
    ended = children.run(folder)
    assert not list((folder / "cache").glob("*.tmp-*")) and time.monotonic() > began
    assert_undisturbed(folder, [ended], undisturbed)
    note(
        "leftovers of a killed conversion",
        seed=seed,
        seconds=ended.seconds_to("that conversion was cut short"),
        steps_lost=0,
    )
