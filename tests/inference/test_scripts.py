"""The way of a model: from Hugging Face, into a run, asked, judged, and back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxscale.models import families, model_folder
from tests.inference.hf_folders import make_golden, record_of
from tests.perf.scripts import with_devices

ROOT = Path(__file__).parents[2]


def run(script, *words):
    """In a process of its own; each script once, and what comes after it in a fork."""
    command = [sys.executable, f"scripts/{script}.py", *map(str, words)]
    environment = os.environ | {"XLA_FLAGS": with_devices(2)}
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def run_in_fork(forks):
    def run_in_fork(script, *words, code=0):
        answer = forks.run(script, *words, XLA_FLAGS=with_devices(2))
        assert answer.code == code and "Traceback" not in answer.err, answer.err
        return answer

    return run_in_fork


@pytest.fixture(scope="module")
def way(tmp_path_factory, write_small_config):
    """A model folder, and a run that was made of it; the vocabulary holds bytes."""
    folder = tmp_path_factory.mktemp("way")
    record = record_of("llama3.1")
    config = record["config"] | {"vocab_size": 300}
    model = model_folder.model_of(config)
    shapes = {t.name: t.shape for t in families.of_config(model).hugging_face_names(model)}
    weights = make_golden.draw(shapes, seed=0, norm=record["norm"])
    model_folder.write(folder / "hf", weights.items(), dtype="float32", config_json=config)
    path = write_small_config(folder, batch_size=8)
    words = (f"--hf={folder / 'hf'}", f"--workdir={folder / 'run'}", f"--config={path}")
    run("convert_hf", "import", *words)
    return folder


def test_what_is_imported_is_exported_bit_by_bit(run_in_fork, way):
    words = ("export", f"--workdir={way / 'run'}", f"--output={way / 'back'}")
    run_in_fork("convert_hf", *words, "--dtype=float32")
    before, after = (load_file(way / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])
    there, back = (json.loads((way / name / "config.json").read_text()) for name in ("hf", "back"))
    assert there == back
    again = run_in_fork("convert_hf", *words, code=2)
    assert "exists; name a new folder" in again.err


def test_a_run_and_its_folder_say_the_same(run_in_fork, way):
    words = ("--prompt=The cat", "--prompt=moon", "--temperature=0", "--max_tokens=20")
    of_run = run("generate", f"--workdir={way / 'run'}", "--dtype=float32", *words).stdout
    of_folder = run_in_fork(
        "generate", f"--hf={way / 'hf'}", "--tokenizer=bytes", "--dtype=float32", *words
    )
    assert of_run == of_folder.out
    assert of_run.startswith("The cat") and "\n---\nmoon" in of_run


def test_text_is_judged_by_file_and_folder(way):
    output = way / "scores.json"
    done = run(
        "evaluate", f"--workdir={way / 'run'}", f"--data={way}/[012].txt", f"--output={output}"
    )
    records = json.loads(output.read_text())
    names = [Path(record["name"]).name for record in records]
    assert names == ["0.txt", "1.txt", "2.txt", "all"]
    total = records[-1]
    assert total["num_tokens"] == sum(record["num_tokens"] for record in records[:-1])
    np.testing.assert_allclose(total["perplexity"], np.exp(total["nats_per_token"]))
    assert f"perplexity {total['perplexity']:,.2f}" in done.stdout


def test_training_starts_from_the_folders_weights(run_in_fork, way):
    words = (f"--config={way / 'config.py'}", f"--config.model=hf:{way / 'hf'}")
    settings = ("--config.steps=2", "--config.schedule.warmup_steps=1", "--config.sample.tokens=0")
    workdir = way / "trained"
    done = run(
        "train", *words, f"--config.init_from=hf:{way / 'hf'}", f"--workdir={workdir}", *settings
    )
    assert "tensors read from" in done.stdout
    assert (workdir / "hugging_face" / "config.json").is_file()
    other = (f"--workdir={way / 'other'}", "--config.model.mlp_dim=64", *settings)
    init = f"--config.init_from=hf:{way / 'hf'}"
    refused = run_in_fork("train", *words, init, *other, code=2)
    assert "config.model.mlp_dim: saved 48, now 64" in refused.err


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("convert_hf", [], "write import or export first"),
        ("convert_hf", ["export"], "--workdir is missing"),
        ("convert_hf", ["export", "--workdir=/none", "--output=x"], "holds no run"),
        ("generate", ["--prompt=x"], "name one of --workdir=DIR"),
        ("generate", ["--hf=/none", "--prompt=x"], "has no config.json"),
        ("generate", ["--hf=/none", "--prompt=x", "--top_p=2"], "top_p=2.0: set it"),
        ("evaluate", ["--hf=/none"], "--data"),
    ],
)
def test_a_mistake_is_told_in_a_line(run_in_fork, script, words, message):
    done = run_in_fork(script, *words, code=2)
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 3
