"""The contest times all variants alike, leaves out what cannot run, refuses what is no variant."""

import contextlib
import dataclasses
import functools
import io
import json

import jax
import numpy as np
import pytest

from jaxscale import warned
from jaxscale.perf import contest
from jaxscale.perf.variants import read_variants, with_pairs
from tests.perf.scripts import Script

# How ml_collections loads a config file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)

SEQ_LEN = "--config.seq_len=64"
# Two variants have no effect: other_chip and none_such.
CONTEST = [
    SEQ_LEN,
    "--variant",
    "base",
    "--variant",
    "full: remat=full",
    "--variant=halves: grad_accumulation=2 xla_cpu_enable_fast_min_max=true",
    "--variant=other_chip: xla_gpu_enable_triton_gemm=false",
    "--variant=none_such: xla_cpu_enable_fast_minmax=true",
    "--pairs",
    "--rounds=2",
    "--steps=2",
    "--profile=halves",
]

TWO_LAYERS = "--config.model.num_layers=2"
MISTAKES = {
    "no variants": ([], "name the variants"),
    "no name": (
        ["--variant=remat=full"],
        "--variant='remat=full': begin with a name of letters",
    ),
    "two of a name": (
        ["--variant=a", "--variant=a: remat=full"],
        "there is another of this name",
    ),
    "no value": (["--variant=a: remat"], "'remat' is no setting; write key=value"),
    "an unknown key": (
        ["--variant=a: remta=full"],
        "config.remta is not a setting; did you mean config.remat?",
    ),
    "an unknown key below": (
        ["--variant=a: mesh.fsdb=2"],
        "config.mesh.fsdb is not a setting; did you mean",
    ),
    "no choice": (
        ["--variant=a: remat=some"],
        "--config.remat=some: value should be one of <auto|full|",
    ),
    "no number": (
        ["--variant=a: scan_unroll=two"],
        "--config.scan_unroll=two: write a whole number",
    ),
    "no bool": (
        ["--variant=a: mesh.reshard_after_forward=maybe"],
        "mesh.reshard_after_forward=maybe",
    ),
    "out of range": (
        ["--variant=a: scan_unroll=3", TWO_LAYERS],
        "config.scan_unroll=3: set it to a divisor of the 2 layers",
    ),
    "too many microbatches": (
        ["--variant=a: grad_accumulation=4"],
        "= 4 rows must be a multiple of data * fsdp * expert",
    ),
    "a value XLA cannot read": (
        ["--variant=a: xla_cpu_enable_fast_min_max=maybe"],
        "xla_cpu_enable_fast_min_max=maybe",
    ),
    "a list of options": (
        ["--variant=a: xla_options=('xla_a=b',)"],
        "write the options alone",
    ),
    "another batch": (
        ["--variant=a: batch_size=8"],
        "is the same for all variants: set it with --config.batch_size=8",
    ),
    "another length": (["--variant=a: seq_len=16"], "set it with --config.seq_len=16"),
    "other data": (
        ["--variant=a: data.path=x"],
        "config.data.path is the same for all variants",
    ),
    "another model": (
        ["--variant=base", "--variant=a: model.mlp_dim=128"],
        "a: model.mlp_dim=128': the state would",
    ),
    "another mesh": (
        ["--variant=base", "--variant=a: mesh.fsdp=4 mesh.data=2"],
        "another mesh or other shardings",
    ),
    "another ZeRO level": (
        ["--variant=base", "--variant=a: mesh.zero=1"],
        "another mesh or other shardings",
    ),
    "an unknown profile": (
        ["--variant=a", "--profile=b", "--workdir=x"],
        "--profile: 'b' is not one of a",
    ),
    "a profile without a folder": (["--variant=a", "--profile=a"], "--workdir=DIR"),
    "a mistake in the config": (["--variant=a", "--config.modle=1"], "modle"),
    "no flag": (["--variant=a", "--stepz=3"], "stepz"),
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    """A config of a small model on small text."""
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=16)


@pytest.fixture(scope="module")
def script():
    return Script("bench_variants")


class Remembered:
    """The contest's programs: to compile one takes seconds.

    updates: of the variants that were compiled. init_state gives copies of the first state.
    """

    def __init__(self):
        self.updates, self._state = [], None
        self._compile_one, self._init_state = contest.compile_one, contest.init_state

    def compile_one(self, plan):
        self.updates.append(self._compile_one(plan))
        return self.updates[-1]

    def init_state(self, plan):
        self._state = self._state or self._init_state(plan)
        return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), self._state)


@pytest.fixture(scope="module")
def remembered():
    return Remembered()


@dataclasses.dataclass
class Held:
    """What the script printed; record: its last line."""

    table: list[str]
    record: dict
    errors: str


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("contest")


@pytest.fixture(scope="module")
def held(script, config_file, workdir, remembered):
    """The contest on two devices: they compile in half the time of eight."""
    output, errors = io.StringIO(), io.StringIO()
    warned.once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "compile_one", remembered.compile_one)
        patch.setattr(contest, "init_state", remembered.init_state)
        hold = functools.partial(contest.hold, devices=jax.devices()[:2])
        patch.setattr(script.module.contest, "hold", hold)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = script.run("--config", config_file, *CONTEST, f"--workdir={workdir}")
    assert code == 0, errors.getvalue()
    *table, last = output.getvalue().splitlines()
    return Held(table, json.loads(last), errors.getvalue())


def test_variants_and_pairs_are_timed_by_turns_and_set_against_the_first(held):
    record = held.record
    names = ["base", "full", "halves", "full+halves"]
    assert list(record["variants"]) == names and record["ratio_to"] == "base"
    assert record["variants"]["full+halves"]["settings"] == [
        "remat=full",
        "grad_accumulation=2",
        "xla_cpu_enable_fast_min_max=true",
    ]
    first = record["variants"]["base"]["round_step_seconds"]
    for each in record["variants"].values():
        seconds = each["round_step_seconds"]
        low, high = sorted(mine / its for mine, its in zip(seconds, first, strict=True))
        assert (each["ratio_min"], each["ratio_max"]) == (low, high)
        assert each["ratio"] == pytest.approx((low + high) / 2)
        assert each["step_seconds"] == pytest.approx(sum(seconds) / 2)
        rate = 16 * 64 / each["step_seconds"] / 2
        assert each["tokens_per_second_per_device"] == pytest.approx(rate)
        assert each["compile_seconds"] > 0 and each["predicted_memory_gib"] > 0
        assert 4 < each["loss"] < 7
    remat = [each["remat"] for each in record["variants"].values()]
    assert remat == ["gemms", "full", "gemms", "full"]
    assert (record["num_devices"], record["rounds"], record["steps"]) == (2, 2, 2)
    origin = {"commit", "is_dirty", "date", "command", "driver", "versions", "environment"}
    assert origin <= set(record)


def test_an_option_without_effect_would_be_the_base_again_and_is_in_no_pair(held):
    assert held.record["left_out"] == {
        "other_chip": "xla_gpu_enable_triton_gemm=false has no effect here",
        "none_such": "xla_cpu_enable_fast_minmax=true has no effect here",
    }
    assert "has no effect on CPUs and is ignored" in held.errors
    meant = "it is ignored; did you mean xla_cpu_enable_fast_min_max?"
    assert f"has none of this name; {meant}" in held.errors


def test_the_table_has_a_line_for_each_variant_and_the_profile_a_folder(held, workdir):
    assert held.table[0].startswith("2 x cpu, 2 rounds of 2 steps")
    names = ["variant", *held.record["variants"], "other_chip", "none_such"]
    assert [line.split()[0] for line in held.table[1:]] == names
    assert list((workdir / "halves").rglob("*.xplane.pb"))
    assert f"{workdir}/halves" in held.errors


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_before_anything_is_compiled(case, script, config_file, capsys):
    arguments, told = MISTAKES[case]
    code = script.run("--config", config_file, *arguments)
    output, errors = capsys.readouterr()
    assert code == 2 and output == "" and "compiled" not in errors
    assert told in errors and "Traceback" not in errors


class Noting:
    """Compiles nothing: all plans get one update, which notes [z_loss, tokens, step] or fails."""

    def __init__(self, update):
        self.notes = []
        self._update = update

    def __call__(self, plan):
        update, z_loss = self._update, plan.config.z_loss

        def run(state, batch):
            self.notes.append([z_loss, np.asarray(batch.tokens).ravel().tolist(), int(state.step)])
            state, metrics = update.compiled(state, batch)
            if z_loss == 0.25:
                raise RuntimeError("out of luck\nand of lines")
            if z_loss == 0.5 and int(state.step) > 10:
                metrics |= {"loss": np.nan}
            return state, metrics

        return dataclasses.replace(update, plan=plan, compiled=run)


def test_all_read_the_same_batches_in_rotated_order_and_one_that_fails_takes_no_other_along(
    config_file, held, remembered, monkeypatch, caplog
):
    noting, pool_of = Noting(remembered.updates[0]), contest.fit.pool_of
    monkeypatch.setattr(contest, "compile_one", noting)
    monkeypatch.setattr(contest, "init_state", remembered.init_state)
    monkeypatch.setattr(
        contest.fit, "pool_of", lambda plan: 1e-9 if plan.config.z_loss == 0.75 else pool_of(plan)
    )
    caplog.set_level("INFO", "jaxscale.perf")
    z_losses = {"big": 0.75, "raises": 0.25, "a": 0.0, "b": 0.125, "nan": 0.5}
    record = contest.hold(
        read_variants([f"{name}: z_loss={value}" for name, value in z_losses.items()]),
        ["--config", str(config_file), SEQ_LEN],
        options=contest.Options(rounds=3, num_steps=2),
        devices=jax.devices()[:2],
    )
    assert list(record["variants"]) == ["a", "b"] and record["ratio_to"] == "a"
    left_out = record["left_out"]
    assert left_out["raises"] == "it fails: RuntimeError: out of luck"
    assert left_out["nan"].startswith("it fails: FloatingPointError: the loss is nan")
    assert (
        left_out["big"].endswith("GiB, and 0.0 can be used") and "raises is left out" in caplog.text
    )

    names = {value: name for name, value in z_losses.items()}
    runs = [(names[z_loss], tuple(tokens), step) for z_loss, tokens, step in noting.notes]
    # One step each to warm up, and three in each round. A new state after `raises`, which has taken
    # the old one along, and after `nan`, whose loss is looked at when both steps that count are
    # done.
    order = ["raises", "a", "b", "nan", *"aaabbb", *["nan"] * 3, *"bbbaaa", *"aaabbb"]
    assert [name for name, _, _ in runs] == order
    assert [step for _, _, step in runs] == [0, *range(12), *range(12)]
    batches = [tokens for _, tokens, _ in runs]
    assert len(set(batches[:4])) == 1
    rounds = [batches[4:7], batches[13:16], batches[19:22]]
    assert batches[4:] == [*rounds[0] * 3, *rounds[1] * 2, *rounds[2] * 2]
    assert len(set(batches)) == 1 + 9


def test_a_pair_that_cannot_be_is_left_out():
    texts = ["base", "a: grad_accumulation=2", "b: grad_accumulation=1", "c: remat=full"]
    variants = with_pairs(read_variants([*texts, "d: remat=full grad_accumulation=2"]))
    # a+b would set one key twice, and a+c is d.
    assert [variant.name for variant in variants] == ["base", "a", "b", "c", "d", "b+c"]
