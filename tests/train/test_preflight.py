"""Processes that are not of one run, and GPUs that are not free, are told before a run starts."""

import copy
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from jaxscale import command_line, gpu_facts
from jaxscale.train import free_gpus, preflight

ROOT = Path(__file__).parents[2]
WORKDIR = Path("/shared/run")

LEAD: dict[str, Any] = {
    "process": 0,
    "host": "node1",
    "pid": 100,
    "gpus": [],
    "versions": {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"},
    "driver": "580.95",
    "cards": ["NVIDIA H200"],
    "commit": "a" * 40,
    "code": "c0de",
    "xla_flags": "",
    "config": {"steps": 10, "optim": {"weight_decay": 0.1}},
    "data": {"fingerprint": "f00", "num_tokens": 7},
    "clock": 1000.0,
    "sees": True,
}


def compared(**others):
    """Errors and warnings with a process 1 that is like the lead but for these facts."""
    other = copy.deepcopy(LEAD) | {"process": 1, "host": "node2", "pid": 200} | others
    return preflight.compare([LEAD, other], workdir=WORKDIR)


def test_processes_that_are_alike_have_nothing_to_say():
    assert compared() == ([], [])
    assert preflight.compare([LEAD], workdir=WORKDIR) == ([], [])


ODD: dict[str, tuple[dict, str]] = {
    "jax": ({"versions": LEAD["versions"] | {"jax": "0.10.2"}}, "jax 0.10.2 instead of 0.11.2"),
    "a plugin": (
        {"versions": {"jax": "0.11.2", "jaxlib": "0.11.2"}},
        "no jax-cuda13-plugin instead of 0.11.2",
    ),
    "config": (
        {"config": {"steps": 20, "optim": {"weight_decay": 0.1}}},
        "config.steps=20 instead of 10",
    ),
    "a key inside": (
        {"config": {"steps": 10, "optim": {"weight_decay": 0.0}}},
        "config.optim.weight_decay=0.0 instead of 0.1",
    ),
    "data": ({"data": {"fingerprint": "bad", "num_tokens": 7}}, "data.fingerprint='bad' instead"),
    "workdir": ({"sees": False}, f"--workdir={WORKDIR}"),
}
ONLY_TOLD: dict[str, tuple[dict, str]] = {
    "commit": ({"commit": "b" * 40}, "commit bbbbbbbbbb instead of aaaaaaaaaa"),
    "no commit": ({"commit": None}, "commit unknown instead of aaaaaaaaaa"),
    "code": ({"code": "dirt"}, "others, at the same commit aaaaaaaaaa"),
    "driver": ({"driver": "570.1"}, "driver 570.1 instead of 580.95"),
    "cards": ({"cards": ["NVIDIA H100"]}, "NVIDIA H100 instead of NVIDIA H200"),
    "flags": ({"xla_flags": "--xla_x=1"}, "XLA_FLAGS='--xla_x=1' instead of ''"),
    "clock": ({"clock": 1090.0}, "its clock is 90 s ahead"),
    "clock behind": ({"clock": 900.0}, "its clock is 100 s behind"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_process_of_another_run_is_refused_in_a_line_that_names_it_and_its_host(case):
    facts, words = ODD[case]
    (error,), warnings = compared(**facts)
    assert error.startswith("process 1 (host node2), unlike process 0 (host node1): ")
    assert words in error and "\n" not in error and warnings == []


@pytest.mark.parametrize("case", ONLY_TOLD)
def test_what_may_be_harmless_is_a_warning(case):
    facts, words = ONLY_TOLD[case]
    errors, (warning,) = compared(**facts)
    assert errors == [] and words in warning
    assert warning.startswith("process 1 (host node2), unlike process 0 (host node1): ")


def test_clocks_a_moment_apart_are_alike():
    assert compared(clock=LEAD["clock"] + 9) == ([], [])


def test_a_process_is_named_once_with_all_that_is_odd():
    (error,), _ = compared(versions={"jax": "0.10.2"}, config={}, sees=False)
    assert "jax 0.10.2" in error and "config." in error and "--workdir" in error


def test_many_odd_processes_are_a_few_lines():
    others = [copy.deepcopy(LEAD) | {"process": n, "config": {}} for n in range(1, 100)]
    errors, _ = preflight.compare([LEAD, *others], workdir=WORKDIR)
    lines = preflight.shortened(errors)
    assert len(errors) == 99 and len(lines) == preflight.MOST_LINES
    assert lines[-1] == "and 92 more such lines"


# The commit, without git.


def git(folder, *words):
    names = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(
        ["git", *names, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_is_the_one_that_git_names(tmp_path):
    checkout, tree = tmp_path / "checkout", tmp_path / "tree"
    checkout.mkdir()
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "x")
    wanted = git(checkout, "rev-parse", "HEAD")
    assert preflight.commit(checkout) == wanted
    git(checkout, "worktree", "add", "-q", str(tree), "-b", "other")
    git(tree, "commit", "-q", "--allow-empty", "-m", "y")
    assert preflight.commit(tree) == git(tree, "rev-parse", "HEAD") != wanted
    git(checkout, "pack-refs", "--all")
    assert preflight.commit(checkout) == wanted
    git(checkout, "checkout", "-q", "--detach")
    assert preflight.commit(checkout) == wanted
    assert preflight.commit(tmp_path) is None


def test_a_change_of_the_code_is_another_digest(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "jaxscale" / "ops").mkdir(parents=True)
    (tmp_path / "jaxscale" / "kernels").symlink_to("../kernels")
    files = [tmp_path / name for name in ("jaxscale/ops/a.py", "kernels/b.py")]
    digests = set()
    for number in range(3):
        for file in files:
            file.write_text(f"x = {number}\n")
            digests.add(preflight.code_digest(tmp_path))
    assert len(digests) == 6 and preflight.code_digest(tmp_path) in digests


# GPUs, as nvidia-smi tells of them.

FREE = """\
0, GPU-aaa, NVIDIA H100 80GB HBM3, 580.95.05, Disabled, 81559, 81007
1, GPU-bbb, NVIDIA H100 80GB HBM3, 580.95.05, Disabled, 81559, 81007
"""
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "$(dirname "$0")/gpus";;
  --query-compute-apps=*) cat "$(dirname "$0")/apps";;
esac
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`host(gpus, apps)`: a host on which nvidia-smi says this, and its cards as facts."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv(free_gpus.FRACTION, raising=False)
    monkeypatch.setattr(free_gpus, "installed", lambda name: "0.11.2")
    monkeypatch.setattr(free_gpus, "LEAVING_SECONDS", 0.0)
    monkeypatch.setattr(free_gpus.xla_bridge, "backends_are_initialized", lambda: False)

    def host(gpus=FREE, apps=""):
        (smi.parent / "gpus").write_text(gpus)
        (smi.parent / "apps").write_text(apps)
        return {"process": 0, "host": "node1", "pid": os.getpid(), "gpus": free_gpus.own_gpus()}

    return host


def test_free_gpus_are_no_news(host):
    facts = host()
    assert [gpu["index"] for gpu in facts["gpus"]] == ["0", "1"]
    assert preflight.of_gpus([facts]) == ([], [])


def test_a_gpu_that_another_process_computes_on_is_refused_with_its_pid_and_memory(host):
    used = FREE.replace("Disabled, 81559, 81007\n1", "Disabled, 81559, 39799\n1")
    facts = host(used, "GPU-aaa, 4242, /usr/bin/python3, 41208\n")
    (error,), warnings = preflight.of_gpus([facts])
    assert error.startswith("process 0 (host node1): GPU 0 is in use by pid 4242 (python3, 41,208")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.45" in error and warnings == []


def test_a_run_begins_on_a_gpu_that_is_shared_a_little_and_not_on_one_that_is_taken(
    host, config, caplog, tmp_path
):
    apps = "GPU-bbb, 77, dcgm, 30\n"
    host(apps=apps)
    preflight.check(config, tmp_path, data={})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    host(FREE.replace("81007\n1", "9\n1"), apps)
    with pytest.raises(preflight.BusyGpuError, match="GPU 0 has 9 of 81,559 MiB free"):
        preflight.check(config, tmp_path, data={})


def test_a_process_that_holds_little_is_a_warning(host):
    errors, (warning,) = preflight.of_gpus([host(apps="GPU-bbb, 77, nvidia-cuda-mps-server, 30\n")])
    assert errors == [] and "GPU 1 is also used by pid 77 (nvidia-cuda-mps-server, 30" in warning


def test_memory_that_is_not_told_is_judged_by_what_is_free(host):
    apps = "GPU-aaa, 4242, [Not Found], [N/A]\n"
    assert [len(lines) for lines in preflight.of_gpus([host(apps=apps)])] == [0, 1]
    used = FREE.replace("81007\n1", "9000\n1")
    assert [len(lines) for lines in preflight.of_gpus([host(used, apps)])] == [1, 0]


def test_too_little_free_memory_is_refused_though_nobody_is_seen_to_use_it(host):
    (error,), _ = preflight.of_gpus([host(FREE.replace("81007\n1", "20100\n1"))])
    assert "GPU 0 has 20,100 of 81,559 MiB free, and JAX takes 75,034" in error
    assert error.endswith("set XLA_PYTHON_CLIENT_MEM_FRACTION=0.2")


def test_a_user_who_leaves_room_for_others_may_share_a_gpu(host, monkeypatch):
    monkeypatch.setenv(free_gpus.FRACTION, "0.4")
    used = FREE.replace("81007\n1", "49000\n1")
    errors, (warning,) = preflight.of_gpus([host(used, "GPU-aaa, 4242, python, 32000\n")])
    assert errors == [] and "also used" in warning


def test_processes_of_the_run_and_cards_of_others_do_not_count(host, monkeypatch):
    apps = f"GPU-aaa, {os.getpid()}, python, 75000\nGPU-aaa, 4243, python, 500\n"
    mine = host(apps=apps)
    other = {"process": 1, "host": "node1", "pid": 4243, "gpus": []}
    assert preflight.of_gpus([mine, other]) == ([], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    facts = host(FREE.replace("81007\n1", "9\n1"), "GPU-aaa, 4242, python, 70000\n")
    assert [gpu["index"] for gpu in facts["gpus"]] == ["1"]
    assert preflight.of_gpus([facts]) == ([], [])


@pytest.mark.parametrize("apps", ["", "GPU-aaa, 99999999, python, 75000\n"])
def test_a_pool_that_jax_has_already_is_no_other_process(host, monkeypatch, apps):
    # Seen from a container its own number may be another one.
    monkeypatch.setattr(free_gpus.xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(free_gpus, "_pools", lambda: {0: 75034.0, 1: 0.0})
    assert preflight.of_gpus([host(FREE.replace("81007\n1", "5000\n1"), apps)]) == ([], [])


def test_without_a_driver_or_with_odd_answers_there_is_nothing_to_say(host, monkeypatch):
    assert host("", "")["gpus"] == []
    assert host("NVIDIA H200\nNVIDIA H200\n")["gpus"] == []
    odd = "0, GPU-aaa, NVIDIA H100 80GB HBM3, [N/A], [Not Supported], [N/A], [Unknown Error]\n"
    assert preflight.of_gpus([host(odd, "GPU-aaa, -, x, 1\n")]) == ([], [])
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_facts.query(["index"]) == [] and gpu_facts.topology() == ""


def test_a_process_that_is_leaving_is_waited_for(host, monkeypatch, tmp_path):
    monkeypatch.setattr(free_gpus, "LEAVING_SECONDS", 30.0)
    said = iter(["GPU-aaa, 4242, python, 70000\n", ""])

    def sleep(seconds):
        (tmp_path / "bin" / "apps").write_text(next(said))

    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(free_gpus, "time", clock)
    facts = host(apps="GPU-aaa, 4242, python, 70000\n")
    assert facts["gpus"][0]["apps"] == [] and next(said, None) is None


def test_a_field_that_the_driver_does_not_know_is_left_out(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        """#!/bin/sh
case "$1" in
  *clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'
    exit 2;;
  *) echo "0, 0x0000000000000004";;
esac
"""
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fields = ["index", "clocks_event_reasons.active", "clocks_throttle_reasons.active"]
    (row,) = gpu_facts.query(fields)
    assert row == {"index": "0", "clocks_throttle_reasons.active": "0x0000000000000004"}
    assert gpu_facts.number(row["clocks_throttle_reasons.active"]) == 4


@pytest.fixture
def config(config_file):
    return command_line.read_config([f"--config={config_file}", "--config.steps=999"])


def test_a_run_of_one_process_is_not_held_up(tmp_path, config):
    began = time.perf_counter()
    preflight.check(config, tmp_path, data={})
    assert time.perf_counter() - began < 0.05
    assert list(tmp_path.iterdir()) == []


# Real processes.

# Of the processes that the variable names, each has a setting of its own.
OF_ITS_OWN = """
import dataclasses, os

def get_config(arg="", original=get_config):
    config = original(arg)
    if os.environ.get("JAXSCALE_PROCESS_ID", "") in os.environ.get("ODD", "none").split(","):
        config = dataclasses.replace(config, seed=7, steps=20)
    return config
"""
# Each process trains in a folder of its own.
APART = """
import os, runpy, sys
sys.argv = ["scripts/train.py", *sys.argv[1:-1], sys.argv[-1] + os.environ["JAXSCALE_PROCESS_ID"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    file = write_small_config(tmp_path_factory.mktemp("text"), batch_size=6)
    file.write_text(file.read_text() + OF_ITS_OWN)
    return file


def launch(num, config_file, *, workdir, script="scripts/train.py", **environment):
    command = [sys.executable, "scripts/launch_local.py", "-n", str(num), "--", str(script)]
    command += [f"--config={config_file}", "--config.steps=2", "--config.sample.tokens=0"]
    command += ["--config.schedule.warmup_steps=1"]
    command += ["--config.log.tensorboard=False", "--config.evaluation.batches=1"]
    command += ["--config.checkpoint.enabled=False", f"--workdir={workdir}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_with_another_config_is_named_by_all_before_the_run_begins(config_file, tmp_path):
    code, output = launch(3, config_file, workdir=tmp_path / "run", ODD="1")
    assert code == 2, output
    for process in range(3):
        (line,) = re.findall(rf"^\[{process}\] error: (.*)", output, re.MULTILINE)
        assert re.match(
            r"process 1 \(host .*\), unlike process 0 \(host .*\): config.seed=7 instead of 0: "
            "start all with the same command$",
            line,
        ), output
    assert "Traceback" not in output and "compil" not in output
    assert list((tmp_path / "run").glob(".preflight*")) == []


@pytest.mark.slow
def test_a_workdir_that_is_not_shared_is_refused(config_file, tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART)
    code, output = launch(2, config_file, workdir=tmp_path / "run", script=script)
    assert code == 2, output
    assert re.search(
        r"^\[0\] error: process 1 \(host .*\), unlike process 0 .*: it does not see in "
        "--workdir=.* what process 0 has written there: name a folder that all hosts share",
        output,
        re.MULTILINE,
    ), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_processes_that_agree_say_nothing_of_it(config_file, tmp_path):
    code, output = launch(2, config_file, workdir=tmp_path / "run")
    assert code == 0 and "unlike" not in output and "done: step 2" in output, output
    assert list((tmp_path / "run").glob(".preflight*")) == []
