"""What the benchmark scripts say is so, and nothing that they start outlives them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl.testing import flagsaver

from jaxscale import command_line
from jaxscale.perf import bench

ROOT = Path(__file__).parents[1]
BENCH_STEP = ROOT / "scripts" / "bench_step.py"

spec = importlib.util.spec_from_file_location("bench_peers", ROOT / "scripts" / "bench_peers.py")
assert spec and spec.loader
bench_peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_peers)

# As torchtitan 0.2.2 prints it, with colours.
LOG = """
[default0]:[titan] 2026-11-21 10:03:11,695 - root - WARNING - Error running lspci: [Errno 2] No such file or directory: 'lspci'
[rank0]:[titan] 2026-11-21 10:00:00,123 - root - INFO - step: 10  loss:  6.2345  grad_norm:  1.2  memory: 68.31GiB(48.86%)  tps: 9,550  tflops: 552.91  mfu: 55.91%
[rank0]:[titan] 2026-11-21 10:00:08,500 - root - INFO - \x1b[31mstep: 15  \x1b[32mloss:  5.10000  \x1b[38;2;180;60;0mgrad_norm: 12.0152  \x1b[36mmemory: 68.32GiB(48.87%)  \x1b[34mtps: 10,750  \x1b[36mtflops: 1,064.55  \x1b[35mmfu: 57.08%\x1b[39m
[rank0]:[titan] 2026-11-21 10:00:09,500 - root - INFO - validate step: 15  loss:  5.1000  memory: 68.32GiB(48.87%)  tps: 9,000
[rank0]:[titan] 2026-11-21 10:00:16,900 - root - INFO - step: 20  loss:  4.90000  grad_norm:  2.0152  memory: 69.00GiB(49.87%)  tps: 9,747  tflops: 564.55  mfu: 57.10%
"""


# Runs a script with some of its constants replaced: SCRIPT, NAME=PATH ..., --, its arguments.
REPLACED = """
import importlib.util, sys
from pathlib import Path
from absl import app

path, rest = sys.argv[1], sys.argv[2:]
spec = importlib.util.spec_from_file_location("script", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
for word in rest[:rest.index("--")]:
    name, _, value = word.partition("=")
    assert hasattr(script, name)
    setattr(script, name, Path(value))
sys.argv = [path, *rest[rest.index("--") + 1:]]
app.run(script.main, flags_parser=script.parse_own_flags)
"""

# Stands for scripts/train.py: does as many steps as it is let.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

workdir = Path(sys.argv[-1].removeprefix("--workdir="))
workdir.mkdir(parents=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
is_cold = not cache.exists()
cache.mkdir(exist_ok=True)
assert [path.name for path in Path(os.environ["XDG_CACHE_HOME"], "jaxscale").iterdir()] == ["data"]
(workdir / "config.json").write_text(json.dumps({"batch_size": 4, "seq_len": 100}))
with open(workdir / "metrics.jsonl", "a") as file:
    for step in range(1, 100):
        time.sleep(0.6 if step == 1 else 0.01)
        seconds = {1: 0.6, 3: 0.2, 4: 0.25, 5: 0.5}.get(step, 0.001)
        record = {"step": step, "loss": 9.0 - step, "step_seconds": seconds, "data_wait_seconds": 0.0}
        record |= {"tokens_per_second_per_device": 200 / seconds, "mfu_full": 0.5, "mfu_causal": 0.25, "peak_memory_gib": 70.5}
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

NVIDIA_SMI = """#!/bin/sh
case "$1" in
  *name*) echo "NVIDIA H200"; echo "NVIDIA H200";;
  *driver*) echo 580.1; echo 580.1;;
  *memory*) echo 300; echo 300;;
esac
"""


def start(script, *arguments, replaced=None, **environment):
    command = [script, *arguments]
    if replaced:
        command = [
            "-c",
            REPLACED,
            script,
            *(f"{name}={path}" for name, path in replaced.items()),
            "--",
            *arguments,
        ]
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process, code=0):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, output + errors
    return output, errors


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def two_gpus(tmp_path):
    """The environment of a machine with two GPUs, as far as nvidia-smi goes."""
    (tmp_path / "bin").mkdir()
    write_script(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": ""}


def wait_for(path):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The step.


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    """A config of a small model on small text."""
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=8)


def test_a_step_is_measured_on_the_real_path_with_the_config_as_it_is(config_file, tmp_path):
    process = start(
        BENCH_STEP,
        "--config",
        config_file,
        "--config.seq_len",
        64,
        "--steps=3",
        "--skip=2",
        f"--workdir={tmp_path}",
    )
    output, _ = finish(process)
    line, last = output.splitlines()
    record = json.loads(last)
    (folder,) = tmp_path.iterdir()
    steps = bench.steps_of(bench.read_records(folder / "cold" / "metrics.jsonl"))
    counted = [step["tokens_per_second_per_device"] for step in steps[2:5]]
    assert record["tokens_per_second_per_device"] == sorted(counted)[1]
    assert record["tokens_per_second_per_device_min"] == min(counted)
    assert record["tokens_per_second_per_device_max"] == max(counted)
    assert line.startswith(f"8 x cpu: {sorted(counted)[1]:,.0f} (") and "MFU n/a" in line
    assert record["num_devices"] == 8 and record["device_kind"] == "cpu" and record["steps"] == 3
    assert (
        record["mfu_full"]
        is record["exposed_communication_share"]
        is record["time_to_first_step_seconds_warm"]
        is None
    )
    assert (
        record["time_to_first_step_seconds_cold"]
        > record["compile_and_first_step_seconds_cold"]
        > 0
    )
    assert {"commit", "is_dirty", "date", "command", "driver", "versions", "environment"} <= set(
        record
    )
    assert record["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"  # as the run set it
    assert record["command"].startswith("python scripts/bench_step.py ") and str(
        ROOT
    ) not in json.dumps(record)
    assert "--config.seq_len 64" in record["command"] and set(record["versions"].values()) > {
        None
    } - {None}
    # Two steps, three that count, one more, three that are profiled: stopped there, and its settings are the user's.
    assert len(steps) >= 9 and list((folder / "cold" / "profile").rglob("*.xplane.pb"))
    run = json.loads((folder / "cold" / "config.json").read_text())
    assert run["seq_len"] == 64 and run["steps"] == 10_000 and not run["checkpoint"]["enabled"]
    assert not (folder / "warm").exists()  # a CPU has no cache to be warm


def test_the_second_start_is_with_the_programs_of_the_first_and_nothing_else_is_kept(
    two_gpus, tmp_path
):
    train = write_script(tmp_path / "train.py", TRAIN)
    (tmp_path / "tmp").mkdir()
    process = start(
        BENCH_STEP, "--config", "x.py", "--steps=3", "--skip=2", replaced={"TRAIN": train}, TMPDIR=str(tmp_path / "tmp"), **two_gpus
    )  # fmt: skip
    output, errors = finish(process)
    assert list((tmp_path / "tmp").iterdir()) == []
    line, last = output.splitlines()
    record = json.loads(last)
    assert (record["device_kind"], record["num_devices"], record["driver"]) == (
        "NVIDIA H200",
        2,
        "580.1",
    )
    # 200 tokens a device in 0.2, 0.25 and 0.5 s.
    assert [record[f"tokens_per_second_per_device{end}"] for end in ("", "_min", "_max")] == [
        800,
        400,
        1000,
    ]
    assert (record["compile_seconds_cold"], record["compile_seconds_warm"]) == (0.4, 0.1)
    assert record["compile_and_first_step_seconds_cold"] == 1.0
    assert 0.6 < record["time_to_first_step_seconds_warm"] < 30
    assert (record["peak_memory_gib"], record["predicted_memory_gib"]) == (70.5, 69.5)
    assert (
        record["exposed_communication_share"] is None
        and "exposed communication is not known" in errors
    )
    assert line.startswith(
        "2 x NVIDIA H200: 800 (400 - 1,000) tokens/s/device; MFU 50.0% full, 25.0% causal; compiled in 0.4 s"
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
def test_what_the_run_says_when_it_fails_is_told(config_file, arguments, told):
    output, errors = finish(start(BENCH_STEP, "--config", config_file, *arguments), code=1)
    assert told in errors and "failed with exit code 2" in errors and output == ""


def test_a_run_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    train = write_script(tmp_path / "train.py", LEAVES_ONE_BEHIND)
    process = start(BENCH_STEP, "--config", "x.py", "--timeout=3", replaced={"TRAIN": train})
    _, errors = finish(process, code=1)
    assert "took over 3 s and was stopped" in errors and "| a last word" in errors
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_it_leaves_nothing_running(tmp_path, signum):
    train = write_script(tmp_path / "train.py", LEAVES_ONE_BEHIND)
    process = start(BENCH_STEP, "--config", "x.py", replaced={"TRAIN": train})
    left = int(wait_for(tmp_path / "pid"))
    assert is_running(left)
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode != 0 and not is_running(left)


# The peer.


def test_the_lines_of_torchtitan_are_read_through_colours_and_separators():
    lines = bench_peers.parse_lines(LOG)
    assert [line["step"] for line in lines] == [10, 15, 20]
    assert [line["tokens_per_second_per_device"] for line in lines] == [9550, 10750, 9747]
    assert [line["mfu_full"] for line in lines] == pytest.approx([0.5591, 0.5708, 0.5710])
    assert [line["peak_memory_gib"] for line in lines] == [68.31, 68.32, 69.0]
    figures = bench_peers.peer_figures(lines)
    assert (
        figures["tokens_per_second_per_device"] == 9747
        and figures["tokens_per_second_per_device_max"] == 10750
    )


# How ml_collections loads a config file.
loads_a_config = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)


@loads_a_config
@pytest.mark.parametrize(("file", "flavor"), [("llama3_8b", "8B"), ("llama3_70b", "70B")])
def test_a_llama_config_has_the_name_that_torchtitan_gives_it(file, flavor):
    assert (
        bench_peers.flavor_of(
            command_line.read_config([f"--config={ROOT}/configs/{file}.py"]).model
        )
        == flavor
    )


@loads_a_config
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["--config.model.num_layers=16", "--config.scan_unroll=1"],
            "no Llama 3 with 4096, 16, 32, 8, 14336. It has, by model_dim, .*8B: 4096, 32",
        ),
        (["--config.model.tie_embeddings"], "no Llama 3 with config.model.tie_embeddings=True"),
        (["--config.model.head_size", "64"], "no Llama 3 with config.model.head_size=64"),
        (["--config.model.vocab_size=257"], "no Llama 3 with config.model.vocab_size=257"),
    ],
)
def test_a_model_that_torchtitan_has_not_is_refused_with_those_it_has(settings, told):
    config = command_line.read_config(["--config", f"{ROOT}/configs/llama3_8b.py", *settings])
    with pytest.raises(ValueError, match=told):
        bench_peers.flavor_of(config.model)


# Stands for a Python with torchtitan: says what it has, then prints the log of a run and leaves a worker behind.
PEER = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
if sys.argv[1] == "-c":
    print("some warning")
    print(json.dumps({check}))
    sys.exit()
(here / "arguments.json").write_text(json.dumps(sys.argv[1:]))
(here / "environment.json").write_text(json.dumps(dict(os.environ)))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
(here / "pid").write_text(str(worker.pid))
text = Path(next(word for word in sys.argv if "dataset_path" in word).partition("=")[2])
(here / "first.json").write_text((text / "data.jsonl").read_text().splitlines()[0])
(here / "tokenizer.json").write_text((text.parent / "tokenizer" / "tokenizer.json").read_text())
print({log!r})
sys.exit({code})
"""
# Stands for scripts/bench_step.py.
STEP = """
import json, sys
record = dict(tokens_per_second_per_device=10428.0, tokens_per_second_per_device_min=10326.0)
record |= dict(tokens_per_second_per_device_max=10738.0, mfu_full=0.611, peak_memory_gib=101.0, arguments=sys.argv[1:])
print("a line")
print(json.dumps(record))
"""
CHECK = {"torch": "2.11.0", "torchtitan": "0.2.2", "cuda": "13.0", "num_gpus": 2}


def write_peer(folder, code=0, **changes):
    text = PEER.format(python=sys.executable, check=CHECK | changes, log=LOG, code=code)
    return write_script(folder / "python", text)


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """`compare(*arguments, peer=...) -> exit code, output, errors` of bench_peers.py for 4 rows of Llama 3 8B."""
    monkeypatch.setattr(bench_peers, "BENCH_STEP", write_script(tmp_path / "step.py", STEP))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The cat sat on the mat.")
    config = [
        "--config",
        f"{ROOT}/configs/llama3_8b.py",
        "--config.batch_size=4",
        f"--config.data.path={tmp_path}/text",
    ]

    def compare(*arguments, peer):
        with flagsaver.flagsaver():
            code = bench_peers.main(
                command_line.parse_own_flags(
                    ["bench_peers.py", *config, f"--peer_python={peer}", *arguments]
                )
            )
        return code, *capsys.readouterr()

    return compare


@pytest.fixture
def two_gpus_here(two_gpus, monkeypatch):
    for name, value in two_gpus.items():
        monkeypatch.setenv(name, value)


@loads_a_config
def test_both_run_by_turns_and_the_ratio_of_their_medians_is_told(two_gpus_here, compare, tmp_path):
    options = "--training.local_batch_size=1 --activation_checkpoint.mode=none"
    peer = write_peer(tmp_path)
    code, output, errors = compare(
        "--rounds=2", f"--peer_options={options}", "--config.seed=3", peer=peer
    )
    assert code == 0, errors
    record = json.loads(output.splitlines()[-1])
    # The line of step 10 has the mean of steps that do not count.
    assert record["systems"]["torchtitan"]["tokens_per_second_per_device"] == (10750 + 9747) / 2
    assert record["ratio"] == 10428 / ((10750 + 9747) / 2)
    assert [len(system["runs"]) for system in record["systems"].values()] == [2, 2]
    assert record["peer_versions"] == CHECK and record["num_devices"] == 2
    order = [line.partition(",")[0] for line in errors.splitlines() if "round" in line]
    assert order == ["jaxscale", "torchtitan"] * 2
    assert "ratio" in output and "9,747" in output
    assert not is_running(int((tmp_path / "pid").read_text()))

    arguments = json.loads((tmp_path / "arguments.json").read_text())
    wanted = ["--nproc_per_node=2", "--model.flavor=8B", "--training.seq_len=8192", "--training.local_batch_size=2",
              "--training.steps=30", "--compile.enable", "--parallelism.data_parallel_shard_degree=2"]  # fmt: skip
    assert set(wanted) <= set(arguments)
    assert arguments[-2:] == options.split()  # after ours: the last counts
    assert record["systems"]["torchtitan"]["command"].endswith(options)
    ours = record["systems"]["jaxscale"]["runs"][0]["arguments"]
    assert ours[:2] == ["--config", f"{ROOT}/configs/llama3_8b.py"] and {
        "--config.seed=3",
        "--nowarm",
    } <= set(ours)


@loads_a_config
def test_the_peer_gets_the_same_text_a_token_a_byte(two_gpus_here, compare, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), ".", "docs", "")))
    assert compare(peer=write_peer(tmp_path))[0] == 0
    assert json.loads((tmp_path / "first.json").read_text()) == {"text": "The cat sat on the mat."}
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "The cat\n\tsat, übrigens 🐈 "
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert {tokenizer.token_to_id(word) for word in ("<s>", "</s>")} == {256, 257}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["HF_HUB_OFFLINE"] == "1"
    # Its folders are absolute, as it runs in another one, and jaxscale's is not among them.
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}{ROOT / 'docs'}"


@loads_a_config
def test_a_peer_that_fails_is_told_with_its_last_lines(two_gpus_here, compare, tmp_path):
    code, _, errors = compare("--order=torchtitan", peer=write_peer(tmp_path, code=3))
    assert code == 1 and "failed with exit code 3" in errors and "tps: 9,747" in errors


@loads_a_config
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (None, "No such file or directory"),
        (dict(cuda=None), "torch 2.11.0 is built without CUDA"),
        (dict(num_gpus=0), "sees no GPU here"),
    ],
)
def test_a_peer_that_is_missing_is_told_before_anything_runs(
    two_gpus_here, compare, tmp_path, changes, problem
):
    peer = tmp_path / "none" if changes is None else write_peer(tmp_path, **changes)
    code, output, errors = compare(peer=peer)
    assert (
        problem in errors
        and "pip install torchtitan==0.2.2 torch==" in errors
        and "--peer_python=" in errors
    )
    assert code == 2 and output == "" and "round" not in errors


def test_without_torchtitan_here_it_is_told_how_to_install_it(tmp_path):
    if importlib.util.find_spec("torchtitan"):
        pytest.skip("torchtitan is installed")
    config = ["--config", ROOT / "configs" / "llama3_8b.py", "--config.batch_size=4"]
    _, errors = finish(start(ROOT / "scripts" / "bench_peers.py", *config), code=2)
    assert "No module named 'torch" in errors and "pip install torchtitan==0.2.2" in errors


@loads_a_config
def test_without_gpus_the_peers_are_not_compared(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, _, errors = compare(peer=write_peer(tmp_path))
    assert code == 2 and "no GPU here" in errors


def test_somebody_elses_work_on_the_gpus_is_waited_for(monkeypatch):
    monkeypatch.setattr(bench_peers.time, "sleep", lambda seconds: None)
    used = iter([70.0, 30.0, 0.4])
    monkeypatch.setattr(bench, "used_memory_gib", lambda: next(used))
    bench_peers.wait_until_idle()
    assert list(used) == []
    monkeypatch.setattr(bench, "used_memory_gib", lambda: 70.0)
    with pytest.raises(bench.FailedError, match="a GPU holds 70.0 GiB"):
        bench_peers.wait_until_idle()
