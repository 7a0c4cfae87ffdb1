"""torchtitan as a peer: the same model, rows, tokens and text, run from its own installation.

It comes from PyPI, with the settings that are its fastest for Llama 3 8B on 4 x H200: FSDP2,
torch.compile, selective activation checkpointing of single operations. Pipelines and rows split
over GPUs are its own too; `torchtitan_extension.py` makes two of their settings count.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
from pathlib import Path
from typing import Any

from jaxscale import config as run_config
from jaxscale.config import Config, PipelineSchedule
from jaxscale.data.text import find_files, read_documents
from jaxscale.models import llama
from jaxscale.perf import processes
from jaxscale.perf.provenance import ROOT
from jaxscale.perf.records import RATE, Record

VERSION = "0.2.2"
# The sizes of Llama 3 that torchtitan has, all of this vocabulary. Of fewer layers they are its
# too, by `torchtitan_extension`.
SIZES = ("model_dim", "num_heads", "num_kv_heads", "mlp_dim", "num_layers")
FLAVORS = {
    "8B": (4096, 32, 8, 14_336, 32),
    "70B": (8192, 64, 8, 28_672, 80),
    "405B": (16_384, 128, 8, 53_248, 126),
}
VOCAB_SIZE = 128_256
# A line of torchtitan's log is the mean of so many steps: a line costs it a wait for the GPU.
LINE_STEPS = 5
# After torchrun's mark of the process: [default1]: or, with --role=rank, [rank1]:.
LINE = re.compile(
    r"(?:.*\[[a-z]+(?P<rank>\d+)\]:)?.*- step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s"
    r".*?memory:\s*(?P<memory>[\d.]+)GiB.*?tps:\s*(?P<rate>[\d,]+)\s.*?mfu:\s*(?P<mfu>[\d.]+)%"
)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
# An exception as Python prints it, of whichever process, also where its output is quoted. Not all
# of torch's have names that say so.
EXCEPTION = re.compile(
    r"(?:\[\w+\]:|[\s|])*"
    r"(?P<told>(?:\w+\.)*\w*(?:Error|Exception|Unsupported|Failed)(?:: .*|$))"
)
# What is said of, and by, processes that ended because another one failed.
CONSEQUENCES = re.compile(
    "ChildFailed|SignalException|DistBackend|DistNetwork|Connection (?:closed|reset)|NCCL"
)

EXTENSION = Path(__file__).with_name("torchtitan_extension.py")
SCHEDULES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
}
# Of a line of the peer's text; a longer document is several lines.
MOST_CHARACTERS = 100_000
# What the embedding and the head count for where torchtitan divides layers over stages. Of Llama 3
# 8B at 8192 tokens the head is 3.2 GFLOP a token and a layer 1.7 (the loss comes on top), so that
# two stages have 17 layers, and 15 and the head; torchtitan's own 1 and 1 would make it 16 and 16.
FIRST_LESS, LAST_LESS = 1, 3

# Imports what a run imports, so that a package it lacks is noticed before anything runs.
CHECK = """
import importlib.metadata, json
import torch, torchtitan.train
versions = {name: importlib.metadata.version(name) for name in ("torch", "torchtitan")}
print(json.dumps(versions | {"cuda": torch.version.cuda, "num_gpus": torch.cuda.device_count()}))
"""


class MissingPeerError(RuntimeError):
    """The peer is not installed, or cannot use the GPUs; the message says how to install it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """python: one that has torchtitan. more: of torchtitan.train; the last of two counts."""

    python: str
    num_steps: int
    skip: int
    more: str = ""
    timeout_seconds: float = 900

    @property
    def line_steps(self) -> int:
        """Few steps are long ones, beside which the wait for a line is nothing."""
        return LINE_STEPS if self.num_steps >= LINE_STEPS else 1


# Whether it can run here.


def flavor_of(model: Any) -> str:
    """torchtitan's name for a model of these sizes. Raises ValueError if it has none."""
    if not isinstance(model, llama.Config):
        raise ValueError(
            f"config.model is a {type(model).__module__}, and the peer is asked for Llama 3 only"
        )
    *widths, num_layers = sizes = [getattr(model, key) for key in SIZES]
    flavor = next(
        (
            name if num_layers == most else f"{name}_{num_layers}layers"
            for name, (*known, most) in FLAVORS.items()
            if known == widths and num_layers <= most
        ),
        None,
    )
    odd = [f"config.model.{key}={getattr(model, key)!r}" for key in _unlike_llama_3(model)]
    if flavor is not None and not odd:
        return flavor
    known = "; ".join(f"{name}: {', '.join(map(str, sizes))}" for name, sizes in FLAVORS.items())
    raise ValueError(
        f"torchtitan has no Llama 3 with {(odd or [', '.join(map(str, sizes))])[0]}. It has, by "
        f"{', '.join(SIZES)}: {known}, or fewer layers, with a vocabulary of {VOCAB_SIZE} and no "
        "further options; take configs/llama3_8b.py or configs/llama3_70b.py"
    )


def _unlike_llama_3(model: llama.Config) -> list[str]:
    """Keys of what Llama 3 of these sizes has otherwise, and what costs time.

    Positions, the norm's epsilon and the initial values cost none, whatever they are.
    """
    sizes = {key: getattr(model, key) for key in SIZES}
    plain = llama.Config(vocab_size=VOCAB_SIZE, **sizes)
    keys = ("vocab_size", "tie_embeddings", "qkv_bias", "qk_norm", "window")
    others = [key for key in keys if getattr(model, key) != getattr(plain, key)]
    return [*others, *["head_size"] * (model.head_dim() != plain.head_dim())]


def versions_in(python: str) -> Record:
    """Versions of torch and torchtitan in that Python. Raises MissingPeerError."""
    try:
        done = subprocess.run(
            [python, "-c", CHECK],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env=os.environ | environment(),
        )
        versions = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise _missing(python, (error.stderr.strip().splitlines() or [str(error)])[-1]) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise _missing(python, str(error)) from None
    torch = f"torch {versions['torch']}"
    if not versions["cuda"]:
        raise _missing(python, f"{torch} is built without CUDA")
    if not versions["num_gpus"]:
        raise _missing(python, f"{torch} (CUDA {versions['cuda']}) sees no GPU here")
    return versions


def _missing(python: str, problem: str) -> MissingPeerError:
    return MissingPeerError(
        f"torchtitan cannot run in {python}: {problem}\n"
        "Install it there, with a torch built for CUDA:\n"
        f"    {python} -m pip install torchtitan=={VERSION} torch==2.11.0 torchdata tyro "
        "tensorboard 'datasets<4.8'\n"
        "or in an environment of its own, and name that one's Python: "
        "--peer_python=/path/to/bin/python"
    )


def environment(*modules: Path) -> dict[str, str]:
    """Of the peer's processes, besides this one's. modules: folders to import from first."""
    # Folders are absolute, as the peer runs in another one. Not jaxscale's own, whose kernels/ has
    # the name of a package of PyPI.
    folders = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    others = [os.path.abspath(folder) for folder in folders if folder.resolve() != ROOT]
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, modules), *others]),
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        # NVLink multicast is off unless the user wants it, as it is in jaxscale.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
    }


def write_extension(folder: Path) -> None:
    """Alone in a folder: beside it in jaxscale lies a file that has torchtitan's own name."""
    folder.mkdir(exist_ok=True)
    shutil.copy(EXTENSION, folder)


# Its text.


def write_text(folder: Path, config: Config) -> None:
    """Writes the run's text as torchtitan reads it, JSON lines, and the tokenizer beside it."""
    data = config.data
    format, files = find_files(data.path, data.format)
    if format == "indexed":
        raise ValueError(
            f"config.data.path={data.path!r} holds tokens, and torchtitan reads text; give text"
        )
    folder.mkdir(exist_ok=True)
    with open(folder / "data.jsonl", "w") as out:
        for text in read_documents(data.path, files, format=format, text_field=data.text_field):
            # It attends across documents, and makes tokens of one between two steps: seconds for
            # the megabytes of a long one.
            for start in range(0, max(len(text), 1), MOST_CHARACTERS):
                piece = text[start : start + MOST_CHARACTERS]
                out.write(json.dumps({"text": piece}) + "\n")
    tokenizer = _tokenizer_of(folder)
    tokenizer.mkdir(exist_ok=True)
    if data.tokenizer == "bytes":
        _write_byte_tokenizer(tokenizer)
    else:
        file = Path(data.tokenizer).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        shutil.copy(file, tokenizer / "tokenizer.json")


def _tokenizer_of(text: Path) -> Path:
    return text.with_name("tokenizer")


def _write_byte_tokenizer(folder: Path) -> None:
    """A token a byte, as jaxscale's own, and one at each end of a document."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ValueError(
            "the peer's tokenizer needs the package `tokenizers`: pip install 'jaxscale[data]'"
        ) from None
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )


# Its run.


def command_of(config: Config, options: Options, *, num_gpus: int, text: Path) -> list[str]:
    """The peer's command line; `write_text` has filled the folder `text`.

    Raises ValueError for a mesh or a schedule that it has not.
    """
    sizes = run_config.validate_on(config, num_gpus)
    settings = {
        "model.name": "llama3",
        "model.flavor": flavor_of(config.model),
        "model.hf_assets_path": _tokenizer_of(text),
        "training.dataset": "c4_test",  # the one that reads JSON lines from a folder
        "training.dataset_path": text,
        "training.seq_len": config.seq_len,
        "training.local_batch_size": _rows_of(config, sizes),
        "training.global_batch_size": config.batch_size,
        "training.steps": options.skip + options.num_steps,
        "parallelism.data_parallel_replicate_degree": sizes["data"],
        "parallelism.data_parallel_shard_degree": sizes["fsdp"],
        "parallelism.tensor_parallel_degree": sizes["tensor"],
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": options.line_steps,
    }
    if sizes["stage"] > 1:
        settings |= _stages_of(config, sizes)
    if sizes["context"] > 1:
        settings["parallelism.context_parallel_degree"] = sizes["context"]
    has_fewer_layers = settings["model.flavor"] not in FLAVORS
    is_split = any(sizes[axis] > 1 for axis in ("stage", "context", "tensor"))
    if is_split or has_fewer_layers:
        settings["experimental.custom_import"] = EXTENSION.stem
    return [
        *_launcher(options.python, num_gpus=num_gpus),
        *(f"--{key}={value}" for key, value in settings.items()),
        "--compile.enable",
        "--metrics.disable_color_printing",
        *shlex.split(options.more),
    ]


def _rows_of(config: Config, sizes: dict[str, int]) -> int:
    """That a process gets at once: a microbatch, or all microbatches of a pipeline."""
    at_once = config.batch_size // (1 if sizes["stage"] > 1 else config.grad_accumulation)
    return at_once // (sizes["data"] * sizes["fsdp"])


def _stages_of(config: Config, sizes: dict[str, int]) -> dict[str, Any]:
    """The same schedule, number of chunks and microbatches."""
    schedule, num_stages = config.pipeline.schedule, sizes["stage"]
    if schedule not in SCHEDULES:
        raise ValueError(
            f"config.pipeline.schedule={schedule.value}: beside torchtitan it is one of "
            f"{', '.join(SCHEDULES)}; set it to one of them"
        )
    chunks = config.pipeline.chunks if schedule == PipelineSchedule.INTERLEAVED else 1
    layers, wanted = config.model.num_layers + FIRST_LESS + LAST_LESS, num_stages * chunks
    a_chunk = math.ceil(layers / wanted)
    if math.ceil(layers / a_chunk) != wanted or layers // wanted < LAST_LESS:
        raise ValueError(
            f"torchtitan cannot make {wanted} chunks of {config.model.num_layers} layers, with "
            f"embedding and head as {FIRST_LESS} and {LAST_LESS} more; change "
            f"config.pipeline.chunks={chunks} or config.mesh.stage={num_stages}"
        )
    microbatch = config.batch_size // config.grad_accumulation
    return {
        "parallelism.pipeline_parallel_degree": num_stages,
        "parallelism.pipeline_parallel_schedule": SCHEDULES[schedule],
        "parallelism.pipeline_parallel_layers_per_stage": a_chunk,
        "parallelism.pipeline_parallel_first_stage_less_layers": FIRST_LESS,
        "parallelism.pipeline_parallel_last_stage_less_layers": LAST_LESS,
        "parallelism.pipeline_parallel_microbatch_size": (
            microbatch // (sizes["data"] * sizes["fsdp"])
        ),
    }


def _launcher(python: str, *, num_gpus: int) -> list[str]:
    """As `torchrun` does, which need not be on the path."""
    return [
        *(python, "-m", "torch.distributed.run"),
        f"--nproc_per_node={num_gpus}",
        "--master_addr=127.0.0.1",
        f"--master_port={_free_port()}",
        "--tee=3",
        *("-m", "torchtitan.train"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command: list[str], output: Path, *, options: Options) -> Record:
    """What it measured. Raises processes.FailedError."""
    extension = output.with_name("extension")
    write_extension(extension)
    processes.run(
        command,
        output=output,
        timeout_seconds=options.timeout_seconds,
        environment=environment(extension) | {"HF_HOME": str(output.with_name("huggingface"))},
        folder=output.parent,
    )
    lines = parse_lines(output.read_text(errors="replace"))
    counted = [line for line in lines if line["step"] >= options.skip + options.line_steps]
    if not any(_has_loss(line) for line in counted):
        raise processes.FailedError(
            f"torchtitan printed no line after step {options.skip}:\n{processes.tail(output)}"
        )
    return figures_of(counted, options) | {"first_loss": _losses(lines)[0]}


def parse_lines(text: str) -> list[Record]:
    """Of each line of torchtitan's log that has them: rank, step, loss, rate, MFU, memory.

    The rate is tokens/s a GPU, MFU a fraction, memory what PyTorch reserved, GiB. Every process has
    lines; of a pipeline those without its end, where the loss is, print a negative number for it.
    """
    return [
        {
            "rank": int(match["rank"] or 0),
            "step": int(match["step"]),
            "loss": float(match["loss"]),
            RATE: float(match["rate"].replace(",", "")),
            "mfu_full": float(match["mfu"]) / 100,
            "peak_memory_gib": float(match["memory"]),
        }
        for line in COLOUR.sub("", text).splitlines()
        if (match := LINE.match(line))
    ]


def _has_loss(line: Record) -> bool:
    return not line["loss"] < 0  # NaN is one, too


def _losses(lines: list[Record]) -> list[float]:
    return [line["loss"] for line in lines if _has_loss(line)]


def figures_of(lines: list[Record], options: Options) -> Record:
    """Of the lines that count: what bench_step.py puts on record of jaxscale's steps.

    Rates are those of the first process that has the loss; memory is that of the fullest GPU.
    """
    rank = min(line["rank"] for line in lines if _has_loss(line))
    told = [line for line in lines if line["rank"] == rank]
    rates = [line[RATE] for line in told]
    memory: dict[int, float] = {}
    for line in lines:
        memory[line["rank"]] = max(memory.get(line["rank"], 0.0), line["peak_memory_gib"])
    return {
        "steps": len(told) * options.line_steps,
        RATE: statistics.median(rates),
        f"{RATE}_min": min(rates),
        f"{RATE}_max": max(rates),
        "mfu_full": statistics.median(line["mfu_full"] for line in told),
        "peak_memory_gib": max(memory.values()),
        "memory_gib_by_rank": [memory[rank] for rank in sorted(memory)],
        "last_loss": told[-1]["loss"],
    }


def last_exception(text: str) -> str | None:
    """What failed, as the last exception in a log says that is no consequence of another's.

    A GPU out of memory comes first: what the other processes then say varies.
    """
    told = [
        match["told"].strip()
        for line in COLOUR.sub("", text).splitlines()
        if (match := EXCEPTION.match(line))
    ]
    causes = [line for line in told if not CONSEQUENCES.search(line)]
    memory = [line for line in causes if "OutOfMemoryError" in line]
    return next(reversed(memory or causes or told), None)
