"""torchtitan is asked for what jaxscale trains, and the logs of its processes are read."""

import dataclasses
import math
import re
import sys
import types

import pytest

from jaxscale import command_line
from jaxscale.perf import torchtitan
from tests.perf.scripts import ROOT, load
from tests.perf.test_peers import LOG, loads_a_config

OPTIONS = torchtitan.Options(python="python", num_steps=20, skip=5)
FEW_STEPS = dataclasses.replace(OPTIONS, num_steps=2, skip=1)

# As torchtitan 0.2.2 and torchrun 2.11 print two stages, whose processes print out of step; the
# first stage has no loss. A progress bar leaves its line open.
STAGES = """
[default0]:
Generating train split: 1326 examples [00:00, 8360.24 examples/s][default0]:[titan] 2026-11-22 \
15:03:46,228 - root - INFO - step:  1  loss: -1.00000  grad_norm: 2033.3857  \
memory: 60.00GiB(42.86%)  tps: 315  tflops: 0.01  mfu: 0.10%
[default1]:[titan] 2026-11-22 15:03:46,228 - root - INFO - step:  1  loss:  8.11903  \
grad_norm: 2033.3857  memory: 61.00GiB(43.57%)  tps: 324  tflops: 0.01  mfu: 0.10%
[default1]:[titan] 2026-11-22 15:03:47,303 - root - INFO - step:  2  loss:  7.78269  \
grad_norm: 1759.4125  memory: 61.50GiB(43.57%)  tps: 478  tflops: 0.02  mfu: 0.20%
[default0]:[titan] 2026-11-22 15:03:47,303 - root - INFO - step:  2  loss: -1.00000  \
grad_norm: 1759.4125  memory: 72.00GiB(42.86%)  tps: 485  tflops: 0.02  mfu: 0.20%
[default0]:[titan] 2026-11-22 15:03:48,329 - root - INFO - step:  3  loss: -1.00000  \
grad_norm: 2351.3733  memory: 71.00GiB(42.86%)  tps: 499  tflops: 0.02  mfu: 0.40%
[default1]:[titan] 2026-11-22 15:03:48,333 - root - INFO - step:  3  loss:  7.14653  \
grad_norm: 2351.3733  memory: 61.00GiB(43.57%)  tps: 498  tflops: 0.02  mfu: 0.40%
"""


# Its log.


def test_the_lines_of_torchtitan_are_read_through_colours_and_separators():
    lines = torchtitan.parse_lines("\n".join(LOG))
    assert [line["step"] for line in lines] == [10, 15, 20]
    assert [line["tokens_per_second_per_device"] for line in lines] == [9550, 10750, 9747]
    assert [line["mfu_full"] for line in lines] == pytest.approx([0.5591, 0.5708, 0.5710])
    assert [line["peak_memory_gib"] for line in lines] == [68.31, 68.32, 69.0]
    figures = torchtitan.figures_of(lines, OPTIONS)
    assert figures["steps"] == 15
    assert figures["tokens_per_second_per_device"] == 9747
    assert figures["tokens_per_second_per_device_max"] == 10750


def test_rates_are_those_of_the_process_that_has_the_loss_and_memory_is_the_fullest_gpus():
    lines = torchtitan.parse_lines(STAGES)
    assert [(line["rank"], line["step"]) for line in lines] == [
        *((0, 1), (1, 1)),
        *((1, 2), (0, 2)),
        *((0, 3), (1, 3)),
    ]
    figures = torchtitan.figures_of(lines[2:], FEW_STEPS)
    assert figures["steps"] == 2
    assert figures["tokens_per_second_per_device"] == (478 + 498) / 2
    assert figures["mfu_full"] == pytest.approx(0.003)
    assert figures["peak_memory_gib"] == 72
    assert figures["memory_gib_by_rank"] == [72, 61.5]
    assert figures["last_loss"] == 7.14653


def test_a_loss_that_is_not_a_number_is_one():
    lines = torchtitan.parse_lines(re.sub(r"loss:  \d.\d+", "loss:      nan", STAGES))
    assert math.isnan(torchtitan.figures_of(lines, FEW_STEPS)["last_loss"])


PYTHON_FAILS = "[default0]:[rank0]: ValueError: output_weight (3) exceeds minimum layers (2)."
UNTRACEABLE = "[default1]:[rank1]: torch._dynamo.exc.Unsupported: Attempted to call builtin"
LOST = "[default0]:[rank0]: RuntimeError: [pair.cc:547] Connection closed by peer"
NCCL = "[default0]:[rank0]: torch.distributed.DistBackendError: NCCL error in: x.cpp:94"
FULL = "[default0]:[rank0]: torch.OutOfMemoryError: CUDA out of memory."
TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([PYTHON_FAILS, TORCHRUN], "ValueError: output_weight (3) exceeds minimum layers (2)."),
        (
            [UNTRACEABLE, LOST, TORCHRUN],
            "torch._dynamo.exc.Unsupported: Attempted to call builtin",
        ),
        ([FULL, PYTHON_FAILS, TORCHRUN], "torch.OutOfMemoryError: CUDA out of memory."),
        ([NCCL], "torch.distributed.DistBackendError: NCCL error in: x.cpp:94"),
        (["| jax.errors.JaxRuntimeError: RESOURCE"], "jax.errors.JaxRuntimeError: RESOURCE"),
        ([*LOG, "[default0]:    raise ValueError("], None),
    ],
)
def test_of_a_failure_the_cause_is_told(lines, told):
    assert torchtitan.last_exception("\n".join(lines)) == told


# Its command.


@loads_a_config
@pytest.mark.parametrize(("file", "flavor"), [("llama3_8b", "8B"), ("llama3_70b", "70B")])
def test_a_llama_config_has_the_name_that_torchtitan_gives_it(file, flavor):
    config = command_line.read_config([f"--config={ROOT}/configs/{file}.py"])
    assert torchtitan.flavor_of(config.model) == flavor


@loads_a_config
def test_of_fewer_layers_it_is_the_extensions(tmp_path):
    told = command_of(tmp_path, "model.num_layers=16", "scan_unroll=16", "mesh.fsdp=2")
    assert told["model.flavor"] == "8B_16layers"
    assert told["experimental.custom_import"] == "torchtitan_extension"
    assert "experimental.custom_import" not in command_of(tmp_path, "mesh.fsdp=2")


@loads_a_config
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["--config.model.num_layers=33", "--config.scan_unroll=1"],
            "no Llama 3 with 4096, 32, 8, 14336, 33. It has, by model_dim, .*8B: 4096, 32",
        ),
        (["--config.model.tie_embeddings"], "no Llama 3 with config.model.tie_embeddings=True"),
        (["--config.model.head_size", "64"], "no Llama 3 with config.model.head_size=64"),
        (["--config.model.vocab_size=257"], "no Llama 3 with config.model.vocab_size=257"),
    ],
)
def test_a_model_that_torchtitan_has_not_is_refused_with_those_it_has(settings, told):
    config = command_line.read_config(["--config", f"{ROOT}/configs/llama3_8b.py", *settings])
    with pytest.raises(ValueError, match=told):
        torchtitan.flavor_of(config.model)


def command_of(tmp_path, *settings, num_gpus=2):
    """The peer's settings, for Llama 3 8B with these; the last of two counts."""
    words = [f"--config={ROOT}/configs/llama3_8b.py", *(f"--config.{each}" for each in settings)]
    command = torchtitan.command_of(
        command_line.read_config(words), OPTIONS, num_gpus=num_gpus, text=tmp_path
    )
    return dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)


STAGES_OF_8 = ("mesh.stage=2", "mesh.fsdp=1", "batch_size=8", "grad_accumulation=8")


@loads_a_config
@pytest.mark.parametrize(
    ("schedule", "name", "layers"),
    [
        (("one_f_one_b",), "1F1B", 18),
        (("gpipe",), "GPipe", 18),
        (("interleaved",), "Interleaved1F1B", 9),
        (("interleaved", "pipeline.chunks=4"), "Interleaved1F1B", 5),
    ],
)
def test_a_pipeline_has_the_same_schedule_chunks_and_microbatches(tmp_path, schedule, name, layers):
    kind, *chunks = schedule
    told = command_of(tmp_path, *STAGES_OF_8, f"pipeline.schedule={kind}", *chunks)
    assert told["parallelism.pipeline_parallel_degree"] == "2"
    assert told["parallelism.pipeline_parallel_schedule"] == name
    assert told["parallelism.pipeline_parallel_layers_per_stage"] == str(layers)
    assert told["parallelism.data_parallel_shard_degree"] == "1"
    # It cuts the rows of a process into microbatches by itself.
    assert told["training.local_batch_size"] == told["training.global_batch_size"] == "8"
    assert told["parallelism.pipeline_parallel_microbatch_size"] == "1"
    assert told["experimental.custom_import"] == "torchtitan_extension"


@loads_a_config
def test_stages_over_more_gpus_share_the_rows(tmp_path):
    told = command_of(
        tmp_path,
        *("mesh.stage=2", "mesh.fsdp=2", "batch_size=32", "grad_accumulation=8"),
        "pipeline.schedule=one_f_one_b",
        num_gpus=4,
    )
    assert told["parallelism.data_parallel_shard_degree"] == "2"
    assert told["training.local_batch_size"] == "16"
    assert told["parallelism.pipeline_parallel_microbatch_size"] == "2"


@loads_a_config
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["pipeline.schedule=zb_h1"], "pipeline.schedule=zb_h1: beside torchtitan it is one of"),
        (["pipeline.schedule=auto"], "gpipe, one_f_one_b, interleaved"),
        # torchtitan takes five layers a chunk, and so has seven chunks instead of six.
        (
            ["pipeline.schedule=interleaved", "pipeline.chunks=5"],
            "cannot make 10 chunks of 32 layers.*change config.pipeline.chunks=5 or config.mesh.st",
        ),
    ],
)
def test_a_pipeline_that_torchtitan_has_not_is_refused(tmp_path, settings, told):
    with pytest.raises(ValueError, match=told):
        command_of(tmp_path, *STAGES_OF_8, *settings)


@loads_a_config
def test_rows_split_over_gpus_are_context_parallel(tmp_path):
    told = command_of(tmp_path, "mesh.context=2", "mesh.fsdp=1", "batch_size=2")
    assert told["parallelism.context_parallel_degree"] == "2"
    assert told["training.local_batch_size"] == "2"
    assert "parallelism.pipeline_parallel_degree" not in told
    assert told["experimental.custom_import"] == "torchtitan_extension"
    alone = command_of(tmp_path, "batch_size=2")
    assert not [key for key in alone if "context" in key or "custom" in key]


@loads_a_config
def test_products_split_over_gpus_are_tensor_parallel(tmp_path):
    told = command_of(tmp_path, "mesh.tensor=2", "mesh.fsdp=1", "batch_size=4")
    assert told["parallelism.tensor_parallel_degree"] == "2"
    assert told["training.local_batch_size"] == "4"
    assert told["experimental.custom_import"] == "torchtitan_extension"


@loads_a_config
def test_copies_of_the_state_are_its_replicas(tmp_path):
    told = command_of(tmp_path, "mesh.data=2", "mesh.fsdp=2", "batch_size=8", num_gpus=4)
    assert told["parallelism.data_parallel_replicate_degree"] == "2"
    assert told["parallelism.data_parallel_shard_degree"] == "2"
    assert told["training.local_batch_size"] == "2"
    assert "experimental.custom_import" not in told


@loads_a_config
def test_a_long_document_is_several_lines_and_nothing_of_it_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(torchtitan, "MOST_CHARACTERS", 5)
    (tmp_path / "a.txt").write_text("The cat sat.")
    config = command_line.read_config(
        [f"--config={ROOT}/configs/llama3_8b.py", f"--config.data.path={tmp_path}/a.txt"]
    )
    pytest.importorskip("tokenizers")
    torchtitan.write_text(tmp_path / "text", config)
    lines = (tmp_path / "text" / "data.jsonl").read_text().splitlines()
    assert lines == ['{"text": "The c"}', '{"text": "at sa"}', '{"text": "t."}']


# What runs inside it.


@pytest.fixture
def extension(monkeypatch):
    """The extension, loaded with stand-ins for torchtitan, and the calls that it makes."""
    calls: list[tuple] = []

    def record(*call):
        calls.append(call)

    def module(name, **members):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))

    @dataclasses.dataclass
    class Specification:
        parallelize_fn: object
        model_args: dict

    @dataclasses.dataclass
    class Sizes:
        n_layers: int

    module(
        "torch.distributed.tensor.experimental._attention",
        set_rotate_method=lambda method: record("rotate", method),
    )
    module("torchtitan.config", TORCH_DTYPE_MAP={"bfloat16": "bf16", "float32": "f32"})
    module(
        "torchtitan.models.llama3.infra.parallelize",
        apply_fsdp=lambda model, mesh, **others: record("fsdp", mesh, others),
        parallelize_llama=lambda model, *of_the_run: record("own") or model,
    )
    module(
        "torchtitan.protocols.train_spec",
        get_train_spec=lambda name: Specification(None, {"8B": Sizes(3)}),
        register_train_spec=record,
    )
    loaded = load(torchtitan.EXTENSION)
    [(name, registered)] = calls
    assert name == "llama3" and registered.parallelize_fn is loaded.parallelize
    layers = {name: args.n_layers for name, args in registered.model_args.items()}
    assert layers == {"8B": 3, "8B_1layers": 1, "8B_2layers": 2}
    calls.clear()
    return loaded.parallelize, calls


def run_of(pp=1, fsdp=1, cp=1, tp=1):
    dims = types.SimpleNamespace(
        pp_enabled=pp > 1,
        cp_enabled=cp > 1,
        tp_enabled=tp > 1,
        fsdp_enabled=fsdp * cp > 1,
        _meshes={"fsdp": "one"},
    )
    parallelism = types.SimpleNamespace(
        context_parallel_rotate_method="alltoall", fsdp_reshard_after_forward="default"
    )
    training = types.SimpleNamespace(
        mixed_precision_param="bfloat16",
        mixed_precision_reduce="float32",
        enable_cpu_offload=False,
    )
    return dims, types.SimpleNamespace(parallelism=parallelism, training=training)


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_what_fsdp_does_not_split_computes_in_bfloat16_with_float32_sums(extension, axis):
    parallelize, calls = extension
    assert parallelize("model", *run_of(**{axis: 2})) == "model"
    own, (kind, mesh, others) = calls
    assert own == ("own",) and (kind, mesh) == ("fsdp", "one")
    assert others["param_dtype"] == "bf16" and others["reduce_dtype"] == "f32"
    assert others["pp_enabled"] and others["reshard_after_forward_policy"] == "default"


def test_what_torchtitan_casts_itself_is_left_alone(extension):
    parallelize, calls = extension
    for sizes in (dict(pp=2, fsdp=2), dict(tp=2, fsdp=2), dict(fsdp=2), {}):
        parallelize("model", *run_of(**sizes))
    assert calls == [("own",)] * 4


def test_the_way_keys_travel_is_set_before_the_model_is_laid_out(extension):
    parallelize, calls = extension
    parallelize("model", *run_of(cp=2))
    assert calls == [("rotate", "alltoall"), ("own",)]
