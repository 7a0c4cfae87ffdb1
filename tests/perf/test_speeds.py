"""The scripts that time the loader and attention say what they timed."""

import json

import numpy as np
import pytest

from jaxscale.data import IndexedWriter
from tests.perf.scripts import Script

LOADER = ["--seq_len=64", "--batch_size=4", "--seconds=0.05", "--vocab_size=300"]


@pytest.fixture(scope="module")
def bench_data():
    return Script("bench_data")


def test_the_loader_is_timed_on_a_synthetic_store_of_each_dtype(bench_data, capsys):
    assert bench_data.run(*LOADER, "--num_tokens=90000") == 0
    lines = capsys.readouterr().out.splitlines()
    stored = [json.loads(line) for line in lines[1::2]]
    assert [record["dtype"] for record in stored] == ["uint16", "int32"]
    for line, record in zip(lines[::2], stored, strict=True):
        assert record["tokens_per_second"] > 0 and record["seq_len"] == 64
        assert f"{record['dtype']} store: " in line and "(2 threads on " in line


def test_the_loader_is_timed_on_a_store_that_is_there(bench_data, tmp_path, capsys):
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for _ in range(50):
            writer.add(np.arange(100, dtype=np.uint16))
    assert bench_data.run(*LOADER, f"--prefix={tmp_path / 'tokens'}") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["num_tokens"], record["mean_document_tokens"]) == (5000, 100)


def test_attention_is_timed_for_each_bound_and_number_of_documents_that_it_allows(capsys):
    script = Script("bench_attention")
    shape = ["--shape=2,32,4,2,16", "--repeats=1"]
    assert script.run(*shape, "--bounds=1,2", "--documents=2") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("rows 2, sequence 32, heads 4/2 x 16, float32")
    assert [line.partition("  forward")[0].strip() for line in lines] == [
        "dense causal",
        "bound   2, documents   2",
    ]
    assert all(float(line.split("backward")[1].split()[0]) > 0 for line in lines)
