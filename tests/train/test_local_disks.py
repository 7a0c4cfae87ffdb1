"""Of a run on two hosts, each with a disk of its own, what is newer there, and whole, is taken.

By scripts/launch_local.py; each process has a local folder that the other does not know.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from jaxscale.checkpoint import tiers
from tests.train.hosts import PATIENCE, children, finish, launch, losses

pytestmark = pytest.mark.slow

# Each process on a disk of its own.
DISKS = """

def get_config(arg="", original=get_config):
    import os
    config = original(arg)
    config.checkpoint.local = f"{disks}/host" + os.environ.get("JAXSCALE_PROCESS_ID", "0")
    return config
"""
# Process 1 hangs while it copies its second file of step 8; nobody goes beyond step 10.
HANGS_IN_COPY = """
import os, shutil, time
from jaxscale.train.recorder import Recorder

files = []

def copyfile(source, target, original=shutil.copyfile):
    files.append(str(target))
    of_step = [name for name in files if "/8.saving/" in name]
    if len(of_step) == 2 and os.environ["JAXSCALE_PROCESS_ID"] == "1":
        time.sleep(3600)
    return original(source, target)

def step(self, number, metrics, *, state, original=Recorder.step):
    if number == 10:
        time.sleep(3600)
    return original(self, number, metrics, state=state)

shutil.copyfile, Recorder.step = copyfile, step
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("text"), batch_size=8)


@pytest.fixture(scope="module")
def undisturbed(config_file, tmp_path_factory):
    """The losses of a run without local disks that nothing happened to."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(launch(2, workdir, config=config_file))
    return losses(workdir)


class Hosts:
    """The workdir and the disks of a run in `folder`."""

    def __init__(self, folder, config_file):
        self.folder, self.workdir, self._source = folder, folder / "run", config_file.read_text()
        self.checkpoints = self.workdir / "checkpoints"

    def start(self, num=2, *settings, fault=""):
        config = self.folder / "disks.py"
        config.write_text(fault + self._source + DISKS.replace("{disks}", str(self.folder)))
        return launch(num, self.workdir, *settings, config=config)

    def part(self, process, step):
        id = (self.checkpoints / tiers.ID).read_text()
        return self.folder / f"host{process}" / id / f"part-{process}" / str(step)

    def names(self):
        return sorted(path.name for path in self.checkpoints.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def killed(config_file, tmp_path_factory):
    """Hosts whose run was killed while step 8, whole on their disks, was copied."""
    hosts = Hosts(tmp_path_factory.mktemp("killed"), config_file)
    started = hosts.start(fault=HANGS_IN_COPY)
    deadline = time.monotonic() + PATIENCE
    while not list(hosts.checkpoints.glob("8.saving/state/ocdbt.process_1/*")):
        assert started[0].poll() is None and time.monotonic() < deadline, Path(
            started[1]
        ).read_text()
        time.sleep(0.05)
    for process in children(started[0].pid):
        os.kill(process, signal.SIGKILL)
    finish(started, code=137)
    assert hosts.names() == ["4", "8.saving"]
    assert all(hosts.part(process, 8).is_dir() for process in (0, 1))
    return hosts


@pytest.fixture
def hosts(killed, config_file, tmp_path):
    """A copy of them, as they were."""
    for path in killed.folder.glob("*"):
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    return Hosts(tmp_path, config_file)


def test_a_run_that_was_killed_while_it_copied_goes_on_from_the_local_disks_bit_for_bit(
    hosts, undisturbed
):
    output = finish(hosts.start())
    assert "step 8 is newer on the local disks: copied, " in output
    assert "continuing from the checkpoint of step 8" in output
    assert hosts.names() == ["12", "4", "8"]
    assert losses(hosts.workdir) == undisturbed


def lose_the_disk(hosts):
    shutil.rmtree(hosts.folder / "host1")


def flip_a_bit(hosts):
    (path,) = hosts.part(1, 8).glob("state/ocdbt.process_1/manifest.ocdbt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_again(hosts):
    path = hosts.part(1, 8) / "part.json"
    path.write_text(path.read_text().replace('"save": "', '"save": "another-'))


LACKS = "step 8 on the local disks lacks the part of process {} of 2: its host is not among these"
TROUBLES = {
    "a host is lost": (lose_the_disk, LACKS.format(1)),
    "a part is damaged": (
        flip_a_bit,
        r"saving step 8 to .* failed: process 1 \(host .*\): OSError: the copy of .*/part-1/8 is "
        "not what was saved: state/ocdbt.process_1/manifest.ocdbt has changed since it was saved",
    ),
    "parts of two saves": (save_again, LACKS.format("[01]")),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_where_a_part_cannot_be_had_the_newest_shared_step_is_gone_on_from_bit_for_bit(
    hosts, undisturbed, trouble
):
    do, said = TROUBLES[trouble]
    do(hosts)
    output = finish(hosts.start())
    (told,) = re.findall(rf"^.*{said}.*$", output, re.MULTILINE)
    assert told.startswith("[0] ") and told.endswith(". Going on from step 4")
    assert "continuing from the checkpoint of step 4" in output and "Traceback" not in output
    assert hosts.names() == ["12", "4", "8"]
    assert losses(hosts.workdir) == undisturbed
