"""scripts/bench_variants.py times every variant alike, leaves out what cannot run, and refuses what cannot be compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_variants.py"

# Runs the script for each list of arguments, and prints [code, output, errors] of each. In one process, for its imports
# take seconds; in another than the tests, where other scripts have flags of the same names.
MISTAKES = """
import contextlib, importlib.util, io, json, sys
from absl.testing import flagsaver

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
told = []
for arguments in json.loads(sys.argv[2]):
    output, errors = io.StringIO(), io.StringIO()
    with flagsaver.flagsaver(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = script.main(script.parse_own_flags(["bench_variants.py", *arguments]))
    told.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps(told))
"""

# Runs the script with steps that note what they read, and of which some fail; prints the notes after the record.
FAILURES = """
import dataclasses, importlib.util, json, sys
import jax, numpy as np
from absl import app

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
compile_one, pool_of = script.compile_one, script.fit.pool_of
steps, notes = [], []

def noting(plan):
    steps[:] = steps or [compile_one(plan)]  # the same for all: each takes seconds to compile
    step, z_loss = dataclasses.replace(steps[0], plan=plan), plan.config.z_loss

    def run(state, batch):
        notes.append([z_loss, np.asarray(batch.tokens).ravel().tolist(), int(state.step)])
        state, metrics = step.compiled(state, batch)
        if z_loss == 0.25:
            raise RuntimeError("out of luck\\nand of lines")
        return state, metrics | {"loss": np.nan} if z_loss == 0.5 and int(state.step) > 10 else metrics

    return dataclasses.replace(step, compiled=run)

script.compile_one = noting
script.fit.pool_of = lambda plan: 1e-9 if plan.config.z_loss == 0.75 else pool_of(plan)
sys.argv = sys.argv[1:]

def main(argv):
    code = script.main(argv)
    print(json.dumps(notes))
    return code

app.run(main, flags_parser=script.parse_own_flags)
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    """A config of a small model on small text."""
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=16)


def run(*command, code=0, num_devices=2):
    # Two devices compile in half the time of the eight that conftest.py asks for; the last of two flags counts.
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_variants_and_pairs_are_timed_by_turns_and_set_against_the_first(config_file, tmp_path):
    output, errors = run(
        SCRIPT, "--config", config_file, "--config.seq_len=64", "--variant", "base", "--variant", "full: remat=full",
        "--variant=halves: grad_accumulation=2 xla_cpu_enable_fast_min_max=true", "--pairs", "--rounds=2", "--steps=2",
        "--variant=other_chip: xla_gpu_enable_triton_gemm=false", "--variant=none_such: xla_cpu_enable_fast_minmax=true",
        "--profile=halves", f"--workdir={tmp_path}",
    )  # fmt: skip
    *table, last = output.splitlines()
    record = json.loads(last)
    assert (
        list(record["variants"]) == ["base", "full", "halves", "full+halves"]
        and record["ratio_to"] == "base"
    )
    assert record["variants"]["full+halves"]["settings"] == [
        "remat=full", "grad_accumulation=2", "xla_cpu_enable_fast_min_max=true",
    ]  # fmt: skip
    first = record["variants"]["base"]["round_step_seconds"]
    for each in record["variants"].values():
        low, high = sorted(
            mine / its for mine, its in zip(each["round_step_seconds"], first, strict=True)
        )
        assert (each["ratio_min"], each["ratio_max"]) == (low, high)
        assert each["ratio"] == pytest.approx((low + high) / 2)
        assert each["step_seconds"] == pytest.approx(sum(each["round_step_seconds"]) / 2)
        assert each["tokens_per_second_per_device"] == pytest.approx(
            16 * 64 / each["step_seconds"] / 2
        )
        assert (
            each["compile_seconds"] > 0
            and each["predicted_memory_gib"] > 0
            and 4 < each["loss"] < 7
        )
    assert [each["remat"] for each in record["variants"].values()] == [
        "gemms",
        "full",
        "gemms",
        "full",
    ]
    assert (record["num_devices"], record["rounds"], record["steps"]) == (2, 2, 2)
    assert {"commit", "is_dirty", "date", "command", "driver", "versions", "environment"} <= set(
        record
    )

    # An option without effect would only be the base again: it is said why, and it is in no pair.
    assert record["left_out"] == {
        "other_chip": "xla_gpu_enable_triton_gemm=false has no effect here",
        "none_such": "xla_cpu_enable_fast_minmax=true has no effect here",
    }
    assert "has no effect on CPUs and is ignored" in errors
    assert (
        "has none of this name; it is ignored; did you mean xla_cpu_enable_fast_min_max?" in errors
    )

    assert table[0].startswith("2 x cpu, 2 rounds of 2 steps")
    assert [line.split()[0] for line in table[1:]] == [
        "variant",
        *record["variants"],
        "other_chip",
        "none_such",
    ]
    assert list((tmp_path / "halves").rglob("*.xplane.pb")) and f"{tmp_path}/halves" in errors


def test_all_read_the_same_batches_in_rotated_order_and_one_that_fails_takes_no_other_along(
    config_file,
):
    output, errors = run(
        "-c", FAILURES, SCRIPT, "--config", config_file, "--rounds=3", "--steps=2", "--variant=big: z_loss=0.75",
        "--variant=raises: z_loss=0.25", "--variant=a: z_loss=0.0", "--variant=b: z_loss=0.125",
        "--variant=nan: z_loss=0.5",
    )  # fmt: skip
    record, notes = map(json.loads, output.splitlines()[-2:])
    assert list(record["variants"]) == ["a", "b"] and record["ratio_to"] == "a"
    left_out = record["left_out"]
    assert left_out["raises"] == "it fails: RuntimeError: out of luck"
    assert left_out["nan"].startswith("it fails: FloatingPointError: the loss is nan")
    assert left_out["big"].endswith("GiB, and 0.0 can be used") and "raises is left out" in errors

    names = {0.25: "raises", 0.0: "a", 0.125: "b", 0.5: "nan"}
    runs = [(names[z_loss], tuple(tokens), step) for z_loss, tokens, step in notes]
    # One step each to warm up, and three in each round. A new state after `raises`, which has taken the old one along,
    # and after `nan`, whose loss is looked at when both steps that count are done.
    order = ["raises", "a", "b", "nan", *"aaabbb", *["nan"] * 3, *"bbbaaa", *"aaabbb"]
    assert [name for name, _, _ in runs] == order
    assert [step for _, _, step in runs] == [0, *range(12), *range(12)]
    batches = [tokens for _, tokens, _ in runs]
    assert len(set(batches[:4])) == 1
    rounds = [batches[4:7], batches[13:16], batches[19:22]]
    assert batches[4:] == [*rounds[0] * 3, *rounds[1] * 2, *rounds[2] * 2]
    assert len(set(batches)) == 1 + 9


MADE = "--config.model.num_layers=2"
CASES = {
    "no variants": ([], "name the variants"),
    "no name": (["--variant=remat=full"], "--variant='remat=full': begin with a name of letters"),
    "two of a name": (["--variant=a", "--variant=a: remat=full"], "there is another of this name"),
    "no value": (["--variant=a: remat"], "'remat' is no setting; write key=value"),
    "an unknown key": (["--variant=a: remta=full"], "config.remta is not a setting; did you mean config.remat?"),
    "an unknown key below": (["--variant=a: mesh.fsdb=2"], "config.mesh.fsdb is not a setting; did you mean"),
    "no choice": (["--variant=a: remat=some"], "--config.remat=some: value should be one of <auto|full|"),
    "no number": (["--variant=a: scan_unroll=two"], "--config.scan_unroll=two: invalid literal for int()"),
    "no bool": (["--variant=a: mesh.reshard_after_forward=maybe"], "mesh.reshard_after_forward=maybe"),
    "out of range": (["--variant=a: scan_unroll=3", MADE], "config.scan_unroll=3: set it to a divisor of the 2 layers"),
    "too many microbatches": (["--variant=a: grad_accumulation=4"], "= 4 rows must be a multiple of data * fsdp * expert"),
    "a value XLA cannot read": (["--variant=a: xla_cpu_enable_fast_min_max=maybe"], "xla_cpu_enable_fast_min_max=maybe"),
    "a list of options": (["--variant=a: xla_options=('xla_a=b',)"], "write the options alone"),
    "another batch": (["--variant=a: batch_size=8"], "is the same for all variants: set it with --config.batch_size=8"),
    "another length": (["--variant=a: seq_len=16"], "set it with --config.seq_len=16"),
    "other data": (["--variant=a: data.path=x"], "config.data.path is the same for all variants"),
    "another model": (["--variant=base", "--variant=a: model.mlp_dim=128"], "a: model.mlp_dim=128': the state would"),
    "another mesh": (["--variant=base", "--variant=a: mesh.fsdp=4 mesh.data=2"], "another mesh or other shardings"),
    "another ZeRO level": (["--variant=base", "--variant=a: mesh.zero=1"], "another mesh or other shardings"),
    "an unknown profile": (["--variant=a", "--profile=b", "--workdir=x"], "--profile: 'b' is not one of a"),
    "a profile without a folder": (["--variant=a", "--profile=a"], "--workdir=DIR"),
    "a mistake in the config": (["--variant=a", "--config.modle=1"], "modle"),
    "no flag": (["--variant=a", "--stepz=3"], "stepz"),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(config_file):
    """By case: exit code, output, errors."""
    arguments = [["--config", str(config_file), *arguments] for arguments, _ in CASES.values()]
    output, _ = run("-c", MISTAKES, SCRIPT, json.dumps(arguments), num_devices=8)
    return dict(zip(CASES, json.loads(output), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_told_before_anything_is_compiled(case, told):
    code, output, errors = told[case]
    assert code == 2 and output == "" and "compiled" not in errors
    assert CASES[case][1] in errors and "Traceback" not in errors


def test_a_pair_that_cannot_be_is_left_out(config_file):
    variants = [
        "--variant=base",
        "--variant=a: grad_accumulation=2",
        "--variant=b: grad_accumulation=1",
    ]
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import bench_variants as script\n"
        + (
            "variants = script.parse_own_flags(sys.argv) and script.read_variants(script.VARIANTS.value)\n"
            "print(*[variant.name for variant in variants])"
        )
    )
    more = ["--variant=c: remat=full", "--variant=d: remat=full grad_accumulation=2"]
    output, _ = run("-c", code, *variants, *more, "--pairs")
    # a+b would set one key twice, and a+c is d.
    assert output.split() == ["base", "a", "b", "c", "d", "b+c"]
