"""The run's configuration: a typed tree of dataclasses, its checks, and its JSON form.

A config file has `get_config(arg="") -> Config`; any field is overridden on the command line
(`--config.mesh.fsdp=4`). The model, optimiser and schedule parts are the `Config` of the module
that implements them, so importing that module is the whole registry. Nothing here imports jax: a
mistake is reported before a device is touched.
"""

import dataclasses
import difflib
import enum
import importlib
import json
import math
import re
import struct
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# StrEnum, tuples and mutable dataclasses, because ml_collections 1.1 cannot override fields of
# frozen dataclasses, `Literal[...]`, `list[...]` or string annotations
# (`from __future__ import annotations`).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a setting can be. also: one more, and what it means."""

    least: float = -math.inf
    above: float | None = None
    below: float | None = None
    most: float = 2**31 - 1  # devices count in int32
    also: tuple[float, str] | None = None

    def fix(self, value: float) -> str | None:
        """What to set it to instead; None for a value that will do."""
        if self.also is not None and value == self.also[0]:
            return None
        rounded = _in_float32(value) if isinstance(value, float) else value
        if value != 0 and rounded == 0:
            return "it is 0 in float32; set it to 0, or to 1.2e-38 or more"
        is_low = not (value >= self.least if self.above is None else rounded > self.above)
        is_high = not (value <= self.most if self.below is None else rounded < self.below)
        if not is_low and not is_high:
            return None
        low = f"to {self.least} or more" if self.above is None else f"above {self.above}"
        high = f"to {self.most} or less" if self.below is None else f"below {self.below}"
        # int32's largest number is told to those alone who went beyond it.
        has_high = self.below is not None or self.most != Range.most
        told = [low] * (is_low or has_high) + [high] * (is_high or has_high)
        also = ", or to {} {}".format(*self.also) if self.also else ""
        return f"set it {' and '.join(told)}{also}"


def number(*, default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A field that is a number of this `Range`."""
    return dataclasses.field(default=default, metadata={"range": Range(**bounds)})


def _in_float32(value: float) -> float:
    """As a device has it: no subnormals, which it takes for 0."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return 0.0 if abs(rounded) < 2.0**-126 else rounded


class Dtype(enum.StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes."""
        return 4 if self is Dtype.FLOAT32 else 2


class AxisTypes(enum.StrEnum):
    EXPLICIT = "explicit"
    AUTO = "auto"


class Remat(enum.StrEnum):
    """What the backward pass finds saved, from least to most memory; `ops/layers.py` says by name.

    GEMMS_LEAN: what GEMMS names and no more, where layers are unrolled; there GEMMS has XLA keep
    norms and activations too.
    AUTO: the richest up to GEMMS with which the compiled update fits the devices' memory
    (`compile/fit.py`).
    """

    AUTO = "auto"
    FULL = "full"
    ATTENTION = "attention"
    ATTENTION_MLP = "attention_mlp"
    GEMMS_LEAN = "gemms_lean"
    GEMMS = "gemms"
    NONE = "none"

    @property
    def leaner(self) -> "Remat | None":
        """Of those that are there for their memory, the one before this; `FULL` has none."""
        lean = [Remat.FULL, Remat.ATTENTION, Remat.ATTENTION_MLP, Remat.GEMMS_LEAN]
        return dict(zip(lean[1:], lean, strict=False)).get(self)


class Attention(enum.StrEnum):
    AUTO = "auto"
    FLASH = "flash"
    CUDNN = "cudnn"
    XLA = "xla"


class Norm(enum.StrEnum):
    AUTO = "auto"
    XLA = "xla"
    TRITON = "triton"


class Recipe(enum.StrEnum):
    """In which numbers the layers' products with weights are made; `ops/fp8.py` has the arithmetic.

    DTYPE: config.dtype. FP8_TENSORWISE: 8 bits, one scale for all of an operand that a device has.
    FP8_DELAYED: 8 bits, one scale, of the largest values of the updates before.
    FP8_ROWWISE: 8 bits, one scale for each row, and for each column of the other operand.
    FP8_BLOCKWISE: 8 bits, one scale for each 128 values of a sum, and each 128 x 128 of a weight.
    """

    DTYPE = "dtype"
    FP8_TENSORWISE = "fp8_tensorwise"
    FP8_DELAYED = "fp8_delayed"
    FP8_ROWWISE = "fp8_rowwise"
    FP8_BLOCKWISE = "fp8_blockwise"


class Float8(enum.StrEnum):
    """e4m3 has 3 bits of mantissa and 18 binades of range, e5m2 2 bits and 32 binades.

    AUTO: what the recipe's sources take, e5m2 with one scale and e4m3 with finer ones.
    """

    AUTO = "auto"
    E4M3 = "e4m3"
    E5M2 = "e5m2"


class PipelineSchedule(enum.StrEnum):
    """In which order the stages of a pipeline work; `parallel/schedules.py` has the tables.

    AUTO: the one with the smallest bubble (`parallel/choice.py`).
    """

    AUTO = "auto"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "one_f_one_b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb_h1"


class Exchange(enum.StrEnum):
    """What attention's devices send each other where `mesh.context` splits the sequence.

    `ops/context.py` has the last two, docs/parallelism.md what each costs.
    """

    AUTO = "auto"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    RING = "ring"


class AsyncTensor(enum.StrEnum):
    """Layers on parts of the rows, so that what `mesh.tensor` sends has products beside it.

    RING: the rows of one device after another (`ops/ring.py`). HALVES: two halves of each device's
    rows (`ops/halves.py`). AUTO: a ring where it can be, else halves (`async_tensor_of`).
    """

    OFF = "off"
    AUTO = "auto"
    RING = "ring"
    HALVES = "halves"


class Balance(enum.StrEnum):
    HEAD_TAIL = "head_tail"
    DOCUMENT = "document"


class DataFormat(enum.StrEnum):
    AUTO = "auto"
    INDEXED = "indexed"
    TEXT = "text"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


class OnCorruption(enum.StrEnum):
    """What a run does about a block of its store that is not as it was written."""

    STOP = "stop"
    SKIP = "skip"


THE_REST = (-1, "for the rest")


@dataclasses.dataclass(slots=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, slow to fast; their product is the number of devices.

    One of them may be -1: the rest.
    """

    stage: int = number(least=1, also=THE_REST, default=1)
    data: int = number(least=1, also=THE_REST, default=1)
    fsdp: int = number(least=1, also=THE_REST, default=-1)
    expert: int = number(least=1, also=THE_REST, default=1)
    context: int = number(least=1, also=THE_REST, default=1)
    tensor: int = number(least=1, also=THE_REST, default=1)
    axis_types: AxisTypes = AxisTypes.EXPLICIT
    # What the fsdp axis splits, and the context axis with it: 1 the optimiser state, 2 also the
    # gradients, 3 also the weights.
    zero: int = number(least=1, most=3, default=3)
    # With ZeRO-3: each layer's gathered weights are freed after its forward pass and gathered again
    # in the backward pass. False keeps them, all layers' weights in `dtype`, for a third less
    # traffic.
    reshard_after_forward: bool = True
    # The dtype in which a block's weight gradients are summed over devices, if wider than `dtype`.
    # float32: they leave their matrix products in float32 and are never rounded to bfloat16; twice
    # the bytes move.
    reduce_dtype: Dtype = Dtype.BFLOAT16
    # Whether `tensor` splits the residual stream between blocks: its rows, where as many go through
    # a layer at once, else its sequence.
    sequence_parallel: bool = True
    # Whether what `tensor` sends is sent beside products, and how.
    async_tensor: AsyncTensor = AsyncTensor.OFF

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Axis name to size, with -1 filled in.

        Raises ValueError if the product is not `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        wild = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if wild and num_devices % fixed == 0:
            sizes[wild[0]] = num_devices // fixed
        if math.prod(sizes.values()) != num_devices:
            # Of axes that are all 1, fsdp is the one that is not so by default.
            shown = (
                ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "fsdp=1"
            )
            raise ValueError(
                f"config.mesh ({shown}) needs {'a multiple of ' if wild else ''}{fixed} devices "
                f"and {num_devices} are here; change config.mesh so that the product is "
                f"{num_devices}, or set one axis to -1"
            )
        return sizes


MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
# Those that split the rows of a microbatch, and those that split the weights for ZeRO-3.
ROW_AXES = ("data", "fsdp", "expert")
WEIGHT_AXES = ("fsdp", "context")


def num_row_shards(sizes: Mapping[str, int]) -> int:
    """sizes: of the mesh's axes."""
    return math.prod(sizes[axis] for axis in ROW_AXES)


def num_weight_shards(sizes: Mapping[str, int]) -> int:
    """sizes: of the mesh's axes."""
    return math.prod(sizes[axis] for axis in WEIGHT_AXES)


@dataclasses.dataclass(slots=True, kw_only=True)
class PrecisionConfig:
    """Products of the layers' weights in 8 bits (docs/precision.md).

    Weights, optimiser, norms, attention, embedding, head and loss are as without.
    """

    recipe: Recipe = Recipe.DTYPE
    # The layers' weights, by a part of their name ("qkv", "down"), whose products are made so;
    # empty: all but experts', which must be named. The others' are made in config.dtype.
    weights: tuple[str, ...] = ()
    # So many of the first and of the last layers keep to config.dtype.
    first_layers_as_dtype: int = number(least=0, default=0)
    last_layers_as_dtype: int = number(least=0, default=0)
    # Of what comes backwards into a product.
    gradients: Float8 = Float8.AUTO
    # Whether the weights' own gradients are made in 8 bits too, or in config.dtype.
    weight_gradients: bool = True
    # With fp8_delayed: a scale is for the largest value of so many updates, and so many powers of
    # two above it.
    history: int = number(least=1, most=1024, default=16)
    margin: int = number(least=0, most=16, default=0)
    # On devices without such products: the same numbers, slowly.
    emulate: bool = False
    # Steps between looks at what rounding loses, in the workdir's rounding.jsonl; 0: none. Each is
    # a forward and a backward pass more, and a program to compile.
    statistics_every: int = number(least=0, default=0)


# One over the least number that float16 has.
MAX_LOSS_SCALE = 2.0**24


@dataclasses.dataclass(slots=True, kw_only=True)
class LossScaleConfig:
    """With dtype=float16: what the loss is multiplied by while gradients are made of it.

    They would be below float16's range otherwise (docs/precision.md). Powers of two.
    """

    start: float = number(least=1, most=MAX_LOSS_SCALE, default=2.0**16)
    # Steps in a row without overflow, after which the scale is doubled.
    growth_every: int = number(least=1, default=2000)
    # The overflow that halves it, counted since it last grew; so does each one that follows.
    hysteresis: int = number(least=1, default=2)
    # It stays between these. An overflow at the least is a bad step (config.bad_steps).
    least: float = number(least=1, most=MAX_LOSS_SCALE, default=1.0)
    most: float = number(least=1, most=MAX_LOSS_SCALE, default=MAX_LOSS_SCALE)


@dataclasses.dataclass(slots=True, kw_only=True)
class PipelineConfig:
    """With mesh.stage > 1: how the stages take turns. The microbatches are grad_accumulation."""

    schedule: PipelineSchedule = PipelineSchedule.AUTO
    # Of the interleaved schedule: the parts of the model, not next to each other, that each stage
    # has. More of them: a smaller bubble, and more messages.
    chunks: int = number(least=2, most=64, default=2)
    # Each stage does its own op in a tick, rather than all the same: fewer microbatches in flight
    # (P instead of 2 P - 1), and a longer step.
    lean: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class ContextConfig:
    # ALL_TO_ALL: heads for sequence and back. ALL_GATHER: every device's keys and values. RING: one
    # device's after the other's, beside the attention to the one before. AUTO: what
    # `step/layout.py:exchange_of` works out of the model's sizes and the mesh.
    exchange: Exchange = Exchange.AUTO
    # How all_gather and ring deal rows to devices, all-to-all needs none. HEAD_TAIL: two pieces of
    # each row; DOCUMENT: two pieces of each of its documents, for rows of few, unequal ones.
    balance: Balance = Balance.HEAD_TAIL


@dataclasses.dataclass(slots=True, kw_only=True)
class DataConfig:
    # 'python-stdlib' (the Python standard library's own source), a Megatron .bin/.idx prefix, a
    # folder that Hugging Face's `datasets` saved, or a file, folder or glob of text, JSONL, Parquet
    # or Arrow; or of JSON or CSV, which `format` must say.
    path: str = "python-stdlib"
    format: DataFormat = DataFormat.AUTO
    # 'bytes', or the path of a Hugging Face tokenizer.json.
    tokenizer: str = "bytes"
    # The field of a record, or the column, that holds the text.
    text_field: str = "text"
    # Where text is kept once it is tokens; empty: the user's cache folder.
    cache_dir: str = ""
    # The share of the documents, at the store's end, held out for evaluation.
    eval_fraction: float = number(above=0, below=1, default=0.01)
    shuffle: bool = True
    # cuDNN's packed attention (not ours) needs a static bound and pays for it: 33% of its time at
    # 64 documents a row (H100, rows of 8192 tokens that hold one document). 0: what the fullest row
    # of the data needs, up to 64. Tokens of a row's further documents become padding.
    max_documents_per_row: int = number(least=0, default=0)
    # Batches read ahead, and the threads that read them.
    prefetch: int = number(least=1, most=1000, default=4)
    threads: int = number(least=1, most=1000, default=2)
    # With a store that has checksums, as conversion writes them. STOP: the run ends, naming the
    # file. SKIP: rows that a damaged block is part of count in no loss.
    on_corruption: OnCorruption = OnCorruption.STOP


@dataclasses.dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    # False: nothing is saved, and a workdir that holds checkpoints is refused. For benchmarks.
    enabled: bool = True
    # Steps between checkpoints; 0: only at the end.
    every: int = number(least=0, default=1000)
    keep_last: int = number(least=1, default=2)
    # Minutes between checkpoints, besides `every`; 0: none.
    every_minutes: float = number(least=0, default=0.0)
    # Checkpoints of steps divisible by this are kept for good; 0: none.
    keep_every: int = number(least=0, default=0)
    # A folder on a fast disk of each host: checkpoints are written there, by each process its part,
    # and copied to the workdir while the run goes on. Empty: they are written to the workdir.
    local: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class BadStepsConfig:
    """A step whose loss or gradient is not finite, or whose loss is a spike: its update is skipped.

    The run stops after so many in a row.
    """

    stop_after: int = number(least=1, default=5)
    # A loss is a spike that is above the median of the last `window` by more than so many of their
    # standard deviations (1.4826 times the median deviation, at least 1% of the median); 0: none.
    spike: float = number(least=0, default=0.0)
    window: int = number(least=8, most=100_000, default=128)
    # Instead of stopping: the last checkpoint before those steps is restored, and the batches since
    # are left out; so many times at most.
    roll_back: int = number(least=0, default=0)
    # Where values are not finite, the layer in which that begins is looked for and named, once for
    # steps in a row: a forward and a backward pass, compiled the first time.
    locate: bool = True


@dataclasses.dataclass(slots=True, kw_only=True)
class WatchdogConfig:
    """When a process of scripts/train.py is stuck, and the run ends with its stacks; 0: never."""

    # In a step, or a batch of an evaluation: so long beyond three times the slowest of the last. A
    # minute for steps of 10 s.
    step_seconds: float = number(least=0, default=30.0)
    # In what takes what a disk or a compiler takes: a batch, a checkpoint, the first of the steps.
    # That the others wait for it is said with its stack after `step_seconds`.
    pause_seconds: float = number(least=0, default=1800.0)


@dataclasses.dataclass(slots=True, kw_only=True)
class IntegrityConfig:
    """Silent corruption: a device that changes what it holds, or computes it wrong.

    The run stops, naming the device, with nothing of it saved (docs/reliability.md).
    """

    # Steps between comparisons, bit by bit, of what several devices hold alike; with them also
    # before each save. 0: none. It reads each copy once, some 10 ms of memory traffic for 8B on
    # H200s (predicted), which 100 steps hide. Off until GPUs have shown no false alarm.
    replicas_every: int = number(least=0, default=0)
    # Steps between replays of a step, two more forward and backward passes, that must give the same
    # bits; 0: none. A second program is compiled for it.
    replay_every: int = number(least=0, default=0)


@dataclasses.dataclass(slots=True, kw_only=True)
class EvalConfig:
    # Steps between evaluations of the held-out text besides the first and the last; 0: none.
    every: int = number(least=0, default=0)
    batches: int = number(least=1, default=8)


@dataclasses.dataclass(slots=True, kw_only=True)
class SampleConfig:
    # Tokens sampled at the end; 0: none. Needs a tokenizer.
    tokens: int = number(least=0, default=200)
    prompt: str = "def "
    temperature: float = number(least=0, default=0.8)


@dataclasses.dataclass(slots=True, kw_only=True)
class LogConfig:
    tensorboard: bool = True
    # The Weights & Biases project; empty: off.
    wandb_project: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class ProfileConfig:
    """Steps start + 1 to start + steps of this process, recorded into WORKDIR/profile.

    By JAX's profiler; 0 steps: none.
    """

    start: int = number(least=0, default=0)
    steps: int = number(least=0, default=0)


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """One run.

    `batch_size` is the rows of one update over all devices, gradient accumulation included.
    """

    model: Any
    optim: Any
    schedule: Any
    steps: int = number(least=1)
    batch_size: int = number(least=1)
    seq_len: int = number(least=1)
    grad_accumulation: int = number(least=1, default=1)
    # JAX's keys have 32 bits of it.
    seed: int = number(least=0, most=2**32 - 1, default=0)
    # "hf:DIR": the first weights are those of a model folder of Hugging Face; empty: drawn.
    init_from: str = ""
    # The dtype of matrix products, activations and (but see mesh.reduce_dtype) the sum of a block's
    # weight gradients over devices. Weights, optimiser state, sums over microbatches and gradients
    # of the tables are float32.
    dtype: Dtype = Dtype.BFLOAT16
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    loss_scale: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)
    remat: Remat = Remat.GEMMS
    # So many layers, the first ones, are run with the next leaner policy, where a policy does not
    # fit for all of them. Of unrolled layers; remat="auto" finds the number.
    leaner_layers: int = number(least=0, default=0)
    # Layers per iteration of the scan over layers.
    scan_unroll: int = number(least=1, default=1)
    attention: Attention = Attention.AUTO
    norm: Norm = Norm.AUTO
    # The same bits each time on the same GPUs: no kernel adds in the order in which its threads
    # happen to come (docs/reliability.md). CPUs always do.
    deterministic: bool = False
    # XLA's options for compiling the update, "name=value" each, such as
    # "xla_gpu_enable_triton_gemm=false", and JAX's "optimization_level=O1"; they win over those
    # that jaxscale sets (xla/options.py).
    xla_options: tuple[str, ...] = ()
    # Parameters with one of these in their path ("embedding", "layers.qkv") are held fixed.
    frozen: tuple[str, ...] = ()
    # Weight of log(sum(exp(logits)))**2 in the loss (PaLM, section 5); 0: off.
    z_loss: float = number(least=0, default=0.0)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    context: ContextConfig = dataclasses.field(default_factory=ContextConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    bad_steps: BadStepsConfig = dataclasses.field(default_factory=BadStepsConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    integrity: IntegrityConfig = dataclasses.field(default_factory=IntegrityConfig)
    evaluation: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)


# What only the Config of such a module has.
PARTS = {"model": "validate_on", "optim": "state_axes", "schedule": "build"}


def validate(config: Config) -> None:
    """Everything that can be checked without devices or data.

    Raises ValueError naming the key, the value and the fix.
    """
    check_fields(config)
    for key, method in PARTS.items():
        fix = "set it to the Config of a module, such as llama.Config(...)"
        _require(hasattr(get(config, key), method), key, value=get(config, key), fix=fix)
    _validate_options(config)
    _validate_precision(config)
    _validate_loss_scale(config)
    _validate_mesh(config.mesh)
    _validate_stages(config, config.mesh.stage)
    _validate_sizes(config)
    _validate_context(config)
    for part in (config.model, config.optim, config.schedule):
        part.validate()
    config.schedule.build(config.steps)  # a warm-up may be longer than the run
    _require(
        config.model.max_seq_len is None or config.seq_len <= config.model.max_seq_len,
        "seq_len",
        value=config.seq_len,
        fix=f"lower it, or raise config.model.max_seq_len={config.model.max_seq_len}",
    )


def _validate_options(config: Config) -> None:
    """What the run does besides updates, and how it is compiled."""
    if config.sample.tokens and not config.sample.prompt:
        raise ValueError(
            "config.sample.prompt='': write at least one character, or set config.sample.tokens=0"
        )
    for option in config.xla_options:
        if not re.fullmatch(r"(xla_\w+|optimization_level)=.*", option):
            raise ValueError(
                f"config.xla_options={shown(option)}: write name=value with a name that begins "
                "with xla_, such as 'xla_gpu_enable_triton_gemm=false'"
            )
    _require(
        not config.init_from or re.fullmatch("hf:.+", config.init_from) is not None,
        "init_from",
        value=config.init_from,
        fix="write hf:DIR, a folder with config.json and *.safetensors",
    )
    _require(
        config.bad_steps.roll_back == 0 or config.checkpoint.enabled,
        "bad_steps.roll_back",
        value=config.bad_steps.roll_back,
        fix="there is nothing to go back to with config.checkpoint.enabled=False; set it to 0",
    )
    start, steps = config.profile.start, config.profile.steps
    _require(
        steps == 0 or start + steps <= config.steps,
        "profile.steps",
        value=steps,
        fix=f"with config.profile.start={start} it goes beyond config.steps={config.steps}; "
        "lower one of them, or set it to 0",
    )


def _validate_precision(config: Config) -> None:
    precision, layers = config.precision, config.model.num_layers
    is_half = config.dtype == Dtype.FLOAT16
    _require(
        not is_half or precision.recipe == Recipe.DTYPE,
        "precision.recipe",
        value=precision.recipe.value,
        fix="beside products in 8 bits config.dtype='float16' is not there; set "
        "config.dtype='bfloat16', or config.precision.recipe='dtype'",
    )
    _require(
        is_half or config.mesh.reduce_dtype != Dtype.FLOAT16,
        "mesh.reduce_dtype",
        value=config.mesh.reduce_dtype.value,
        fix=f"gradients of config.dtype={config.dtype.value!r} are not summed in less; set it to "
        "'bfloat16', or config.dtype='float16'",
    )
    for key in ("history", "margin"):
        value = getattr(precision, key)
        _require(
            precision.recipe == Recipe.FP8_DELAYED or value == getattr(PrecisionConfig(), key),
            f"precision.{key}",
            value=value,
            fix=f"config.precision.recipe={precision.recipe.value!r} has no scales of updates "
            "before; leave it out, or set config.precision.recipe='fp8_delayed'",
        )
    every = precision.statistics_every
    _require(
        not every or precision.recipe != Recipe.DTYPE,
        "precision.statistics_every",
        value=every,
        fix="nothing is rounded to 8 bits; set it to 0, or config.precision.recipe",
    )
    first, last = precision.first_layers_as_dtype, precision.last_layers_as_dtype
    for key, value in (("first_layers_as_dtype", first), ("last_layers_as_dtype", last)):
        _require(
            not value or first + last < layers,
            f"precision.{key}",
            value=value,
            fix=f"the first {first} and the last {last} of {layers} layers leave none for "
            "config.precision.recipe; lower it",
        )
        _require(
            not value or config.mesh.stage == 1,
            f"precision.{key}",
            value=value,
            fix=f"the stages of config.mesh.stage={config.mesh.stage} run all layers alike; set it "
            "to 0",
        )


def _validate_loss_scale(config: Config) -> None:
    scale, usual = config.loss_scale, LossScaleConfig()
    for field in dataclasses.fields(scale):
        value = getattr(scale, field.name)
        _require(
            config.dtype == Dtype.FLOAT16 or value == getattr(usual, field.name),
            f"loss_scale.{field.name}",
            value=value,
            fix=f"config.dtype={config.dtype.value!r} has the range of float32, and its loss is "
            "not scaled; leave it out, or set config.dtype='float16'",
        )
    for key in ("least", "start", "most"):
        value = getattr(scale, key)
        fix = f"it is to be a power of two, which rounds nothing; set it to {_power_below(value)}"
        _require(value == _power_below(value), f"loss_scale.{key}", value=value, fix=fix)
    _require(
        scale.least <= scale.start <= scale.most,
        "loss_scale.start",
        value=scale.start,
        fix=f"set it to config.loss_scale.least={scale.least} or more, and to "
        f"config.loss_scale.most={scale.most} or less",
    )


def _power_below(value: float) -> float:
    return 2.0 ** (math.frexp(value)[1] - 1)


def _validate_sizes(config: Config) -> None:
    """What has to divide what on any mesh."""
    num_microbatches, rows = config.grad_accumulation, config.batch_size
    fix = f"make it a multiple of config.grad_accumulation={num_microbatches}"
    _require(rows % num_microbatches == 0, "batch_size", value=rows, fix=fix)
    layers, unroll = config.model.num_layers, config.scan_unroll
    fix = f"set it to a divisor of the {layers} layers"
    _require(layers % unroll == 0, "scan_unroll", value=unroll, fix=fix)
    _validate_leaner_layers(config)


def _validate_leaner_layers(config: Config) -> None:
    num, layers = config.leaner_layers, config.model.num_layers
    if not num:
        return
    fix = f"{layers} layers would leave none for config.remat; set it below"
    _require(num < layers, "leaner_layers", value=num, fix=fix)
    has_leaner = " or ".join(repr(remat.value) for remat in Remat if remat.leaner)
    for key, value, is_right, wanted in (
        ("remat", config.remat.value, config.remat.leaner is not None, has_leaner),
        ("scan_unroll", config.scan_unroll, config.scan_unroll == layers, layers),
        ("mesh.stage", config.mesh.stage, config.mesh.stage == 1, 1),
    ):
        fix = f"config.leaner_layers={num} needs {wanted}; set it to that, or leaner_layers to 0"
        _require(is_right, key, value=value, fix=fix)


def validate_on(config: Config, num_devices: int) -> dict[str, int]:
    """The mesh's sizes on this many devices, once batch and model are known to divide over them."""
    sizes = config.mesh.sizes(num_devices)
    shards = num_row_shards(sizes)
    microbatch = config.batch_size // config.grad_accumulation
    _require(
        microbatch % shards == 0,
        "batch_size",
        value=config.batch_size,
        fix=f"config.batch_size / config.grad_accumulation = {microbatch} rows must be a multiple "
        f"of data * fsdp * expert = {shards}; set config.batch_size to a multiple of "
        f"{shards * config.grad_accumulation}",
    )
    context = sizes["context"]
    _require(
        config.seq_len % context == 0,
        "seq_len",
        value=config.seq_len,
        fix=f"it is split over config.mesh.context={context}; make it a multiple or set "
        "config.mesh.context to a divisor",
    )
    _validate_async_tensor(config, sizes)
    tensor = sizes["tensor"]
    if config.mesh.sequence_parallel and not splits_rows(config, sizes):
        shown = f"config.mesh.context={context} * " * (context > 1) + f"config.mesh.tensor={tensor}"
        _require(
            config.seq_len % (context * tensor) == 0,
            "seq_len",
            value=config.seq_len,
            fix=f"sequence parallelism splits it over {shown}; make it a "
            "multiple or set config.mesh.sequence_parallel=False",
        )
    _validate_stages(config, sizes["stage"])
    config.model.validate_on(sizes)
    return sizes


def rows_of_group(config: Config, sizes: dict[str, int]) -> int:
    """Rows of a microbatch that one group of devices of `context` and `tensor` shares."""
    microbatch = config.batch_size // config.grad_accumulation
    return microbatch // num_row_shards(sizes)


def splits_rows(config: Config, sizes: dict[str, int]) -> bool:
    """Whether `tensor` splits the residual stream by rows, with those that are at once in a layer.

    A gather along the sequence of several rows is followed by a copy that puts them in order, and a
    reduce-scatter comes behind one: 12 of the whole stream a layer, 2% of a step of 70B's width.
    """
    in_halves = async_tensor_of(config, sizes) == AsyncTensor.HALVES
    rows = rows_of_group(config, sizes) // (2 if in_halves else 1)
    return config.mesh.sequence_parallel and rows % sizes["tensor"] == 0


def async_tensor_of(
    config: Config, sizes: dict[str, int], *, num_processes: int = 1
) -> AsyncTensor:
    """config.mesh.async_tensor, or what `auto` is on a mesh of these sizes.

    Raises ValueError for a ring that cannot be.
    """
    wanted = AsyncTensor(config.mesh.async_tensor)
    if wanted in (AsyncTensor.OFF, AsyncTensor.HALVES):
        return wanted
    objection = ring_objection(config, sizes, num_processes=num_processes)
    if wanted == AsyncTensor.AUTO:
        if sizes["tensor"] == 1:
            return AsyncTensor.OFF
        return AsyncTensor.HALVES if objection else AsyncTensor.RING
    if objection:
        raise ValueError(
            f"config.mesh.async_tensor={wanted.value!r}: {objection}; set it to 'auto'"
        )
    return wanted


def ring_objection(config: Config, sizes: dict[str, int], *, num_processes: int) -> str | None:
    """Why rows cannot be passed on in a ring; None if they can."""
    tensor, rows = sizes["tensor"], rows_of_group(config, sizes)
    # A model of one's own need not say.
    heads = getattr(config.model, "num_kv_heads", tensor)
    if num_processes > 1:
        return f"GPUs of one process copy to each other, and there are {num_processes} processes"
    if not config.mesh.sequence_parallel:
        return "config.mesh.sequence_parallel=False leaves all rows on each device"
    if rows % tensor:
        return f"{rows} rows are in a layer at once, no multiple of config.mesh.tensor={tensor}"
    if heads % tensor:
        return f"config.mesh.tensor={tensor} does not divide config.model.num_kv_heads={heads}"
    if config.precision.recipe != Recipe.DTYPE:
        recipe = config.precision.recipe.value
        return f"config.precision.recipe={recipe!r} scales a weight by what all devices have of it"
    # JAX has no gradients that are yet to be summed where an axis is manual (`sharding.gather`).
    if config.mesh.zero != 3:
        return f"config.mesh.zero={config.mesh.zero} leaves weights whole"
    if sizes["data"] > 1 and num_weight_shards(sizes) > 1:
        return f"whole gradients would be summed over config.mesh.data={sizes['data']}"
    return None


def _validate_async_tensor(config: Config, sizes: dict[str, int]) -> None:
    """What layers on parts of the rows need."""
    kind = async_tensor_of(config, sizes)
    if kind == AsyncTensor.OFF:
        return
    rows = config.batch_size // config.grad_accumulation
    pairs = 2 * num_row_shards(sizes)
    fix = "set config.mesh.async_tensor='off', or "
    _require(
        kind == AsyncTensor.RING or rows % pairs == 0,
        "batch_size",
        value=config.batch_size,
        fix=f"config.mesh.async_tensor halves the rows of each device, and config.batch_size / "
        f"config.grad_accumulation = {rows} rows are no multiple of {pairs}; {fix}set "
        f"config.batch_size to a multiple of {pairs * config.grad_accumulation}",
    )
    for key, value, wanted in (
        ("mesh.stage", sizes["stage"], 1),
        ("mesh.reduce_dtype", config.mesh.reduce_dtype.value, config.dtype.value),
    ):
        # What is no wider than config.dtype stands for it.
        is_same = (
            key == "mesh.reduce_dtype"
            and config.mesh.reduce_dtype.itemsize <= config.dtype.itemsize
        )
        _require(
            value == wanted or is_same,
            key,
            value=value,
            fix=f"with config.mesh.async_tensor={str(config.mesh.async_tensor)!r} it must be "
            f"{wanted}; {fix}set it to {wanted}",
        )


def _validate_stages(config: Config, num_stages: int) -> None:
    """What a pipeline of so many stages needs."""
    if num_stages <= 1:
        return
    _require(
        config.mesh.axis_types == AxisTypes.EXPLICIT,
        "mesh.axis_types",
        value=config.mesh.axis_types.value,
        fix=f"the {num_stages} stages of config.mesh.stage need 'explicit'",
    )
    _require(
        config.remat != Remat.NONE,
        "remat",
        value=config.remat.value,
        fix="each microbatch in flight would keep the weights of its layers; set it to 'gemms', or "
        "set config.mesh.stage=1",
    )
    _require(
        config.grad_accumulation >= num_stages,
        "grad_accumulation",
        value=config.grad_accumulation,
        fix=f"these are the microbatches that the {num_stages} stages of config.mesh.stage work on "
        f"at the same time; set it to {num_stages} or more, and config.batch_size to a multiple",
    )


def _validate_mesh(mesh: MeshConfig) -> None:
    wild = [axis for axis in MESH_AXES if getattr(mesh, axis) == -1]
    if len(wild) > 1:
        raise ValueError(
            f"config.mesh.{wild[0]} and config.mesh.{wild[1]} are both -1; only one axis can take "
            "the rest"
        )
    for axis in ("expert",):
        fix = f"this release has no code for it yet; set config.mesh.{axis}=1"
        size = getattr(mesh, axis)
        _require(size == 1, f"mesh.{axis}", value=size, fix=fix)


# Settings of a model that attention has for whole rows alone: cuDNN has no window beside the
# diagonal, and no cap.
OF_WHOLE_ROWS = ("window", "score_cap")


def _validate_context(config: Config) -> None:
    exchange = config.context.exchange
    if config.mesh.context == 1 or exchange in (Exchange.AUTO, Exchange.ALL_TO_ALL):
        return
    for key in OF_WHOLE_ROWS:
        value = getattr(config.model, key, None)
        fix = (
            f"it needs whole rows, and config.context.exchange={exchange.value!r} splits them; set "
            "config.context.exchange='all_to_all'"
        )
        _require(value is None, f"model.{key}", value=value, fix=fix)


def check_fields(node, path: str = "config") -> None:
    """Raises ValueError for a field whose value has not the annotated type, or not its `Range`.

    An int is taken for a float. A number whose field states no range is finite.
    """
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value, hint = getattr(node, field.name), hints[field.name]
        key = f"{path}.{field.name}"
        if _matches(0.0, hint) and type(value) is int and not _matches(0, hint):
            value = _float(key, value)
            setattr(node, field.name, value)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            setattr(node, field.name, _enum(hint, value, key=key))
        elif not _matches(value, hint):
            name = getattr(hint, "__name__", str(hint))
            raise ValueError(
                f"{key}={shown(value)} is of type {type(value).__name__}; set it to a value of "
                f"type {name}"
            )
        elif dataclasses.is_dataclass(value):
            check_fields(value, key)
        else:
            _check_value(key, value, range=field.metadata.get("range", FINITE))


FINITE = Range(least=-sys.float_info.max, most=sys.float_info.max)


def _check_value(key: str, value, *, range: Range) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        fix = None
        if isinstance(item, str):
            fix = "write it in UTF-8, without NUL" if not _is_text(item) else None
        elif isinstance(item, int | float) and not isinstance(item, bool):
            fix = range.fix(item)
        if fix:
            raise ValueError(f"{key}={shown(item)}: {fix}")


def _is_text(value: str) -> bool:
    """What is no UTF-8 on a command line reaches Python as halves of surrogate pairs."""
    return not re.search("[\0\ud800-\udfff]", value)


def _float(key: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{key}={shown(value)} is too large for a float; lower it") from None


def shown(value) -> str:
    """The value as a message has it: not all of a long one."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no int of more than 4300 digits
        return "(too long to write out)"
    return text if len(text) <= 120 else f"{text[:80]}... ({len(text)} characters)"


def _enum(hint, value, *, key: str):
    try:
        return hint(value)
    except ValueError:
        choices = ", ".join(repr(choice.value) for choice in hint)
        raise ValueError(f"{key}={shown(value)} is not one of {choices}") from None


def _matches(value, hint) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_matches(v, item) for v in value)
    if origin is not None:  # a union such as `int | None`
        return any(_matches(value, option) for option in typing.get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint)


def get(config, key: str):
    """`get(config, "mesh.fsdp")`."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check_key(config, key: str) -> None:
    """Raises ValueError if the config has no field of this dotted name.

    A field that is None may have any below it.
    """
    path = "config"
    for name in key.split("."):
        if config is None:
            return
        names = (
            [field.name for field in dataclasses.fields(config)]
            if dataclasses.is_dataclass(config)
            else []
        )
        if name not in names:
            raise ValueError(_unknown_key(path, name, names=names))
        config, path = getattr(config, name), f"{path}.{name}"


def _unknown_key(path: str, name: str, *, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = (
        f"did you mean {path}.{near[0]}?"
        if near
        else f"{path} has {', '.join(names) or 'no settings of its own'}"
    )
    return f"{path}.{name} is not a setting; {hint}"


def _require(holds: bool, key: str, *, value, fix: str) -> None:
    if not holds:
        raise ValueError(f"config.{key}={shown(value)}: {fix}")


# JSON: every dataclass is a dict; the model, optimiser and schedule also say which class they are.


def to_json(node) -> dict:
    """The config as plain dicts, strings, numbers and lists."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            out[field.name] = to_json(value)
            if field.type is Any:
                out[field.name] = {
                    "type": f"{type(value).__module__}:{type(value).__qualname__}"
                } | out[field.name]
        else:
            out[field.name] = list(value) if isinstance(value, tuple) else value
    return out


def from_json(data: Any, cls: type = Config, *, path: str = "config"):
    """The inverse of `to_json`.

    Raises ValueError for a key the class has not, or a value of the wrong type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{path}={shown(data)} is of type {type(data).__name__}; write an object")
    fields = [field.name for field in dataclasses.fields(cls)]
    hints = typing.get_type_hints(cls)
    data = {name: value for name, value in data.items() if name != "type"}
    for name in data:
        if name not in fields:
            raise ValueError(_unknown_key(path, name, names=fields))
    values = {
        name: _value_from_json(value, hints[name], key=f"{path}.{name}")
        for name, value in data.items()
    }
    try:
        node = cls(**values)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
    check_fields(node, path)
    return node


def read_json(file: Path) -> Config:
    """The config.json of a run. Raises ValueError."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # with line and column
        raise ValueError(f"it cannot be read as JSON: {error}") from None
    return from_json(data)


def _value_from_json(value, hint, *, key: str):
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    child = _class_named(value["type"], key) if "type" in value else _dataclass_of(hint)
    if child is None:
        raise ValueError(
            f"{key} has no type; add one, such as 'type': 'jaxscale.models.llama:Config'"
        )
    return from_json(value, child, path=key)


def _dataclass_of(hint):
    """The dataclass in a hint such as `Scaling | None`; None if there is none."""
    return next(
        (option for option in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(option)),
        None,
    )


def _class_named(name: Any, key: str):
    try:
        module, _, attribute = name.partition(":")
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever an import raises
        raise ValueError(
            f"{key}.type={shown(name)} cannot be imported ({error}); write module:class"
        ) from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{key}.type={name!r} is not a dataclass")
    return cls


def from_config_dict(config) -> Config:
    """A Config out of whatever a config file returned.

    A Config, or an ml_collections ConfigDict of the same keys.
    """
    if isinstance(config, Config):
        return config
    if not hasattr(config, "to_dict"):
        raise ValueError(
            f"get_config() returned a {type(config).__name__}; return a jaxscale.config.Config"
        )
    return from_json(config.to_dict())
