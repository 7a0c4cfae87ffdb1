"""scripts/bench_peers.py runs jaxscale and torchtitan alike, and says what is missing."""

import importlib.util
import json
import os
import re
import sys

import pytest

from jaxscale import command_line
from jaxscale.perf import gpus, peer_cases, peers, torchtitan
from jaxscale.perf.processes import FailedError
from tests.perf.scripts import ROOT, Script, is_running

# As torchtitan 0.2.2 prints it, with colours.
LOG = (
    (
        "[default0]:[titan] 2026-11-21 10:03:11,695 - root - WARNING - Error running lspci: "
        "[Errno 2] No such file or directory: 'lspci'"
    ),
    (
        "[rank0]:[titan] 2026-11-21 10:00:00,123 - root - INFO - step: 10  loss:  6.2345  "
        "grad_norm:  1.2  memory: 68.31GiB(48.86%)  tps: 9,550  tflops: 552.91  mfu: 55.91%"
    ),
    (
        "[rank0]:[titan] 2026-11-21 10:00:08,500 - root - INFO - \x1b[31mstep: 15  "
        "\x1b[32mloss:  5.10000  \x1b[38;2;180;60;0mgrad_norm: 12.0152  "
        "\x1b[36mmemory: 68.32GiB(48.87%)  \x1b[34mtps: 10,750  \x1b[36mtflops: 1,064.55  "
        "\x1b[35mmfu: 57.08%\x1b[39m"
    ),
    (
        "[rank0]:[titan] 2026-11-21 10:00:09,500 - root - INFO - validate step: 15  "
        "loss:  5.1000  memory: 68.32GiB(48.87%)  tps: 9,000"
    ),
    (
        "[rank0]:[titan] 2026-11-21 10:00:16,900 - root - INFO - step: 20  loss:  4.90000  "
        "grad_norm:  2.0152  memory: 69.00GiB(49.87%)  tps: 9,747  tflops: 564.55  mfu: 57.10%"
    ),
)

# Stands for a Python with torchtitan: says what it has, then prints the log of a run and leaves a
# worker behind.
PEER = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
if sys.argv[1] == "-c":
    print("some warning")
    print(json.dumps({check}))
    sys.exit()
(here / "arguments.json").write_text(json.dumps(sys.argv[1:]))
(here / "environment.json").write_text(json.dumps(dict(os.environ)))
code = "import time; time.sleep(300)"
worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
(here / "pid").write_text(str(worker.pid))
text = Path(next(word for word in sys.argv if "dataset_path" in word).partition("=")[2])
(here / "first.json").write_text((text / "data.jsonl").read_text().splitlines()[0])
(here / "tokenizer.json").write_text((text.parent / "tokenizer" / "tokenizer.json").read_text())
words = " ".join(sys.argv)
log = {log!r}
print(log.replace("9,747", "9,847") if "layers_per_stage=9" in words else log, flush=True)
if any(word in words for word in {refused!r}):
    print({failure!r})
    sys.exit(1)
time.sleep({seconds})
sys.exit({code})
"""
# As torchrun shows a process that ran out of memory, the one that lost it, and itself.
FAILURE = """
[default0]:[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 31.31 GiB.
[default1]:[rank1]: RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
# Stands for scripts/bench_step.py.
STEP = """
import json, sys
record = dict(tokens_per_second_per_device=10428.0, tokens_per_second_per_device_min=10326.0)
record |= dict(tokens_per_second_per_device_max=10738.0, mfu_full=0.611, peak_memory_gib=101.0)
print("a line")
print(json.dumps(record | dict(arguments=sys.argv[1:])))
"""
CHECK = {"torch": "2.11.0", "torchtitan": "0.2.2", "cuda": "13.0", "num_gpus": 2}

# How ml_collections loads a config file.
loads_a_config = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)


def write_peer(folder, code=0, seconds=0, refused=(), **changes):
    """refused: words of a command line with which it fails."""
    log = "\n".join(LOG)
    path = folder / "python"
    path.write_text(
        PEER.format(
            python=sys.executable,
            check=CHECK | changes,
            log=log,
            code=code,
            seconds=seconds,
            refused=refused,
            failure=FAILURE,
        )
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def bench_peers():
    return Script("bench_peers")


@pytest.fixture
def compare(bench_peers, tmp_path, monkeypatch, capsys):
    """`compare(*arguments, peer=...) -> exit code, output, errors` for 4 rows of Llama 3 8B."""
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.setattr(bench_peers.module, "BENCH_STEP", tmp_path / "step.py")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The cat sat on the mat.")
    config = ["--config", f"{ROOT}/configs/llama3_8b.py", "--config.batch_size=4"]
    text = (f"--config.data.path={tmp_path}/text",)

    def compare(*arguments, peer, data=text):
        has_cases = any("--cases" in argument for argument in arguments)
        settings = () if has_cases else config
        code = bench_peers.run(*settings, *data, f"--peer_python={peer}", *arguments)
        return code, *capsys.readouterr()

    return compare


def arguments_of(folder):
    """Of the peer's last run."""
    return json.loads((folder / "arguments.json").read_text())


@loads_a_config
def test_both_run_by_turns_and_the_ratio_of_their_medians_is_told(two_gpus, compare, tmp_path):
    options = "--training.local_batch_size=1 --activation_checkpoint.mode=none"
    peer = write_peer(tmp_path)
    code, output, errors = compare(
        "--rounds=2", f"--peer_options={options}", "--config.seed=3", peer=peer
    )
    assert code == 0, errors
    record = json.loads(output.splitlines()[-1])
    # The line of step 10 has the mean of steps that do not count.
    theirs = record["systems"]["torchtitan"]
    assert theirs["tokens_per_second_per_device"] == (10750 + 9747) / 2
    assert record["ratio"] == 10428 / ((10750 + 9747) / 2)
    assert [len(system["runs"]) for system in record["systems"].values()] == [2, 2]
    assert record["peer_versions"] == CHECK and record["num_devices"] == 2
    order = [line.partition(",")[0] for line in errors.splitlines() if "round" in line]
    assert order == ["jaxscale", "torchtitan"] * 2
    assert "ratio" in output and "9,747" in output
    assert not is_running(int((tmp_path / "pid").read_text()))

    arguments = arguments_of(tmp_path)
    assert set(arguments) >= {
        "--nproc_per_node=2",
        "--model.flavor=8B",
        "--training.seq_len=8192",
        "--training.local_batch_size=2",
        "--training.steps=30",
        "--compile.enable",
        "--parallelism.data_parallel_shard_degree=2",
    }
    assert arguments[-2:] == options.split()  # after ours: the last counts
    assert theirs["command"].endswith(options)
    ours = record["systems"]["jaxscale"]["runs"][0]["arguments"]
    assert ours[:2] == ["--config", f"{ROOT}/configs/llama3_8b.py"]
    assert {"--config.seed=3", "--nowarm"} <= set(ours)


@loads_a_config
def test_the_peer_gets_the_same_text_a_token_a_byte(two_gpus, compare, tmp_path, monkeypatch):
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
    extension, *others = environment["PYTHONPATH"].split(os.pathsep)
    assert extension.endswith("/extension") and others == [str(tmp_path), str(ROOT / "docs")]


@loads_a_config
def test_a_peer_that_fails_is_told_with_its_last_lines(two_gpus, compare, tmp_path):
    code, output, errors = compare("--order=torchtitan", peer=write_peer(tmp_path, code=3))
    assert code == 1 and "failed with exit code 3" in errors and "tps: 9,747" in errors
    record = json.loads(output.splitlines()[-1])
    assert record["systems"]["torchtitan"]["failures"] == ["failed with exit code 3"]
    assert record["ratio"] is None


@loads_a_config
def test_a_run_that_fails_is_a_row_and_the_others_go_on(two_gpus, compare, tmp_path):
    peer = write_peer(tmp_path, refused=("microbatch_size=1", "no-enable"))
    arguments = ("--cases=pipeline", "--order=1f1b,jaxscale,1f1b_eager,interleaved_2_eager")
    (code, _, errors) = compare(*arguments, peer=peer)
    assert code == 2 and "'interleaved_2_eager' is not one of jaxscale, 1f1b" in errors
    code, output, errors = compare(*arguments[:1], "--order=1f1b,jaxscale,1f1b_eager", peer=peer)
    assert code == 1
    systems = json.loads(output.splitlines()[-1])["systems"]
    told = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 31.31 GiB."
    assert {name: system["failures"] for name, system in systems.items()} == {
        "1f1b": [told],
        "jaxscale": [],
        "1f1b_eager": [told],
    }
    assert f"1f1b          {told}" in output and "10,428" in output and "Traceback" not in errors


@loads_a_config
def test_a_layout_of_ours_alone_is_measured_by_itself(two_gpus, compare, tmp_path):
    chunks = ("--config.pipeline.schedule=interleaved", "--config.pipeline.chunks=8")
    arguments = ("--cases=pipeline", *chunks)
    code, _, errors = compare(*arguments, "--order=jaxscale,1f1b", peer=write_peer(tmp_path))
    assert code == 2 and "torchtitan cannot make 16 chunks of 32 layers" in errors
    code, output, errors = compare(*arguments, "--order=jaxscale", peer=write_peer(tmp_path))
    assert code == 0, errors
    assert list(json.loads(output.splitlines()[-1])["systems"]) == ["jaxscale"]


@loads_a_config
def test_a_stand_in_runs_only_for_what_failed(two_gpus, compare, tmp_path):
    order = "--order=jaxscale,1f1b,interleaved_2,1f1b_eager,interleaved_4_eager"
    peer = write_peer(tmp_path)
    code, output, errors = compare("--cases=pipeline", order, peer=peer)
    assert code == 0, errors
    record = json.loads(output.splitlines()[-1])
    assert list(record["systems"]) == ["jaxscale", "1f1b", "interleaved_2", "interleaved_4_eager"]
    # Of the fastest.
    assert record["ratio_to"] == "interleaved_2"
    assert record["ratio"] == 10428 / 9847
    # Of steps this long each has a line; the case's settings come before the user's.
    assert {"--metrics.log_freq=1", "--training.steps=5"} <= set(arguments_of(tmp_path))
    settings = record["settings"]
    assert settings.index("--config.mesh.stage=2") < settings.index(
        f"--config.data.path={tmp_path}/text"
    )


@loads_a_config
def test_time_that_is_up_is_a_row(two_gpus, compare, tmp_path):
    peer = write_peer(tmp_path, seconds=100)
    code, output, _ = compare("--order=torchtitan", "--timeout=1", peer=peer)
    assert code == 1 and "torchtitan    took over 1 s and was stopped" in output
    code, output, _ = compare("--seconds=50", peer=peer)
    failures = json.loads(output.splitlines()[-1])["systems"]["jaxscale"]["failures"]
    assert code == 1 and re.fullmatch(r"left out, \d+ s are left", failures[0])


@loads_a_config
def test_rows_of_a_long_case_are_one_document_for_both(two_gpus, compare, tmp_path, monkeypatch):
    path = str(tmp_path / "text" / "a.txt")
    monkeypatch.setattr(peers.context_speed, "write_long_text", lambda folder: path)
    code, output, errors = compare(
        "--cases=context_64k", "--order=jaxscale,alltoall", peer=write_peer(tmp_path), data=()
    )
    assert code == 0, errors
    ours = json.loads(output.splitlines()[-1])["systems"]["jaxscale"]["runs"][0]["arguments"]
    assert f"--config.data.path={path}" in ours and "--config.seq_len=65536" in ours
    assert {
        "--training.seq_len=65536",
        "--parallelism.context_parallel_degree=2",
        "--parallelism.context_parallel_rotate_method=alltoall",
        "--activation_checkpoint.mode=full",
    } <= set(arguments_of(tmp_path))
    assert json.loads((tmp_path / "first.json").read_text()) == {"text": "The cat sat on the mat."}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--cases=pipelines"], "--cases=pipelines is not one of pipeline, context_32k"),
        (["--cases=pipeline", "--steps=9"], "a case of --cases has its own"),
        (["--cases=pipeline,context_32k", "--order=1f1b"], "'1f1b' is not one of jaxscale, allg"),
    ],
)
def test_a_case_that_is_not_there_is_told_before_anything_runs(compare, arguments, told):
    code, output, errors = compare(*arguments, peer="nowhere")
    assert code == 2 and told in errors and output == ""


@loads_a_config
@pytest.mark.parametrize("name", peer_cases.CASES)
def test_both_train_the_same_rows_in_a_case(name, tmp_path):
    case = peer_cases.CASES[name]
    config = command_line.read_config([f"--config={ROOT}/configs/llama3_8b.py", *case.settings])
    for variant in case.variants.values():
        options = torchtitan.Options(
            python="python", num_steps=3, skip=1, more=" ".join(variant.options)
        )
        words = torchtitan.command_of(config, options, num_gpus=2, text=tmp_path)
        last = dict(word.split("=", 1) for word in words if "=" in word)
        assert int(last["--training.global_batch_size"]) == config.batch_size
        assert int(last["--training.seq_len"]) == config.seq_len
        assert config.batch_size % int(last["--training.local_batch_size"]) == 0
        assert variant.instead_of == "" or variant.instead_of in case.variants
        if name == "pipeline":
            size = int(last["--parallelism.pipeline_parallel_microbatch_size"])
            assert int(last["--training.local_batch_size"]) // size == config.grad_accumulation


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
    two_gpus, compare, tmp_path, changes, problem
):
    peer = tmp_path / "none" if changes is None else write_peer(tmp_path, **changes)
    code, output, errors = compare(peer=peer)
    assert problem in errors
    assert "pip install torchtitan==0.2.2 torch==" in errors and "--peer_python=" in errors
    assert code == 2 and output == "" and "round" not in errors


@loads_a_config
def test_without_torchtitan_here_it_is_told_how_to_install_it(compare):
    if importlib.util.find_spec("torchtitan"):
        pytest.skip("torchtitan is installed")
    code, _, errors = compare(peer=sys.executable)
    assert code == 2
    assert "No module named 'torch" in errors and "pip install torchtitan==0.2.2" in errors


@loads_a_config
def test_without_gpus_the_peers_are_not_compared(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, _, errors = compare(peer=write_peer(tmp_path))
    assert code == 2 and "no GPU here" in errors


def test_somebody_elses_work_on_the_gpus_is_waited_for(monkeypatch):
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: None)
    used = iter([70.0, 30.0, 0.4])
    monkeypatch.setattr(gpus, "used_memory_gib", lambda: next(used))
    peers.wait_until_idle()
    assert list(used) == []
    monkeypatch.setattr(gpus, "used_memory_gib", lambda: 70.0)
    with pytest.raises(FailedError, match="a GPU holds 70.0 GiB"):
        peers.wait_until_idle()
