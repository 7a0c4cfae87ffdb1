"""The scripts that time the loader and kernels say what they timed."""

import json

import jax
import numpy as np
import pytest

from jaxscale.data import IndexedWriter
from jaxscale.kernels import xla_attention
from jaxscale.ops.documents import documents_of
from jaxscale.perf import attention_speed, turns
from tests.perf.scripts import Script

LOADER = ["--seq_len=64", "--batch_size=4", "--seconds=0.05", "--vocab_size=300"]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """A CPU has no clock that would have to settle."""
    monkeypatch.setattr(turns, "SECONDS", 0.0)


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


def test_rows_of_files_are_full_and_hold_no_more_documents_than_their_bound():
    case = attention_speed.CASES["files"]
    packed = case.documents
    assert [sum(row) for row in packed.lengths] == [case.seq] * case.rows
    assert max(map(len, packed.lengths)) <= packed.most
    segments = case.segments()
    assert segments.shape == (case.rows, case.seq)
    assert segments.max(1).tolist() == [len(row) for row in packed.lengths]
    # Each query sees itself and what is before it in its document.
    begins = np.stack([np.maximum.accumulate(_begins(row)) for row in segments])
    assert case.pairs() == case.heads * int((np.arange(case.seq) - begins + 1).sum())


def test_documents_as_a_mask_are_attended_to_as_documents(monkeypatch):
    # By XLA: there is no cuDNN on a CPU.
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **options: attend(*arrays, **options),
    )
    case = attention_speed.CASES["tiny"]
    q, k, v = (
        jax.random.normal(jax.random.key(heads), (case.rows, case.seq, heads, case.head_size))
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    segments = case.segments()
    documents = documents_of(segments, segments, max_documents=case.documents.bound)
    expected = xla_attention.reference(q, k, v, documents=documents, scale=case.head_size**-0.5)
    found = attention_speed.with_mask(case)(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def _begins(segments):
    """Of the document of each token that begins one; 0 for others."""
    is_first = np.diff(segments, prepend=0) > 0
    return np.where(is_first, np.arange(len(segments)), 0)


def test_what_is_timed_on_several_arrays_in_one_program_is_traced_once():
    traced = []

    def double(x):
        traced.append(x.shape)
        return 2 * x

    sets = [(np.full(4, number, np.float32),) for number in range(3)]
    assert turns.in_one_program({"double": double}, sets)["double"] > 0
    assert traced == [(4,)]


def test_kernels_are_timed_beside_one_another_and_checked(capsys):
    script = Script("bench_kernel")
    assert script.run("attention", "--cases=tiny") == 0
    head, case, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("float32") and case.startswith(
        "tiny: rows 1, sequence 128, heads 2/1 x 16"
    )
    (line,) = lines  # of all kernels a CPU has the one that is the reference too
    assert line.split()[0] == "xla" and float(line.split()[2]) > 0
    assert line.endswith("errors of out dq dk dv 0.0e+00 0.0e+00 0.0e+00 0.0e+00")


def test_attention_to_parts_is_timed_as_one_device_of_a_ring_and_checked(capsys):
    assert Script("bench_kernel").run("parts", "--cases=tiny,tiny_all_gather") == 0
    _, ring, of_ring, gather, of_gather = capsys.readouterr().out.splitlines()
    assert ring.startswith("tiny: ring, device 1 of 2, a row of 64, heads 2/1 x 16")
    assert gather.startswith("tiny_all_gather: all_gather, device 1 of 2, a row of 64")
    for line in (of_ring, of_gather):  # the reference itself, as CPUs have no other
        assert line.split()[0] == "xla" and line.endswith("out dq dkv 0.0e+00 0.0e+00 0.0e+00")


def test_products_in_8_bits_are_timed_beside_one_another_and_checked(capsys):
    assert Script("bench_kernel").run("matmul", "--cases=tiny") == 0
    head, case, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("results in bfloat16") and case == "tiny: [128, 256] times [256, 128]"
    errors = {line.split()[0]: float(line.split()[-1]) for line in lines}
    assert list(errors) == ["bfloat16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"]
    assert errors.pop("bfloat16") < 0.005 and all(0.02 < off < 0.05 for off in errors.values())


def test_grouped_products_are_timed_beside_one_another_and_checked(capsys):
    assert Script("bench_kernel").run("grouped", "--cases=tiny") == 0
    head, case, reason, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("bfloat16") and case.startswith("tiny: [256, 128] times [4, 128, 128]")
    assert "needs an NVIDIA GPU, not cpu" in reason  # so XLA's own are timed and checked
    assert [line.split()[0] for line in lines] == ["forward", "dgrad", "wgrad"]
    assert all("ragged_dot" in line and float(line.split()[-1]) < 0.003 for line in lines)


def test_rounding_to_8_bits_is_timed_beside_a_copy(capsys):
    assert Script("bench_kernel").run("quantize", "--cases=tiny") == 0
    head, case, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("bfloat16 to float8_e4m3fn") and case == "tiny: [128, 256]"
    ways = [line for line in lines if ", xla " in line]
    assert len(ways) == 5 and all("GB/s" in way and way.endswith("of a copy") for way in ways)
    assert sum("left out: it needs an NVIDIA GPU, not cpu" in line for line in lines) == 5


def test_norms_are_timed_beside_a_copy(capsys):
    assert Script("bench_kernel").run("rms_norm", "--cases=tiny") == 0
    head, case, reason, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("bfloat16") and case == "tiny: [64, 128]"
    assert "left out: it needs an NVIDIA GPU, not cpu" in reason
    passes = [line.split(", xla ")[0].strip() for line in lines if ", xla " in line]
    assert passes == ["norm", "sum and norm", "backward"]
    assert all(line.endswith("of a copy") for line in lines)


def test_updates_in_8_bits_are_timed_beside_those_of_float32_moments(capsys):
    assert Script("bench_kernel").run("adamw8bit", "--cases=tiny") == 0
    _, reason, case, *lines = capsys.readouterr().out.splitlines()
    assert case == "tiny: [128, 256]" and len(lines) == 3
    assert reason == "8 bits, one launch is left out: it needs an NVIDIA GPU, not cpu"
    assert all("GB/s" in line and line.endswith("of a copy") for line in lines)


def test_products_are_timed_by_how_they_meet_what_devices_send(capsys):
    assert Script("bench_kernel").run("collective", "--cases=tiny,tiny_sum") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{jax.device_count()} x cpu")
    ways = [line for line in lines if line.startswith("  ")]
    assert len(ways) == 12 and len(lines) == 14
    errors = [float(line.split()[-1]) for line in ways if "collective" not in line]
    assert len(errors) == 10 and max(errors) < 5e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one kernel of adamw8bit, attention"),
        (["softmax"], "name one kernel of adamw8bit, attention"),
        (["attention"], "JAX finds no GPU here"),
        (["attention", "--cases=tiny,huge"], "--cases=huge: attention has causal_8k"),
        (["matmul", "--cases=huge"], "--cases=huge: matmul has out, up, down"),
        (["grouped", "--cases=huge"], "--cases=huge: grouped has e64_equal, e64"),
    ],
)
def test_a_kernel_or_a_case_that_is_not_there_is_refused(words, message, capsys):
    assert Script("bench_kernel").run(*words) == 2
    assert message in capsys.readouterr().err
