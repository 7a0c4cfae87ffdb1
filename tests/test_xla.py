"""What XLA is told: options are checked against the installed jaxlib, and nothing a user writes there aborts a run."""

import dataclasses
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

from jaxscale.compile import fit
from jaxscale.config import Config, Dtype, MeshConfig
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine
from jaxscale.step.state import make_plan
from jaxscale.xla import options as xla

JAXLIB = f"jaxlib {metadata.version('jaxlib')}"
SIZES = dict(stage=1, data=1, fsdp=8, expert=1, context=1, tensor=1)


OPTIONS = xla.OPTIONS


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    """Those that jaxscale sets change with what is measured; the tests bring their own."""
    monkeypatch.setattr(xla, "OPTIONS", ())


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment of the test's own, without XLA_FLAGS, and lines that have not been said yet."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    monkeypatch.setattr(os, "environ", own)
    xla._say.cache_clear()
    return own


def options_of(*texts, platform="gpu", sizes=SIZES):
    return xla.compiler_options(SimpleNamespace(xla_options=texts), sizes, platform=platform)


def told(*texts, platform="gpu") -> list[str]:
    config = SimpleNamespace(xla_options=texts)
    return xla.describe(
        options_of(*texts, platform=platform), config, platform=platform
    ).splitlines()


def derived(monkeypatch, name="xla_gpu_enable_triton_gemm", value=False, **fields):
    """Makes it the one option that jaxscale sets by itself."""
    texts = dict(default="true", why="a reason", gain="+3% (8B, 4 x H200, jax 0.11.2)") | fields
    monkeypatch.setattr(xla, "OPTIONS", (xla.Option(name, value, **texts),))


# The user's options.


def test_what_the_user_writes_becomes_what_the_compiler_takes():
    wanted = {
        "xla_gpu_enable_triton_gemm=false": False,
        "xla_gpu_enable_latency_hiding_scheduler=True": True,
        "xla_gpu_all_gather_combine_threshold_bytes=1073741824": "1073741824",
        "xla_gpu_auto_spmd_partitioning_memory_budget_ratio=1.25": "1.25",
        "xla_gpu_enable_command_buffer=FUSION,CUBLAS": "FUSION,CUBLAS",
        "xla_gpu_enable_command_buffer=": "",
        "xla_dump_hlo_pass_re=a=b": "a=b",
    }
    for text, value in wanted.items():
        assert options_of(text) == {text.partition("=")[0]: value}


def test_the_last_of_two_settings_counts():
    texts = ("xla_gpu_autotune_level=0", "xla_gpu_autotune_level=2")
    assert options_of(*texts) == {"xla_gpu_autotune_level": "2"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("xla_gpu_graph_level=0", ""),  # gone
        ("xla_gpu_enable_triton_gem=false", "; did you mean xla_gpu_enable_triton_gemm?"),
        ("xla_qqq=1", ""),
    ],
)
def test_an_unknown_option_is_named_once_and_ignored(text, hint, caplog):
    for _ in range(2):
        assert options_of(text, "xla_gpu_autotune_level=2") == {"xla_gpu_autotune_level": "2"}
    name = text.partition("=")[0]
    assert caplog.messages == [
        f"compiler option {name}: {JAXLIB} has none of this name; it is ignored{hint}"
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("xla_gpu_enable_triton_gemm=perhaps", "'perhaps' is not a valid bool value"),
        ("xla_gpu_autotune_level=1.5", "'1.5' is not a valid int32 value"),
        ("xla_gpu_all_gather_combine_threshold_bytes=1G", "'1G' is not a valid int64 value"),
        ("xla_gpu_enable_command_buffer=EVERYTHING", "'EVERYTHING' is not a valid enum value"),
        ("optimization_level=4", "'4' is not one of O0, O1, O2, O3"),
    ],
)
def test_a_value_that_xla_cannot_read_is_a_mistake(text, reason):
    with pytest.raises(ValueError, match=f"config.xla_options='{text}': {reason}; correct it"):
        options_of(text)


def test_jaxs_optimization_level_is_an_option_too():
    options = options_of("optimization_level=O1", platform="cpu")
    assert options in ({"optimization_level": "O1"}, {"optimization_level": 19})
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


def test_an_option_of_another_platform_is_named_and_ignored(caplog):
    assert options_of(
        "xla_gpu_autotune_level=2", "xla_backend_optimization_level=1", platform="cpu"
    ) == {"xla_backend_optimization_level": "1"}
    assert caplog.messages == [
        "config.xla_options='xla_gpu_autotune_level=2' has no effect on CPUs and is ignored"
    ]
    with pytest.raises(ValueError, match="not a valid int32 value"):  # a mistake is one here too
        options_of("xla_gpu_autotune_level=high", platform="cpu")


@pytest.mark.parametrize(
    "pair", xla.TRANSLATIONS.items(), ids=lambda pair: f"{pair[0][0]}={pair[0][1]}"
)
def test_another_jaxlibs_name_is_translated_into_the_one_that_this_has(pair, caplog):
    assert [xla._refusal(*spelling) is None for spelling in pair].count(True) == 1
    (here,) = (spelling for spelling in pair if xla._refusal(*spelling) is None)
    for name, value in pair:
        caplog.clear()
        assert options_of(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        ) == dict([here])
        line = f"compiler option {name}={value} is {here[0]}={here[1]} in {JAXLIB}"
        assert caplog.messages == ([] if (name, value) == here else [line])


# The check.


def test_the_names_for_hints_are_those_the_compiler_knows():
    names = xla._known_names()
    assert len(names) > 300 and "xla_gpu_enable_triton_gemm" in names
    # "?" is a value of strings only: either way the name is known.
    assert not [name for name in names if xla._refusal(name, "?") == xla._UNKNOWN]


def test_the_check_starts_no_device_and_compiles_nothing(tmp_path):
    code = f"""if True:
        from types import SimpleNamespace
        from jax._src import xla_bridge
        from jaxscale.xla import options as xla
        config = SimpleNamespace(xla_options=("xla_dump_to={tmp_path}/dump", "xla_gpu_autotune_level=2"))
        sizes, card = {{"fsdp": 1}}, "NVIDIA H200"
        ours = [*xla.OPTIONS, *xla.chosen_kernels(card)]
        num_ours = sum(option.applies(config, sizes) for option in ours)
        assert num_ours and len(xla.compiler_options(config, sizes, platform="gpu", device_kind=card)) == 2 + num_ours
        assert not xla_bridge.backends_are_initialized()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert not (tmp_path / "dump").exists()


def test_a_jaxlib_that_cannot_be_asked_takes_the_option(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.setattr(xla_client, "DeviceList", None)
    assert options_of("xla_gpu_autotune_max_solutions=7") == {"xla_gpu_autotune_max_solutions": "7"}
    xla._refusal.cache_clear()


# The options that jaxscale sets.


def test_an_option_is_set_where_it_applies(monkeypatch):
    derived(monkeypatch, applies=lambda config, sizes: sizes["fsdp"] > 1)
    assert options_of() == {"xla_gpu_enable_triton_gemm": False}
    assert options_of(sizes=SIZES | dict(fsdp=1)) == {}
    assert options_of(platform="cpu") == {}


def test_the_users_setting_wins(monkeypatch, environment):
    derived(monkeypatch)
    assert options_of("xla_gpu_enable_triton_gemm=true") == {"xla_gpu_enable_triton_gemm": True}
    environment["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=true"
    assert options_of() == {}


def test_an_option_that_this_jaxlib_refuses_is_left_out(monkeypatch, caplog):
    derived(monkeypatch, value="COLLECTIVE")
    assert options_of() == {}
    assert caplog.messages == [
        "compiler option xla_gpu_enable_triton_gemm=COLLECTIVE is left out: 'COLLECTIVE' is not a valid bool value"
    ]
    derived(monkeypatch, name="xla_gpu_graph_level")
    assert options_of() == {}
    assert "xla_gpu_graph_level" in caplog.messages[1]


def test_every_option_that_jaxscale_sets_is_known_here():
    for option in OPTIONS:
        value = option.value_for(small_config(), SIZES)
        assert None in [
            xla._refusal(*spelling) for spelling in xla._spellings(option.name, value)
        ], option
        assert option.why and option.gain and option.default


def test_collectives_of_a_layer_are_combined_where_it_was_measured():
    gather, scatter = (
        option for option in OPTIONS if option.name.endswith("combine_threshold_bytes")
    )
    unrolled = small_config(scan_unroll=1)  # of one layer
    for option in (gather, scatter):
        assert option.applies(unrolled, SIZES)
        assert not option.applies(unrolled, SIZES | dict(fsdp=1))
        assert not option.applies(unrolled, SIZES | dict(tensor=2))
    scanned = dataclasses.replace(unrolled, model=dataclasses.replace(unrolled.model, num_layers=2))
    assert not gather.applies(scanned, SIZES) and not scatter.applies(scanned, SIZES)


@pytest.mark.parametrize("reduce_dtype", Dtype)
def test_one_layers_weights_or_gradients_are_combined_and_not_twos(reduce_dtype):
    gather, scatter = (
        option for option in OPTIONS if option.name.endswith("combine_threshold_bytes")
    )
    config = small_config(mesh=MeshConfig(reduce_dtype=reduce_dtype))
    # Smaller layers keep XLA's default.
    assert gather.value_for(config, SIZES) == scatter.value_for(config, SIZES) == 30 * 2**20
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, model_dim=8192, mlp_dim=28_672)
    )
    weights = 2 * config.model.num_layer_params()
    gradients = weights // 8 * (1 if reduce_dtype == Dtype.BFLOAT16 else 2)
    assert weights < gather.value_for(config, SIZES) < 2 * weights
    assert gradients < scatter.value_for(config, SIZES) < 2 * gradients


def test_kernels_chosen_on_a_card_are_loaded_there(monkeypatch, tmp_path):
    version = metadata.version("jaxlib")
    for name in (f"h200-jaxlib{version}", f"h100-jaxlib{version}", "h200-jaxlib0.0.1"):
        (tmp_path / f"{name}.autotune.txtpb").touch()
    monkeypatch.setattr(xla, "TARGETS", tmp_path)

    def loaded(device_kind, *texts, platform="gpu"):
        return xla.compiler_options(
            SimpleNamespace(xla_options=texts), SIZES, platform=platform, device_kind=device_kind
        )

    mine = {
        "xla_gpu_load_autotune_results_from": str(tmp_path / f"h200-jaxlib{version}.autotune.txtpb")
    }
    assert loaded("NVIDIA H200") == mine
    assert "h100-" in loaded("NVIDIA H100 80GB HBM3")["xla_gpu_load_autotune_results_from"]
    assert "h200-" in loaded("NVIDIA H200-SXM5")["xla_gpu_load_autotune_results_from"]
    assert (
        loaded("NVIDIA GB200")
        == loaded("NVIDIA H20")
        == loaded("NVIDIA H200", platform="cpu")
        == {}
    )
    own = "xla_gpu_load_autotune_results_from"
    assert loaded("NVIDIA H200", f"{own}=my.txtpb") == {own: "my.txtpb"}
    assert "the same kernels in every run" in xla.describe(
        mine, SimpleNamespace(xla_options=()), platform="gpu"
    )
    theirs = SimpleNamespace(xla_options=(f"{own}=my.txtpb",))
    assert (
        "from config.xla_options"
        in xla.describe({own: "my.txtpb"}, theirs, platform="gpu").splitlines()[-1]
    )


# Where they go.


def small_config(**changes) -> Config:
    return Config(
        model=llama.Config(vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64),
        optim=adamw.Config(), schedule=cosine.Config(warmup_steps=2), steps=4, batch_size=8, seq_len=16, **changes,
    )  # fmt: skip


def test_the_train_step_is_compiled_with_the_options(tmp_path):
    folder = tmp_path / "dump"
    plan = make_plan(small_config(xla_options=(f"xla_dump_to={folder}", "xla_bogus=1")), SIZES)
    assert plan.compiler_options == {"xla_dump_to": str(folder)} and not folder.exists()
    fit.compile_step(plan)
    assert [path for path in folder.iterdir() if "train_step" in path.name]


def test_options_of_jit_and_of_compile_come_together():
    def lowered(**options):
        return jax.jit(lambda x: x + 1, compiler_options=options).lower(jnp.zeros(()))

    lowered(xla_backend_optimization_level=0).compile(
        compiler_options={"xla_llvm_disable_expensive_passes": True}
    )
    for name in ("xla_of_jit", "xla_of_compile"):
        of_jit, of_compile = (
            {name: 1} if name == f"xla_of_{owner}" else {} for owner in ("jit", "compile")
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"No such compile option: '{name}'"):
            lowered(**of_jit, xla_backend_optimization_level=0).compile(
                compiler_options={"xla_llvm_disable_expensive_passes": True} | of_compile
            )


# The environment.


def test_what_must_precede_the_start_is_set_and_the_user_wins(environment):
    for variable in xla.ENVIRONMENT:
        environment.pop(variable.name, None)
    xla.set_environment()
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == xla.MEMORY_FRACTION
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["NCCL_NVLS_ENABLE"] == "0" and "XLA_FLAGS" not in environment
    environment.update(XLA_PYTHON_CLIENT_MEM_FRACTION="0.5", NCCL_NVLS_ENABLE="1")
    xla.set_environment()
    assert (
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
        and environment["NCCL_NVLS_ENABLE"] == "1"
    )


FLAGS = (
    "--xla_gpu_graph_level=0 --xla_dump_hlo_pass_re='a --xla_b' --xla_gpu_bogus=\"c d\" "
    "--xla_gpu_old='e f' --xla_backend_optimization_level=1 --xla_gpu_enable_async_collectives"
)


def test_flags_that_would_abort_are_named_and_taken_out(environment, caplog):
    def start():
        code = "from jaxlib import xla_client as x; x.CompileOptions()"
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True
        ).returncode

    environment["XLA_FLAGS"] = FLAGS
    assert start() != 0  # what this is about
    xla.set_environment()
    assert environment["XLA_FLAGS"].split() == [
        "--xla_dump_hlo_pass_re='a", "--xla_b'", "--xla_backend_optimization_level=1",
    ]  # fmt: skip
    assert start() == 0
    assert [message.split("; ")[0] for message in caplog.messages] == [
        f"XLA_FLAGS: {JAXLIB} has no --{name}=..."
        for name in (
            "xla_gpu_graph_level",
            "xla_gpu_bogus",
            "xla_gpu_old",
            "xla_gpu_enable_async_collectives",
        )
    ]


def test_flags_that_are_known_or_in_a_file_stay_as_they_are(environment, caplog):
    for flags in ("--xla_gpu_autotune_level=2  --xla_dump_hlo_pass_re=.*", "", "/flags.txt"):
        environment["XLA_FLAGS"] = flags
        xla.set_environment()
        assert environment["XLA_FLAGS"] == flags and not caplog.messages


def test_a_flags_value_that_xla_cannot_read_is_a_mistake(environment):
    environment["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=perhaps"
    with pytest.raises(
        ValueError, match="XLA_FLAGS: 'perhaps' is not a value of --xla_gpu_enable_triton_gemm"
    ):
        xla.set_environment()


# What is printed.


def test_what_differs_from_the_defaults_is_told_with_why_and_gain(monkeypatch, environment):
    derived(monkeypatch)
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment.update(
        NCCL_NVLS_ENABLE="1",
        XLA_PYTHON_CLIENT_MEM_FRACTION=xla.MEMORY_FRACTION,
        XLA_FLAGS="--xla_a=1",
    )
    lines = told("xla_gpu_autotune_level=2")
    assert lines[0].startswith(
        "environment: XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 (default: 0.75): the share of a GPU's"
    )
    assert lines[1].startswith(
        "environment: NCCL_NVLS_ENABLE=1, set by the user; without, 0: no NVLink multicast"
    )
    assert lines[2:] == [
        "environment: XLA_FLAGS=--xla_a=1, set by the user",
        "compiler option: xla_gpu_enable_triton_gemm=False (default: true): a reason; +3% (8B, 4 x H200, jax 0.11.2)",
        "compiler option: xla_gpu_autotune_level=2, from config.xla_options",
    ]
    for value in (True, False):  # the second is as jaxscale sets it
        (line,) = told(f"xla_gpu_enable_triton_gemm={value}")[3:]
        assert (
            line == f"compiler option: xla_gpu_enable_triton_gemm={value}, from config.xla_options"
        )


def test_a_translated_option_is_told_with_its_reason(monkeypatch):
    for name, value in next(iter(xla.TRANSLATIONS.items())):
        derived(monkeypatch, name=name, value=value)
        assert "a reason; +3%" in told()[-1]


def test_a_value_that_follows_the_config_is_told_too(monkeypatch):
    derived(monkeypatch, name="xla_gpu_autotune_level", value=lambda config, sizes: sizes["fsdp"])
    assert "xla_gpu_autotune_level=8 (default: true): a reason" in told()[-1]


def test_nothing_is_told_where_nothing_differs():
    assert told(platform="cpu") == []


# The compilation cache.


@pytest.fixture
def updates(monkeypatch, environment, tmp_path):
    """What enable_compilation_cache tells JAX, on a machine with GPUs."""
    updates = {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        environment.pop(name, None)
    return updates


def test_the_cache_is_on_for_every_program_in_a_folder_of_this_version(
    updates, environment, tmp_path
):
    xla.enable_compilation_cache()
    folder = tmp_path / "jaxscale" / "jax" / jax.__version__
    assert updates == {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    assert [path.name for path in folder.iterdir()] == ["xla_gpu_per_fusion_autotune_cache_dir"]
    updates.clear()
    environment.update(
        JAX_COMPILATION_CACHE_DIR="gs://bucket/cache",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="3",
    )
    xla.enable_compilation_cache()
    assert (
        updates == {"jax_compilation_cache_dir": "gs://bucket/cache"} and not Path("gs:").exists()
    )


def test_no_cache_on_a_cpu(updates, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    xla.enable_compilation_cache()
    assert not updates


def test_a_folder_that_cannot_be_made_is_told_and_the_run_goes_on(
    updates, environment, tmp_path, caplog
):
    (tmp_path / "file").touch()
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    xla.enable_compilation_cache()
    assert (
        not updates
        and "file/cache cannot be made (Not a directory): every start compiles anew" in caplog.text
    )


def test_jax_has_xla_keep_its_timings_in_the_folder_that_was_made(updates, tmp_path, monkeypatch):
    xla.enable_compilation_cache()
    monkeypatch.undo()
    saved = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    }
    try:
        jax.config.update("jax_compilation_cache_dir", updates["jax_compilation_cache_dir"])
        jax.config.update("jax_enable_compilation_cache", True)
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    finally:
        for name, value in saved.items():
            jax.config.update(name, value)
    folder = Path(
        options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir
    )
    assert folder.is_dir() and folder.is_relative_to(tmp_path)
