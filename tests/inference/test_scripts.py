"""The way of a model: from Hugging Face, into a run, asked, judged, and back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxscale.models import families, model_folder
from tests.inference.hf_folders import make_golden, record_of

ROOT = Path(__file__).parents[2]


def run(script, *words, stdin=""):
    command = [sys.executable, f"scripts/{script}.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done


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
    done = run("convert_hf", "import", *words)
    assert done.returncode == 0, done.stderr
    return folder


def test_what_is_imported_is_exported_bit_by_bit(way):
    done = run(
        "convert_hf",
        "export",
        f"--workdir={way / 'run'}",
        f"--output={way / 'back'}",
        "--dtype=float32",
    )
    assert done.returncode == 0, done.stderr
    before, after = (load_file(way / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])
    there, back = (json.loads((way / name / "config.json").read_text()) for name in ("hf", "back"))
    assert there == back
    again = run("convert_hf", "export", f"--workdir={way / 'run'}", f"--output={way / 'back'}")
    assert again.returncode == 2 and "exists; name a new folder" in again.stderr


def test_a_run_and_its_folder_say_the_same(way):
    words = ("--prompt=The cat", "--prompt=moon", "--temperature=0", "--max_tokens=20")
    of_run = run("generate", f"--workdir={way / 'run'}", "--dtype=float32", *words)
    of_folder = run(
        "generate", f"--hf={way / 'hf'}", "--tokenizer=bytes", "--dtype=float32", *words
    )
    assert of_run.returncode == of_folder.returncode == 0, of_folder.stderr
    assert of_run.stdout == of_folder.stdout
    assert of_run.stdout.startswith("The cat") and "\n---\nmoon" in of_run.stdout


def test_text_is_judged_by_file_and_folder(way):
    output = way / "scores.json"
    done = run("evaluate", f"--workdir={way / 'run'}", f"--data={way}/*.txt", f"--output={output}")
    assert done.returncode == 0, done.stderr
    records = json.loads(output.read_text())
    names = [Path(record["name"]).name for record in records]
    assert names == [f"{n}.txt" for n in range(8)] + ["all"]
    total = records[-1]
    assert total["num_tokens"] == sum(record["num_tokens"] for record in records[:-1])
    np.testing.assert_allclose(total["perplexity"], np.exp(total["nats_per_token"]))
    assert f"perplexity {total['perplexity']:,.2f}" in done.stdout


def test_training_starts_from_the_folders_weights(way):
    words = (f"--config={way / 'config.py'}", f"--config.model=hf:{way / 'hf'}")
    settings = ("--config.steps=2", "--config.schedule.warmup_steps=1", "--config.sample.tokens=0")
    workdir = way / "trained"
    done = run(
        "train", *words, f"--config.init_from=hf:{way / 'hf'}", f"--workdir={workdir}", *settings
    )
    assert done.returncode == 0, done.stderr
    assert "tensors read from" in done.stdout
    assert (workdir / "hugging_face" / "config.json").is_file()
    other = (f"--workdir={way / 'other'}", "--config.model.mlp_dim=64", *settings)
    refused = run("train", *words, f"--config.init_from=hf:{way / 'hf'}", *other)
    assert refused.returncode == 2
    assert "config.model.mlp_dim: saved 48, now 64" in refused.stderr


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
def test_a_mistake_is_told_in_a_line(script, words, message):
    done = run(script, *words)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
