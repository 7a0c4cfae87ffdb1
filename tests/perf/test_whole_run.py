"""scripts/bench_step.py says what is so of a run, and nothing that it starts outlives it."""

import json
import signal
import subprocess
import sys
import time

import pytest

from jaxscale.perf import records
from tests.perf.scripts import ROOT, Script, is_running, with_devices

# Runs bench_step.py with another script for train.py: the script, its TRAIN, its arguments.
REPLACED = """
import importlib.util, sys
from pathlib import Path
from absl import app

path, train, *arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location("script", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
assert hasattr(script, "TRAIN")
script.TRAIN = Path(train)
sys.argv = [path, *arguments]
app.run(script.main, flags_parser=script.parse_own_flags)
"""

# Stands for scripts/train.py: does as many steps as it is let.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

workdir = Path(sys.argv[-1].removeprefix("--workdir="))
workdir.mkdir(parents=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
is_cold = not cache.exists()
cache.mkdir(exist_ok=True)
kept = Path(os.environ["XDG_CACHE_HOME"], "jaxscale")
assert [path.name for path in kept.iterdir()] == ["data"]
(workdir / "config.json").write_text(json.dumps({"batch_size": 4, "seq_len": 100}))
with open(workdir / "metrics.jsonl", "a") as file:
    for step in range(1, 100):
        time.sleep(0.6 if step == 1 else 0.01)
        seconds = {1: 0.6, 3: 0.2, 4: 0.25, 5: 0.5}.get(step, 0.001)
        record = {"step": step, "loss": 9.0 - step, "step_seconds": seconds}
        record |= {"tokens_per_second_per_device": 200 / seconds, "data_wait_seconds": 0.0}
        record |= {"mfu_full": 0.5, "mfu_causal": 0.25, "peak_memory_gib": 70.5}
        if step == 1:
            record |= {"compile_seconds": 0.4 if is_cold else 0.1, "predicted_memory_gib": 69.5}
        file.write(json.dumps(record) + "\\n")
        file.flush()
time.sleep(60)
"""

# Starts a process that its own end would leave behind, and waits.
LEAVES_ONE_BEHIND = """
import subprocess, sys, time
from pathlib import Path

code = "import time; time.sleep(300)"
left = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
Path(__file__).with_name("pid").write_text(str(left.pid))
print("a last word", flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def bench_step():
    return Script("bench_step")


@pytest.fixture
def replace_train(bench_step, tmp_path, monkeypatch):
    """`replace_train(text)`: another script is started for train.py; it is in tmp_path."""

    def replace(text):
        (tmp_path / "train.py").write_text(text)
        monkeypatch.setattr(bench_step.module, "TRAIN", tmp_path / "train.py")

    return replace


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    """A config of a small model on small text."""
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=8)


def wait_for(path):
    deadline = time.monotonic() + 600
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_a_step_is_measured_on_the_real_path_with_the_config_as_it_is(
    bench_step, config_file, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("XLA_FLAGS", with_devices(2))
    settings = ["--config", config_file, "--config.seq_len", 64]
    code = bench_step.run(*settings, "--steps=3", "--skip=2", f"--workdir={tmp_path}")
    output, errors = capfd.readouterr()
    assert code == 0, errors
    line, last = output.splitlines()
    record = json.loads(last)
    (folder,) = tmp_path.iterdir()
    steps = records.steps_of(records.read_records(folder / "cold" / "metrics.jsonl"))
    counted = [step["tokens_per_second_per_device"] for step in steps[2:5]]
    assert record["tokens_per_second_per_device"] == sorted(counted)[1]
    assert record["tokens_per_second_per_device_min"] == min(counted)
    assert record["tokens_per_second_per_device_max"] == max(counted)
    assert line.startswith(f"2 x cpu: {sorted(counted)[1]:,.0f} (") and "MFU n/a" in line
    assert record["num_devices"] == 2 and record["device_kind"] == "cpu" and record["steps"] == 3
    unknown = ("mfu_full", "exposed_communication_share", "time_to_first_step_seconds_warm")
    assert [record[key] for key in unknown] == [None] * 3
    compiled = record["compile_and_first_step_seconds_cold"]
    assert record["time_to_first_step_seconds_cold"] > compiled > 0
    origin = {"commit", "is_dirty", "date", "command", "driver", "versions", "environment"}
    assert origin <= set(record)
    assert record["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"  # as the run set it
    assert record["command"].startswith("python scripts/bench_step.py ")
    assert str(ROOT) not in json.dumps(record)
    assert "--config.seq_len 64" in record["command"]
    assert set(record["versions"].values()) > {None} - {None}
    # Two steps, three that count, one more, three that are profiled: stopped there.
    assert len(steps) >= 9 and list((folder / "cold" / "profile").rglob("*.xplane.pb"))
    # Its settings are the user's.
    run = json.loads((folder / "cold" / "config.json").read_text())
    assert run["seq_len"] == 64 and run["steps"] == 10_000 and not run["checkpoint"]["enabled"]
    assert not (folder / "warm").exists()  # a CPU has no cache to be warm


def test_the_second_start_is_with_the_programs_of_the_first_and_nothing_else_is_kept(
    bench_step, replace_train, two_gpus, tmp_path, monkeypatch, capfd
):
    replace_train(TRAIN)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    code = bench_step.run("--config", "x.py", "--steps=3", "--skip=2")
    output, errors = capfd.readouterr()
    assert code == 0, errors
    assert list((tmp_path / "tmp").iterdir()) == []
    line, last = output.splitlines()
    record = json.loads(last)
    machine = (record["device_kind"], record["num_devices"], record["driver"])
    assert machine == ("NVIDIA H200", 2, "580.1")
    # 200 tokens a device in 0.2, 0.25 and 0.5 s.
    rates = [record[f"tokens_per_second_per_device{end}"] for end in ("", "_min", "_max")]
    assert rates == [800, 400, 1000]
    assert (record["compile_seconds_cold"], record["compile_seconds_warm"]) == (0.4, 0.1)
    assert record["compile_and_first_step_seconds_cold"] == 1.0
    assert 0.6 < record["time_to_first_step_seconds_warm"] < 30
    assert (record["peak_memory_gib"], record["predicted_memory_gib"]) == (70.5, 69.5)
    assert record["exposed_communication_share"] is None
    assert "exposed communication is not known" in errors
    assert line.startswith(
        "2 x NVIDIA H200: 800 (400 - 1,000) tokens/s/device; MFU 50.0% full, 25.0% causal; "
        "compiled in 0.4 s"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--config.modle.num_layers=1"],
            "config.modle is not a setting; did you mean config.model?",
        ),
        (["--stepz=3"], "Unknown command line flag 'stepz'"),
        (
            ["--config.steps=20", "--config.schedule.warmup_steps=1"],
            "config.profile.steps=3: with config.profile.start=31",
        ),
    ],
)
def test_what_the_run_says_of_a_mistake_is_told_with_its_code(
    bench_step, config_file, arguments, told, capfd
):
    assert bench_step.run("--config", config_file, *arguments) == 2
    output, errors = capfd.readouterr()
    assert told in errors and "failed with exit code 2" in errors and output == ""


def test_a_run_that_takes_too_long_ends_with_all_that_it_started(
    bench_step, replace_train, tmp_path, capfd
):
    replace_train(LEAVES_ONE_BEHIND)
    assert bench_step.run("--config", "x.py", "--timeout=6") == 1
    errors = capfd.readouterr().err
    assert "took over 6 s and was stopped" in errors and "| a last word" in errors
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_it_leaves_nothing_running(
    bench_step, tmp_path, signum, spawn, sigint_by_default
):
    train = tmp_path / "train.py"
    train.write_text(LEAVES_ONE_BEHIND)
    command = [sys.executable, "-c", REPLACED, bench_step.path, train, "--config", "x.py"]
    process = spawn(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    left = int(wait_for(tmp_path / "pid"))
    assert is_running(left)
    process.send_signal(signum)
    process.communicate(timeout=600)
    assert process.returncode != 0 and not is_running(left)
