"""An update is known to fit before it runs.

Remat is chosen by memory, and what cannot fit is refused with settings that do.
"""

import dataclasses
import json
import logging
import math
import re
import types

import jax
import numpy as np
import pytest

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.compile import fit
from jaxscale.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Dtype,
    EvalConfig,
    LogConfig,
    Remat,
    SampleConfig,
)
from jaxscale.models import llama
from jaxscale.ops import layers
from jaxscale.optim import adamw
from jaxscale.schedules import cosine
from jaxscale.step.feed import abstract_batch
from jaxscale.step.plan import Plan, plan_of_run
from jaxscale.step.update import update
from jaxscale.train import run
from jaxscale.train.loop import train

# Losses with other things recomputed: float32, fused otherwise.
LOSS_RTOL = 1e-5
# A constant of the program: those of runs and of plans without data are the same.
MAX_DOCUMENTS = 4


def small_config(**changes) -> Config:
    """On 8 devices GEMMS takes 2% more than ATTENTION_MLP, and that 3% more than ATTENTION."""
    config = Config(
        model=llama.Config(
            vocab_size=257, model_dim=64, num_layers=2, num_heads=8, num_kv_heads=2, mlp_dim=96
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=1e-3, warmup_steps=2),
        steps=3,
        batch_size=64,
        seq_len=64,
        dtype=Dtype.FLOAT32,
        data=DataConfig(max_documents_per_row=MAX_DOCUMENTS),
        checkpoint=CheckpointConfig(enabled=False),
        evaluation=EvalConfig(batches=1),
        sample=SampleConfig(tokens=0),
        log=LogConfig(tensorboard=False),
    )
    return dataclasses.replace(config, **changes)


def program_of(plan: Plan) -> str:
    """The update's, before XLA."""
    with shd.use(plan.mesh, plan.rules):
        lowered = fit.jit_update(update, plan).lower(plan.state, abstract_batch(plan))
    return lowered.as_text()


class Compiler:
    """Stands in for fit.compile_only. asked: the plans it was given.

    programs: by options and text; each is compiled once for all tests.
    """

    def __init__(self):
        self.compile_only, self.programs, self.asked = fit.compile_only, {}, []

    def __call__(self, update, plan, *, compiler_options=None):
        self.asked.append(plan)
        key = f"{plan.compiler_options} {compiler_options} {program_of(plan)}"
        if key not in self.programs:
            compiled = self.compile_only(update, plan, compiler_options=compiler_options)
            self.programs[key] = compiled
        return self.programs[key]

    def remats(self):
        return [plan.execution.remat for plan in self.asked]


@pytest.fixture(scope="module")
def shared_compiler():
    return Compiler()


@pytest.fixture
def compiler(monkeypatch, tmp_path, shared_compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fit, "compile_only", shared_compiler)
    shared_compiler.asked.clear()
    return shared_compiler


@pytest.fixture(scope="module")
def memory(shared_compiler) -> dict[Remat, float]:
    """GiB of the small config's update with each policy, as XLA says."""
    plans = {remat: plan_of_run(small_config(remat=remat)) for remat in fit.POLICIES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "compile_only", shared_compiler)
        return {remat: fit.compile_update(update, plan).memory_gib for remat, plan in plans.items()}


GIB = {
    Remat.GEMMS: 10.0,
    Remat.GEMMS_LEAN: 9.0,
    Remat.ATTENTION_MLP: 7.0,
    Remat.ATTENTION: 4.0,
    Remat.FULL: 3.0,
}
# In a loop over the layers GEMMS_LEAN is the same program as GEMMS.
IN_A_LOOP = [remat for remat in fit.POLICIES if remat != Remat.GEMMS_LEAN]


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A compiler that compiles nothing: a GiB of state, and `table.gib` for 64 rows of 64 tokens.

    table.recomputed: where XLA runs one instruction twice on its own. table.leaner_gib: what it
    takes besides, where policies are mixed.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = types.SimpleNamespace(gib=dict(GIB), asked=[], recomputed=(), leaner_gib=0.0)

    def compile_only(update, plan, *, compiler_options=None):
        config, remat = plan.config, plan.execution.remat
        table.asked.append(remat)
        if math.isinf(table.gib[remat]):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."
            )
        tokens = config.batch_size * config.seq_len / config.grad_accumulation
        gib = table.gib[remat]
        if (leaner := remat.leaner) and (num := plan.execution.leaner_layers):
            share = num / config.model.num_layers
            gib += table.leaner_gib + share * (table.gib[leaner] - gib)
        analysis = types.SimpleNamespace(
            argument_size_in_bytes=2**30,
            output_size_in_bytes=2**30,
            alias_size_in_bytes=2**30,
            temp_size_in_bytes=(gib - 1) * tokens / 64**2 * 2**30,
        )
        text = (
            "%fusion.12.remat2.1 = f32[] fusion()\n%rematted.1 = f32[] fusion()"
            if remat in table.recomputed
            else ""
        )
        return types.SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: text)

    monkeypatch.setattr(fit, "compile_only", compile_only)
    return table


def pool_for(gib: float) -> float:
    """The pool in which just this much fits."""
    return gib * 1.0001 / fit.USABLE


def compile_to_fit(pool_gib=None, **changes) -> fit.CompiledUpdate:
    return fit.compile_to_fit(update, plan_of_run(small_config(**changes)), pool_gib=pool_gib)


def choose(pool_gib=None, **changes) -> fit.CompiledUpdate:
    return compile_to_fit(pool_gib, remat=Remat.AUTO, **changes)


def refusal(pool_gib, **changes) -> str:
    with pytest.raises(ValueError) as refused:
        compile_to_fit(pool_gib, **changes)
    return str(refused.value)


@pytest.mark.parametrize("remat", IN_A_LOOP)
def test_auto_is_the_richest_policy_that_fits_and_takes_at_most_two_more_compilations(table, remat):
    chosen = choose(pool_for(GIB[remat]))
    assert chosen.plan.execution.remat == remat and chosen.memory_gib == GIB[remat]
    # What the user asked for, and what a checkpoint remembers.
    assert chosen.plan.config.remat == Remat.AUTO
    assert len(table.asked) == (1 if remat == Remat.GEMMS else 3)


@pytest.mark.parametrize("remat", fit.POLICIES)
def test_auto_of_unrolled_layers_has_products_alone_to_choose_too(table, remat):
    chosen = choose(pool_for(GIB[remat]), scan_unroll=2)
    assert chosen.plan.execution.remat == remat
    assert len(table.asked) == len(set(table.asked)) <= 4


def test_a_refusal_names_products_alone_where_layers_are_unrolled(table):
    def suggested(unroll):
        return refusal(pool_for(9.5), remat=Remat.GEMMS, scan_unroll=unroll)

    assert "config.remat='gemms_lean' (9.0 GiB)" in suggested(2)
    assert "config.remat='attention_mlp' (7.0 GiB)" in suggested(1)


@pytest.mark.parametrize("remat", [Remat.GEMMS, Remat.ATTENTION_MLP, Remat.ATTENTION])
def test_auto_goes_by_what_xla_says_of_the_real_update(memory, compiler, remat):
    assert memory[Remat.GEMMS] > memory[Remat.ATTENTION_MLP] > memory[Remat.ATTENTION]
    chosen = choose(pool_for(memory[remat]))
    assert chosen.plan.execution.remat == remat and chosen.memory_gib == memory[remat]


def test_auto_prefers_a_policy_of_which_xla_recomputes_nothing_on_its_own(table, caplog):
    table.recomputed = (Remat.GEMMS, Remat.ATTENTION_MLP)
    assert choose(pool_for(10.0)).plan.execution.remat == Remat.ATTENTION
    assert "XLA" not in caplog.text
    # If there is none, the richest that fits.
    table.recomputed = fit.POLICIES
    chosen = choose(pool_for(11.0))
    assert chosen.plan.execution.remat == Remat.GEMMS and chosen.num_recomputed == 1
    assert "XLA runs 1 instructions twice to take less memory" in caplog.text


def test_the_devices_of_a_cpu_share_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(fit, "host_memory_gib", lambda: 16.0)
    assert fit.pool_of(plan_of_run(small_config())) == 16.0 / jax.device_count()


def test_an_update_that_the_machine_cannot_hold_is_refused_on_a_cpu(table, monkeypatch):
    monkeypatch.setattr(fit, "host_memory_gib", lambda: 1e-3)
    with pytest.raises(ValueError, match=r"config.remat='gemms' cannot fit: .* JAX has on cpu"):
        compile_to_fit(remat=Remat.GEMMS)


def test_devices_that_do_not_say_how_much_memory_they_have_get_the_richest(table, monkeypatch):
    monkeypatch.setattr(fit, "pool_of", lambda plan: math.inf)
    assert choose().plan.execution.remat == Remat.GEMMS
    assert table.asked == [Remat.GEMMS]


def test_a_policy_that_xla_runs_out_of_memory_compiling_does_not_fit(table):
    table.gib[Remat.GEMMS] = math.inf
    assert choose(pool_for(100)).plan.execution.remat == Remat.ATTENTION_MLP
    assert "needs more memory than XLA had" in refusal(pool_for(100), remat=Remat.GEMMS)


def test_another_error_of_xla_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def fail(update, plan, *, compiler_options=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: ptxas failed")

    monkeypatch.setattr(fit, "compile_only", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"):
        choose(100.0)


def num_barriers(**changes) -> int:
    return program_of(plan_of_run(small_config(**changes))).count("optimization_barrier")


def test_where_no_loop_holds_xla_back_barriers_keep_it_from_undoing_a_lean_policy():
    gemms = [num_barriers(remat=Remat.GEMMS, scan_unroll=unroll) for unroll in (1, 2)]
    for remat in (Remat.ATTENTION, Remat.GEMMS_LEAN):
        lean = [num_barriers(remat=remat, scan_unroll=unroll) for unroll in (1, 2)]
        assert lean[0] == gemms[0] and lean[1] > gemms[1]


def test_the_backward_pass_of_unrolled_lean_layers_waits_for_weight_gradients(monkeypatch):
    def num(remat):
        return num_barriers(
            remat=remat,
            scan_unroll=5,
            model=dataclasses.replace(small_config().model, num_layers=5),
        )

    lean, gemms = num(Remat.ATTENTION), num(Remat.GEMMS)
    monkeypatch.setattr(layers, "LAYERS_AHEAD", 99)
    waiting = lean - num(Remat.ATTENTION)
    # The first three of five, for the last three.
    assert waiting == 3 and num(Remat.GEMMS) == gemms


# Two policies, one for the first layers.


def of_layers(num_layers: int, **changes) -> dict:
    model = dataclasses.replace(small_config().model, num_layers=num_layers)
    return dict(model=model, scan_unroll=num_layers, **changes)


def test_auto_of_unrolled_layers_gives_as_many_as_fit_the_richer_policy(table, caplog):
    caplog.set_level("INFO")
    # 7 GiB for all eight, 4 with the leaner policy: 3 are enough for 6 GiB, and one more is safe.
    chosen = choose(pool_for(6.0), **of_layers(8)).plan.execution
    assert (chosen.remat, chosen.leaner_layers) == (Remat.ATTENTION_MLP, 4)
    assert "'attention_mlp', and 'attention' for the first 4 layers: 5.5 of" in caplog.text
    table.asked.clear()
    assert choose(pool_for(6.0), **of_layers(8)).plan.execution == chosen
    assert table.asked == [Remat.ATTENTION_MLP]


def test_two_policies_may_take_more_than_their_shares_or_not_fit_at_all(table):
    table.leaner_gib = 0.6
    assert choose(pool_for(6.0), **of_layers(8)).plan.execution.leaner_layers == 5
    table.leaner_gib = 3.0
    chosen = choose(pool_for(6.1), **of_layers(8)).plan.execution
    assert (chosen.remat, chosen.leaner_layers) == (Remat.ATTENTION, 0)


def test_two_policies_are_not_mixed_in_a_loop(table):
    chosen = choose(pool_for(6.0), **of_layers(8) | {"scan_unroll": 4}).plan.execution
    assert (chosen.remat, chosen.leaner_layers) == (Remat.ATTENTION, 0)


def test_a_refusal_offers_a_leaner_policy_for_a_quarter_of_the_layers(table):
    message = refusal(pool_for(6.5), remat=Remat.ATTENTION_MLP, **of_layers(8))
    assert "These fit: config.leaner_layers=2 (6.2 GiB), config.remat='attention'" in message


def test_only_the_first_layers_repeat_what_the_leaner_policy_does_not_save():
    def num_products(**changes) -> int:
        plan = plan_of_run(small_config(**of_layers(4, **changes)))
        return program_of(plan).count("dot_general")

    rich, lean = (num_products(remat=r) for r in (Remat.ATTENTION_MLP, Remat.ATTENTION))
    of_layer = (lean - rich) // 4
    assert of_layer > 0
    for num in (1, 3):
        mixed = num_products(remat=Remat.ATTENTION_MLP, leaner_layers=num)
        assert mixed == rich + num * of_layer


# Kept for the next start.


def kept_file(tmp_path):
    (path,) = (tmp_path / "cache" / "jaxscale" / "remat").iterdir()
    return path


def test_the_next_start_compiles_once(table, tmp_path):
    first = choose(pool_for(4.0))
    table.asked.clear()
    # What does not change the memory does not change the choice.
    again = choose(pool_for(4.0), steps=9, seed=1)
    assert table.asked == [Remat.ATTENTION] and again.memory_gib == first.memory_gib
    assert json.loads(kept_file(tmp_path).read_text())["remat"] == "attention"


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "\0\xff",
        "[]",
        "7",
        '{"remat": "attention"}',
        '{"remat": "most", "predicted_memory_gib": 4.0}',
        '{"remat": "attention", "leaner_layers": 0, "predicted_memory_gib": null}',
        '{"remat": "attention", "leaner_layers": -1, "predicted_memory_gib": 4.0}',
    ],
)
def test_a_damaged_choice_is_made_anew_and_kept(table, tmp_path, damaged):
    choose(pool_for(4.0))
    path = kept_file(tmp_path)
    sound = path.read_text()
    path.write_text(damaged)
    table.asked.clear()
    assert choose(pool_for(4.0)).plan.execution.remat == Remat.ATTENTION
    assert len(table.asked) == 3 and path.read_text() == sound


def test_a_choice_is_made_anew_for_another_step_card_or_program(table):
    choose(pool_for(4.0))
    assert choose(pool_for(7.0)).plan.execution.remat == Remat.ATTENTION_MLP
    assert choose(pool_for(4.0), batch_size=32).plan.execution.remat == Remat.ATTENTION_MLP
    # The code has changed: `attention` still fits and takes less, and so does more than it.
    table.gib.update({remat: gib / 2 for remat, gib in GIB.items()})
    assert choose(pool_for(4.0)).plan.execution.remat == Remat.ATTENTION_MLP
    # And now it does not fit any more.
    table.gib.update({remat: gib * 1.2 for remat, gib in GIB.items()})
    assert choose(pool_for(4.0)).plan.execution.remat == Remat.FULL


def test_a_kept_choice_that_no_longer_fits_is_not_taken_however_little_it_has_grown(table):
    choose(pool_for(4.0))
    table.gib[Remat.ATTENTION] *= 1.005
    assert choose(pool_for(4.0)).plan.execution.remat == Remat.FULL


def test_a_cache_that_cannot_be_written_stops_nothing(table, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose(pool_for(4.0)).plan.execution.remat == Remat.ATTENTION
    assert "the choice of remat is not kept for the next start" in caplog.text


# Refused.

FEWER_TOKENS: list[dict] = [{"grad_accumulation": 2}, {"batch_size": 32}, {"seq_len": 32}]


def settings_in(message) -> list[tuple[dict, float]]:
    """The settings that a refusal names, and their GiB."""
    named = re.findall(r"((?:config\.[\w.]+=[\w']+(?: and )?)+) \(([\d.]+) GiB\)", message)
    return [(changes_in(flags), float(gib)) for flags, gib in named]


def changes_in(flags) -> dict:
    pairs = re.findall(r"config\.([\w.]+)=([\w']+)", flags)
    return {key: json.loads(value.replace("'", '"')) for key, value in pairs}


def test_an_update_that_cannot_fit_is_refused_with_three_settings_that_do(memory, compiler):
    pool_gib = pool_for(memory[Remat.ATTENTION_MLP])
    settings = settings_in(refusal(pool_gib, remat=Remat.GEMMS))
    keys = [list(changes) for changes, _ in settings]
    assert keys == [["remat"], ["grad_accumulation"], ["batch_size"]]
    assert len(compiler.asked) == 4
    for changes, _ in settings:
        compile_to_fit(pool_gib, **changes)


def test_a_refusal_says_what_is_needed_and_what_there_is(table):
    message = refusal(pool_for(3.9), remat=Remat.GEMMS)
    assert message.startswith(
        "config.remat='gemms' cannot fit: the step needs 10.0 GiB on each device, and of the "
        "4.0 GiB that JAX has on cpu it can use 3.9 (97%). These fit: config.remat='full' "
        "(3.0 GiB), config.grad_accumulation=4 (3.2 GiB), config.batch_size="
    )
    assert settings_in(message)[2] == ({"batch_size": 16}, 3.2)
    # What would need too much in any case was not compiled: two microbatches or half the rows.
    assert len(table.asked) == 6


def test_auto_is_refused_if_the_leanest_policy_does_not_fit(table):
    message = refusal(pool_for(2.5), remat=Remat.AUTO)
    assert "config.remat='auto' cannot fit: the step with 'full' needs 3.0 GiB" in message
    assert [changes for changes, _ in settings_in(message)] == FEWER_TOKENS


def test_settings_are_combined_where_one_alone_is_not_enough(table):
    table.gib = dict.fromkeys(GIB, 100.0) | {Remat.FULL: 8.0}
    lean = {"remat": "full", "scan_unroll": 1}
    message = refusal(pool_for(5.0), remat=Remat.ATTENTION, scan_unroll=2)
    assert [changes for changes, _ in settings_in(message)] == [
        lean | changes for changes in FEWER_TOKENS
    ]


def test_a_state_that_does_not_fit_is_refused_without_trying_what_leaves_it_as_it_is(table):
    message = refusal(pool_for(0.5), remat=Remat.GEMMS)
    assert (
        "No other setting that was tried fits; more devices take a part of the state each, "
        "of which 1.0 GiB is" in message
    )
    assert table.asked == [Remat.GEMMS]
    table.asked.clear()
    # A mesh that splits it further might do, and is tried.
    mesh = run_config.MeshConfig(data=2, fsdp=4, zero=1)
    assert "No other setting" in refusal(pool_for(0.5), remat=Remat.GEMMS, mesh=mesh)
    assert len(table.asked) == 3


# In a run.


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        (folder / f"{number}.txt").write_text(
            f"The cat {number} sat on the mat and looked at the moon. " * 200
        )
    return DataConfig(
        path=str(folder / "*.txt"),
        cache_dir=str(folder / "cache"),
        eval_fraction=0.3,
        max_documents_per_row=MAX_DOCUMENTS,
    )


def records(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_auto_trains_as_the_policy_that_it_chose_and_puts_the_compilation_on_record(
    memory, compiler, data, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "jaxscale")
    train(small_config(data=data, remat=Remat.GEMMS), tmp_path / "gemms")
    monkeypatch.setattr(fit, "pool_of", lambda plan: pool_for(memory[Remat.GEMMS] * 0.999))
    train(small_config(data=data, remat=Remat.AUTO), tmp_path / "auto")
    assert compiler.remats()[-1] != Remat.GEMMS
    assert re.search(r"remat: auto chose 'attention_mlp': 0.0 of 0.0 GiB predicted", caplog.text)
    # After that of step 0, which is no step.
    theirs, mine = records(tmp_path / "gemms")[1:4], records(tmp_path / "auto")[1:4]
    np.testing.assert_allclose(
        [r["loss"] for r in mine], [r["loss"] for r in theirs], rtol=LOSS_RTOL
    )
    for steps in (theirs, mine):
        assert steps[0]["compile_seconds"] > 0 and steps[0]["predicted_memory_gib"] > 0
        assert "compile_seconds" not in steps[1] | steps[2]
    assert mine[0]["predicted_memory_gib"] < theirs[0]["predicted_memory_gib"]


def test_a_run_is_refused_before_anything_is_allocated_or_written(
    compiler, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(fit, "pool_of", lambda plan: 1e-6)
    monkeypatch.setattr(run, "init_state", lambda plan: pytest.fail("the state was made"))
    with pytest.raises(ValueError, match="config.remat='gemms' cannot fit"):
        train(small_config(data=data), tmp_path / "run")
    assert len(compiler.asked) == 1
    for name in ("config.json", "metrics.jsonl"):
        assert not (tmp_path / "run" / name).exists()
