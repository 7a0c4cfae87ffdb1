"""torchtitan as a peer: the same model, rows, tokens and text, run from its own installation.

It comes from PyPI, with the settings that are its fastest for Llama 3 8B on 4 x H200: FSDP2,
torch.compile, selective activation checkpointing of single operations.
"""

import dataclasses
import json
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
from jaxscale.config import Config
from jaxscale.data.text import find_files, read_documents
from jaxscale.models import llama
from jaxscale.perf import processes
from jaxscale.perf.provenance import ROOT
from jaxscale.perf.records import RATE, Record

VERSION = "0.2.2"
# The sizes of Llama 3 that torchtitan has, all of this vocabulary.
SIZES = ("model_dim", "num_layers", "num_heads", "num_kv_heads", "mlp_dim")
FLAVORS = {
    "8B": (4096, 32, 32, 8, 14_336),
    "70B": (8192, 80, 64, 8, 28_672),
    "405B": (16_384, 126, 128, 8, 53_248),
}
VOCAB_SIZE = 128_256
# A line of torchtitan's log is the mean of so many steps: a line costs it a wait for the GPU.
LINE_STEPS = 5
LINE = re.compile(
    r"- step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s.*?memory:\s*(?P<memory>[\d.]+)GiB.*?"
    r"tps:\s*(?P<rate>[\d,]+)\s.*?mfu:\s*(?P<mfu>[\d.]+)%"
)
COLOUR = re.compile(r"\x1b\[[\d;]*m")

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


# Whether it can run here.


def flavor_of(model: Any) -> str:
    """torchtitan's name for a model of these sizes. Raises ValueError if it has none."""
    if not isinstance(model, llama.Config):
        raise ValueError(
            f"config.model is a {type(model).__module__}, and the peer is asked for Llama 3 only"
        )
    sizes = tuple(getattr(model, key) for key in SIZES)
    flavor = next((name for name, known in FLAVORS.items() if known == sizes), None)
    odd = [f"config.model.{key}={getattr(model, key)!r}" for key in _unlike_llama_3(model)]
    if flavor is not None and not odd:
        return flavor
    known = "; ".join(f"{name}: {', '.join(map(str, sizes))}" for name, sizes in FLAVORS.items())
    raise ValueError(
        f"torchtitan has no Llama 3 with {(odd or [', '.join(map(str, sizes))])[0]}. It has, by "
        f"{', '.join(SIZES)}: {known}, with a vocabulary of {VOCAB_SIZE} and no further options; "
        "take configs/llama3_8b.py or configs/llama3_70b.py"
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


def environment() -> dict[str, str]:
    """Of the peer's processes, besides this one's."""
    # Folders are absolute, as the peer runs in another one. Not jaxscale's own, whose kernels/ has
    # the name of a package of PyPI.
    folders = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    others = [os.path.abspath(folder) for folder in folders if folder.resolve() != ROOT]
    return {
        "PYTHONPATH": os.pathsep.join(others),
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        # NVLink multicast is off unless the user wants it, as it is in jaxscale.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
    }


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
            out.write(json.dumps({"text": text}) + "\n")
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
    """The peer's command line; `write_text` has filled the folder `text`."""
    sizes = run_config.validate_on(config, num_gpus)
    rows = config.batch_size // config.grad_accumulation // (sizes["data"] * sizes["fsdp"])
    settings = {
        "model.name": "llama3",
        "model.flavor": flavor_of(config.model),
        "model.hf_assets_path": _tokenizer_of(text),
        "training.dataset": "c4_test",  # the one that reads JSON lines from a folder
        "training.dataset_path": text,
        "training.seq_len": config.seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": config.batch_size,
        "training.steps": options.skip + options.num_steps,
        "parallelism.data_parallel_replicate_degree": sizes["data"],
        "parallelism.data_parallel_shard_degree": sizes["fsdp"],
        "parallelism.tensor_parallel_degree": sizes["tensor"],
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": LINE_STEPS,
    }
    return [
        *_launcher(options.python, num_gpus=num_gpus),
        *(f"--{key}={value}" for key, value in settings.items()),
        "--compile.enable",
        "--metrics.disable_color_printing",
        *shlex.split(options.more),
    ]


def _launcher(python: str, *, num_gpus: int) -> list[str]:
    """As `torchrun` does, which need not be on the path."""
    return [
        *(python, "-m", "torch.distributed.run"),
        f"--nproc_per_node={num_gpus}",
        "--master_addr=127.0.0.1",
        f"--master_port={_free_port()}",
        *("--local-ranks-filter=0", "--tee=3"),
        *("-m", "torchtitan.train"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command: list[str], output: Path, *, options: Options) -> Record:
    """What it measured. Raises processes.FailedError."""
    processes.run(
        command,
        output=output,
        timeout_seconds=options.timeout_seconds,
        environment=environment() | {"HF_HOME": str(output.with_name("huggingface"))},
        folder=output.parent,
    )
    lines = parse_lines(output.read_text(errors="replace"))
    counted = [line for line in lines if line["step"] >= options.skip + LINE_STEPS]
    if not counted:
        raise processes.FailedError(
            f"torchtitan printed no line after step {options.skip}:\n{processes.tail(output)}"
        )
    return figures_of(counted)


def parse_lines(text: str) -> list[Record]:
    """Of each line of torchtitan's log that has them: step, loss, tokens/s a GPU, MFU, memory.

    MFU is a fraction, the memory what PyTorch has reserved, GiB.
    """
    return [
        {
            "step": int(match["step"]),
            "loss": float(match["loss"]),
            RATE: float(match["rate"].replace(",", "")),
            "mfu_full": float(match["mfu"]) / 100,
            "peak_memory_gib": float(match["memory"]),
        }
        for line in COLOUR.sub("", text).splitlines()
        if (match := LINE.search(line))
    ]


def figures_of(lines: list[Record]) -> Record:
    """Of the lines that count: what bench_step.py puts on record of jaxscale's steps."""
    rates = [line[RATE] for line in lines]
    return {
        "steps": len(lines) * LINE_STEPS,
        RATE: statistics.median(rates),
        f"{RATE}_min": min(rates),
        f"{RATE}_max": max(rates),
        "mfu_full": statistics.median(line["mfu_full"] for line in lines),
        "peak_memory_gib": max(line["peak_memory_gib"] for line in lines),
        "last_loss": lines[-1]["loss"],
    }
