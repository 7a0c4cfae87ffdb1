"""The compiler options: a user's settings win, and no mistake in them aborts a run."""

import dataclasses
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxscale.compile import ahead, fit
from jaxscale.config import AsyncTensor, Config, Dtype, MeshConfig, PrecisionConfig, Recipe
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine
from jaxscale.step.plan import plan_of_run
from jaxscale.step.update import update
from jaxscale.xla import jaxlib, options, targets
from jaxscale.xla.environment import MEMORY_FRACTION

JAXLIB = f"jaxlib {metadata.version('jaxlib')}"
SIZES = dict(stage=1, data=1, fsdp=8, expert=1, context=1, tensor=1)
OPTIONS = options.OPTIONS


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    """Those that jaxscale sets change with what is measured; the tests bring their own."""
    monkeypatch.setattr(options, "OPTIONS", ())


def config_of(*texts, recipe=Recipe.DTYPE, async_tensor=AsyncTensor.OFF, scan_unroll=1):
    return SimpleNamespace(
        xla_options=texts,
        deterministic=False,
        scan_unroll=scan_unroll,
        model=SimpleNamespace(num_layers=2),
        mesh=MeshConfig(async_tensor=async_tensor),
        precision=PrecisionConfig(recipe=recipe),
        dtype=Dtype.BFLOAT16,
    )


def options_of(*texts, platform="gpu", sizes=SIZES, **device):
    return options.compiler_options(config_of(*texts), sizes, platform=platform, **device)


def told(*texts, platform="gpu") -> list[str]:
    found = options_of(*texts, platform=platform)
    return options.describe(found, config_of(*texts), platform=platform).splitlines()


def derived(monkeypatch, *, name="xla_gpu_enable_triton_gemm", value=False, **fields):
    """Makes it the one option that jaxscale sets by itself."""
    texts = dict(default="true", why="a reason", gain="+3% (8B, 4 x H200, jax 0.11.2)") | fields
    monkeypatch.setattr(options, "OPTIONS", (options.Option(name, value, **texts),))


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
    level = options_of("optimization_level=O1", platform="cpu")
    assert level in ({"optimization_level": "O1"}, {"optimization_level": 19})
    assert jax.jit(lambda x: x + 1, compiler_options=level)(1) == 2


def test_an_option_of_another_platform_is_named_and_ignored(caplog):
    assert options_of(
        "xla_gpu_autotune_level=2", "xla_backend_optimization_level=1", platform="cpu"
    ) == {"xla_backend_optimization_level": "1"}
    assert caplog.messages == [
        "config.xla_options='xla_gpu_autotune_level=2' has no effect on CPUs and is ignored"
    ]
    with pytest.raises(ValueError, match="not a valid int32 value"):  # a mistake is one here too
        options_of("xla_gpu_autotune_level=high", platform="cpu")


def test_the_check_starts_no_device_and_compiles_nothing(tmp_path):
    code = f"""if True:
        from types import SimpleNamespace
        from jaxscale.config import MeshConfig, PrecisionConfig
        from jax._src import xla_bridge
        from jaxscale.xla import options, targets
        texts = ("xla_dump_to={tmp_path}/dump", "xla_gpu_autotune_level=2")
        parts = dict(precision=PrecisionConfig(), mesh=MeshConfig())
        config = SimpleNamespace(xla_options=texts, deterministic=True, **parts)
        sizes, card = {SIZES | dict(fsdp=1)}, "NVIDIA H200"
        num_ours = sum(option.applies(config, sizes) for option in options.OPTIONS)
        num_ours += targets.recorded_autotune(card) is not None
        found = options.compiler_options(config, sizes, platform="gpu", device_kind=card)
        assert num_ours and len(found) == 2 + num_ours
        assert not xla_bridge.backends_are_initialized()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert not (tmp_path / "dump").exists()


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
        "compiler option xla_gpu_enable_triton_gemm=COLLECTIVE is left out: "
        "'COLLECTIVE' is not a valid bool value"
    ]
    derived(monkeypatch, name="xla_gpu_graph_level")
    assert options_of() == {}
    assert "xla_gpu_graph_level" in caplog.messages[1]


def test_every_option_that_jaxscale_sets_is_known_here():
    for option in OPTIONS:
        value = option.value_for(small_config(), SIZES)
        spellings = jaxlib.spellings(option.name, value)
        assert None in [jaxlib.refusal(*spelling) for spelling in spellings], option
        assert option.why and option.gain and option.default


def test_what_is_rounded_is_so_for_every_config_mesh_and_platform(monkeypatch):
    ours = [option for option in OPTIONS if option.is_shared and "gpu" not in option.name]
    assert [option.name for option in ours] == ["xla_allow_excess_precision"]
    monkeypatch.setattr(options, "OPTIONS", tuple(ours))
    for sizes in (SIZES, SIZES | dict(fsdp=1)):
        for platform in ("cpu", "gpu"):
            assert options_of(sizes=sizes, platform=platform) == {ours[0].name: False}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_programs_get_just_the_options_that_all_share(platform, monkeypatch, environment):
    monkeypatch.setattr(options, "OPTIONS", OPTIONS)
    name = "xla_allow_excess_precision"

    def numerics(*texts, **settings):
        return options.shared_options(config_of(*texts, **settings), platform)

    assert numerics() == numerics("xla_gpu_autotune_level=2") == {name: False}
    assert numerics(f"{name}=true") == {name: True}
    by_cublas = {"xla_gpu_enable_triton_gemm": False}
    copies = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    for settings, for_gpus in (
        (dict(recipe=Recipe.FP8_ROWWISE), by_cublas),
        (dict(async_tensor=AsyncTensor.RING), copies),
        (dict(async_tensor=AsyncTensor.RING, scan_unroll=2), copies | by_cublas),
        (dict(async_tensor=AsyncTensor.HALVES), {}),
        (dict(async_tensor=AsyncTensor.HALVES, scan_unroll=2), by_cublas),
        (dict(scan_unroll=2), {}),
    ):
        expected = for_gpus if platform == "gpu" else {}
        assert numerics(**settings) == {name: False} | expected
    for flag in (f"--{name}", f"--{name}=true"):
        environment["XLA_FLAGS"] = f"--xla_gpu_autotune_level=2 {flag}"
        assert numerics() == {} and numerics(f"{name}=true") == {name: True}


def test_a_product_is_rounded_to_bfloat16_where_the_program_says_so(monkeypatch):
    monkeypatch.setattr(options, "OPTIONS", OPTIONS)
    x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)

    def product(x):
        return (x @ x).astype(jnp.float32)

    # One program for each operation has nothing to leave out.
    expected = product(x)
    compiled = jax.jit(product, compiler_options=options.shared_options(config_of(), "cpu"))
    assert (compiled(x) == expected).all()


COMBINED = {
    option.name.split("_gpu_")[1].split("_combine")[0]: option
    for option in OPTIONS
    if option.name.endswith("combine_threshold_bytes")
}


@pytest.mark.parametrize(
    "sizes, combined",
    [
        (dict(), {"all_gather", "reduce_scatter"}),
        (dict(fsdp=1), set()),
        (dict(fsdp=1, data=8), set()),
        (dict(fsdp=1, context=8), set()),
        (dict(fsdp=2, context=4), {"all_gather", "reduce_scatter"}),
        (dict(fsdp=4, data=2), {"all_gather", "reduce_scatter", "all_reduce"}),
        (dict(fsdp=4, tensor=2), set()),
        (dict(fsdp=4, stage=2), set()),
        (dict(fsdp=4, expert=2), set()),
    ],
)
def test_collectives_of_a_layer_are_combined_where_only_weights_have_some(sizes, combined):
    unrolled = small_config(scan_unroll=1)  # of one layer
    assert {name for name, each in COMBINED.items() if each.applies(unrolled, SIZES | sizes)} == (
        combined
    )
    scanned = dataclasses.replace(unrolled, model=dataclasses.replace(unrolled.model, num_layers=2))
    assert not any(each.applies(scanned, SIZES | sizes) for each in COMBINED.values())


@pytest.mark.parametrize("reduce_dtype", Dtype)
def test_one_layers_weights_or_gradients_are_combined_and_not_twos(reduce_dtype):
    config = small_config(mesh=MeshConfig(reduce_dtype=reduce_dtype))
    sizes = SIZES | dict(fsdp=4, context=2)
    # Smaller layers keep XLA's default.
    assert {each.value_for(config, sizes) for each in COMBINED.values()} == {30 * 2**20}
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, model_dim=8192, mlp_dim=28_672)
    )
    values = {name: each.value_for(config, sizes) for name, each in COMBINED.items()}
    weights = 2 * config.model.num_layer_params()
    gradients = config.model.num_layer_params() * reduce_dtype.itemsize // 8
    assert weights < values["all_gather"] < 2 * weights
    assert gradients < values["reduce_scatter"] == values["all_reduce"] < 2 * gradients


def test_autotune_entries_of_a_card_are_loaded_there(monkeypatch, tmp_path):
    version = metadata.version("jaxlib")
    for name in (f"h200-jaxlib{version}", f"h100-jaxlib{version}", "h200-jaxlib0.0.1"):
        (tmp_path / f"{name}.autotune.txtpb").touch()
    monkeypatch.setattr(targets, "FOLDER", tmp_path)
    own = "xla_gpu_load_autotune_results_from"
    mine = {own: str(tmp_path / f"h200-jaxlib{version}.autotune.txtpb")}
    assert options_of(device_kind="NVIDIA H200") == mine
    assert "h100-" in options_of(device_kind="NVIDIA H100 80GB HBM3")[own]
    assert "h200-" in options_of(device_kind="NVIDIA H200-SXM5")[own]
    for kind, platform in (
        ("NVIDIA GB200", "gpu"),
        ("NVIDIA H20", "gpu"),
        ("NVIDIA H200", "cpu"),
    ):
        assert options_of(device_kind=kind, platform=platform) == {}
    users = options_of(f"{own}=my.txtpb", device_kind="NVIDIA H200")
    assert users == {own: "my.txtpb"}
    told_of_mine = options.describe(mine, config_of(), platform="gpu")
    assert "the same autotune entries in every run" in told_of_mine
    told_of_users = options.describe(users, config_of(f"{own}=my.txtpb"), platform="gpu")
    assert "from config.xla_options" in told_of_users.splitlines()[-1]


# Where they go.


def small_config(**changes) -> Config:
    return Config(
        model=llama.Config(
            vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(warmup_steps=2),
        steps=4,
        batch_size=8,
        seq_len=16,
        **changes,
    )


def test_the_update_is_compiled_with_the_options(tmp_path):
    folder = tmp_path / "dump"
    plan = plan_of_run(small_config(xla_options=(f"xla_dump_to={folder}", "xla_bogus=1")))
    assert plan.compiler_options == {"xla_dump_to": str(folder)} and not folder.exists()
    fit.compile_only(update, plan)
    assert [path for path in folder.iterdir() if "update" in path.name]


# XLA's plugin for CUDA reports on machines without CUDA's libraries.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_plan_asks_for_the_roundings_that_the_program_says(platform, monkeypatch):
    monkeypatch.setattr(options, "OPTIONS", OPTIONS)
    devices = jax.devices()
    if platform == "gpu":
        if reason := ahead.missing():
            pytest.skip(reason)
        devices = ahead.devices_of("h100", hosts=1, gpus_per_host=8)
    plan = plan_of_run(small_config(), devices=devices)
    for programs in (plan.compiler_options, plan.shared_options):
        assert programs["xla_allow_excess_precision"] is False


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


# What is printed.


def test_what_differs_from_the_defaults_is_told_with_why_and_gain(monkeypatch, environment):
    derived(monkeypatch)
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment.update(
        NCCL_NVLS_ENABLE="1",
        XLA_PYTHON_CLIENT_MEM_FRACTION=MEMORY_FRACTION,
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
        "compiler option: xla_gpu_enable_triton_gemm=False (default: true): a reason; "
        "+3% (8B, 4 x H200, jax 0.11.2)",
        "compiler option: xla_gpu_autotune_level=2, from config.xla_options",
    ]
    for value in (True, False):  # the second is as jaxscale sets it
        (line,) = told(f"xla_gpu_enable_triton_gemm={value}")[3:]
        assert (
            line == f"compiler option: xla_gpu_enable_triton_gemm={value}, from config.xla_options"
        )


def test_a_translated_option_is_told_with_its_reason(monkeypatch):
    for name, value in next(iter(jaxlib.TRANSLATIONS.items())):
        derived(monkeypatch, name=name, value=value)
        assert "a reason; +3%" in told()[-1]


def test_a_value_that_follows_the_config_is_told_too(monkeypatch):
    derived(monkeypatch, name="xla_gpu_autotune_level", value=lambda config, sizes: sizes["fsdp"])
    assert "xla_gpu_autotune_level=8 (default: true): a reason" in told()[-1]


def test_nothing_is_told_where_nothing_differs():
    assert told(platform="cpu") == []
