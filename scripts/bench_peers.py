"""jaxscale beside torchtitan: python scripts/bench_peers.py --config configs/llama3_8b.py [--config.x=y ...]

Trains the same model with the same rows and tokens a GPU, on the same text, on this machine's GPUs, one after the other,
and prints both rates, their ratio and, last, one JSON record. The peer comes from PyPI, with the settings that are its
fastest for Llama 3 8B on 4 x H200: FSDP2, torch.compile, selective activation checkpointing of single operations.
--peer_options adds to them, or overrides them: --peer_options='--activation_checkpoint.mode=none'.

MFU counts attention over the whole sequence on both sides. Not alike: torchtitan attends across the documents of a row,
and sums all gradients over the GPUs in float32; jaxscale stays inside a document, and sums those of a block in bfloat16.
Memory is what JAX had in use and what PyTorch had reserved.
"""

import json
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from jaxscale import config as run_config
from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, read_config, tell
from jaxscale.data.text import find_files, read_documents
from jaxscale.models import llama
from jaxscale.perf import bench

STEPS = flags.DEFINE_integer("steps", 20, "Steps that count, in each run.", lower_bound=5)
SKIP = flags.DEFINE_integer("skip", 10, "Steps before them that no median counts.", lower_bound=1)
ORDER = flags.DEFINE_list("order", ["jaxscale", "torchtitan"], "Who runs, one after the other.")
ROUNDS = flags.DEFINE_integer("rounds", 1, "How often the order is gone through.", lower_bound=1)
PEER_OPTIONS = flags.DEFINE_string(
    "peer_options", "", "More options of torchtitan.train; the last of two counts."
)
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "A Python that has torchtitan.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the runs' logs go and stay; without it: a temporary folder."
)
TIMEOUT = flags.DEFINE_float("timeout", 900, "Seconds after which a run is stopped.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

BENCH_STEP = Path(__file__).with_name("bench_step.py")
RATE = "tokens_per_second_per_device"
VERSION = "0.2.2"
# The sizes of Llama 3 that torchtitan has, all of this vocabulary.
SIZES = ("model_dim", "num_layers", "num_heads", "num_kv_heads", "mlp_dim")
FLAVORS = {
    "8B": (4096, 32, 32, 8, 14_336),
    "70B": (8192, 80, 64, 8, 28_672),
    "405B": (16_384, 126, 128, 8, 53_248),
}
VOCAB_SIZE = 128_256
# Each line of torchtitan's log is the mean of so many steps: a line costs it a wait for the GPU.
LINE_STEPS = 5
LINE = re.compile(
    r"- step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s.*?memory:\s*(?P<memory>[\d.]+)GiB.*?"
    r"tps:\s*(?P<rate>[\d,]+)\s.*?mfu:\s*(?P<mfu>[\d.]+)%"
)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Over this, a GPU is at work for somebody; the driver alone takes up to 0.6 GiB.
IDLE_GIB = 2.0

# Imports what a run imports, so that a package it lacks is noticed before anything runs.
CHECK = """
import importlib.metadata, json
import torch, torchtitan.train
versions = {name: importlib.metadata.version(name) for name in ("torch", "torchtitan")}
print(json.dumps(versions | {"cuda": torch.version.cuda, "num_gpus": torch.cuda.device_count()}))
"""


class MissingPeerError(RuntimeError):
    """The peer is not installed, or cannot use the GPUs; the message says how to install it."""


def main(argv: list[str]) -> int:
    folder = Path(WORKDIR.value or tempfile.mkdtemp(prefix="bench_peers_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        record = compare(argv[1:], folder)
    except (ValueError, MissingPeerError) as error:
        return tell(error, EXIT_MISTAKE)
    except bench.FailedError as error:
        return tell(error, EXIT_FAILED)
    finally:
        if not WORKDIR.value:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(record))
    print(json.dumps(record))
    return 0


def compare(settings: list[str], folder: Path) -> dict:
    """Raises ValueError and MissingPeerError before anything runs, bench.FailedError after."""
    runners = {"jaxscale": run_jaxscale, "torchtitan": run_torchtitan}
    if unknown := set(ORDER.value) - set(runners):
        raise ValueError(f"--order: {min(unknown)!r} is not one of {', '.join(runners)}")
    config = read_config(settings)
    flavor = flavor_of(config.model)
    versions = peer_versions(PEER_PYTHON.value)
    gpus = bench.gpu_names()
    if not gpus:
        raise ValueError(
            "no GPU here: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them all"
        )
    write_text(folder / "text", config)
    commands = {
        "jaxscale": jaxscale_command(settings),
        "torchtitan": torchtitan_command(config, flavor, len(gpus), folder / "text"),
    }
    runs: dict[str, list[dict]] = {name: [] for name in ORDER.value}
    for number in range(1, ROUNDS.value + 1):
        for name in ORDER.value:
            wait_until_idle()
            print(f"{name}, round {number} of {ROUNDS.value} ...", file=sys.stderr)
            runs[name].append(runners[name](commands[name], folder / f"{name}_{number}.log"))
            print(f"{name}: {runs[name][-1][RATE]:,.0f} tokens/s/GPU", file=sys.stderr)
    systems = {
        name: summarize(runs[name]) | {"command": bench.shown(commands[name])} for name in runs
    }
    return {
        "name": "peers",
        "settings": settings,
        "device_kind": gpus[0],
        "num_devices": len(gpus),
        "order": ORDER.value,
        "rounds": ROUNDS.value,
        "ratio": systems["jaxscale"][RATE] / systems["torchtitan"][RATE]
        if len(systems) == 2
        else None,
        "systems": systems,
        "peer_versions": versions,
        **bench.provenance(COMMIT.value),
    }


def flavor_of(model) -> str:
    """torchtitan's name for a model of these sizes. Raises ValueError if it has none."""
    if not isinstance(model, llama.Config):
        raise ValueError(
            f"config.model is a {type(model).__module__}, and the peer is asked for Llama 3 only"
        )
    sizes = tuple(getattr(model, key) for key in SIZES)
    flavor = next((name for name, known in FLAVORS.items() if known == sizes), None)
    plain = llama.Config(vocab_size=VOCAB_SIZE, **dict(zip(SIZES, sizes, strict=True)))
    # Positions and the norm's epsilon cost no time, whatever they are; the initial values neither.
    keys = ("vocab_size", "tie_embeddings", "qkv_bias", "qk_norm", "window")
    others = [key for key in keys if getattr(model, key) != getattr(plain, key)]
    if model.head_dim() != plain.head_dim():
        others.append("head_size")
    if flavor is None or others:
        known = "; ".join(
            f"{name}: " + ", ".join(map(str, sizes)) for name, sizes in FLAVORS.items()
        )
        odd = (
            f"config.model.{others[0]}={getattr(model, others[0])!r}"
            if others
            else f"{', '.join(map(str, sizes))}"
        )
        raise ValueError(
            f"torchtitan has no Llama 3 with {odd}. It has, by {', '.join(SIZES)}: {known}, with a vocabulary of "
            f"{VOCAB_SIZE} and no further options; take configs/llama3_8b.py or configs/llama3_70b.py"
        )
    return flavor


def peer_versions(python: str) -> dict:
    """Versions of torch and torchtitan in that Python. Raises MissingPeerError."""
    try:
        environment = os.environ | peer_environment()
        done = subprocess.run(
            [python, "-c", CHECK],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env=environment,
        )
        versions = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise _missing(python, (error.stderr.strip().splitlines() or [str(error)])[-1]) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise _missing(python, str(error)) from None
    if not versions["cuda"]:
        raise _missing(python, f"torch {versions['torch']} is built without CUDA")
    if not versions["num_gpus"]:
        raise _missing(
            python, f"torch {versions['torch']} (CUDA {versions['cuda']}) sees no GPU here"
        )
    return versions


def _missing(python: str, problem: str) -> MissingPeerError:
    return MissingPeerError(
        f"torchtitan cannot run in {python}: {problem}\nInstall it there, with a torch built for CUDA:\n"
        f"    {python} -m pip install torchtitan=={VERSION} torch==2.11.0 torchdata tyro tensorboard 'datasets<4.8'\n"
        f"or in an environment of its own, and name that one's Python: --peer_python=/path/to/bin/python"
    )


def peer_environment() -> dict[str, str]:
    # Absolute folders: the peer runs in another one. Not jaxscale's own: its kernels/ has the name of a package of PyPI.
    path = [
        os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part
    ]
    return {
        "PYTHONPATH": os.pathsep.join(part for part in path if Path(part).resolve() != bench.ROOT),
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "NCCL_NVLS_ENABLE": os.environ.get(
            "NCCL_NVLS_ENABLE", "0"
        ),  # as jaxscale has it (jaxscale/xla.py)
    }


def write_text(folder: Path, config: run_config.Config) -> None:
    """Writes the run's text as torchtitan reads it, JSON lines, and the tokenizer."""
    data = config.data
    format, files = find_files(data.path, data.format)
    if format == "indexed":
        raise ValueError(
            f"config.data.path={data.path!r} holds tokens, and torchtitan reads text; give text"
        )
    folder.mkdir(exist_ok=True)
    with open(folder / "data.jsonl", "w") as out:
        for text in read_documents(data.path, format, files, data.text_field):
            out.write(json.dumps({"text": text}) + "\n")
    tokenizer = folder.with_name("tokenizer")
    tokenizer.mkdir(exist_ok=True)
    if data.tokenizer == "bytes":
        write_byte_tokenizer(tokenizer)
    else:
        shutil.copy(data.tokenizer, tokenizer / "tokenizer.json")


def write_byte_tokenizer(folder: Path) -> None:
    """A token a byte, as jaxscale's own, and one at each end of a document."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ValueError(
            "the peer's tokenizer needs the package `tokenizers`: pip install 'jaxscale[data]'"
        ) from None
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )


def jaxscale_command(settings: list[str]) -> list[str]:
    return [
        sys.executable, str(BENCH_STEP), *settings, "--nowarm", "--noprofile", f"--steps={STEPS.value}",
        f"--skip={SKIP.value}", f"--timeout={TIMEOUT.value}", f"--commit={COMMIT.value}",
    ]  # fmt: skip


def run_jaxscale(command: list[str], output: Path) -> dict:
    # bench_step.py stops its run by itself, and tells more.
    bench.run(command, output=output, timeout_seconds=TIMEOUT.value + 60)
    return json.loads(output.read_text().splitlines()[-1])


def torchtitan_command(
    config: run_config.Config, flavor: str, num_gpus: int, text: Path
) -> list[str]:
    sizes = run_config.validate_on(config, num_gpus)
    rows = config.batch_size // config.grad_accumulation // (sizes["data"] * sizes["fsdp"])
    # As `torchrun` does, which need not be on the path.
    launch = [
        PEER_PYTHON.value, "-m", "torch.distributed.run", f"--nproc_per_node={num_gpus}", "--master_addr=127.0.0.1",
        f"--master_port={free_port()}", "--local-ranks-filter=0", "--tee=3", "-m", "torchtitan.train",
    ]  # fmt: skip
    options = {
        "model.name": "llama3",
        "model.flavor": flavor,
        "model.hf_assets_path": text.with_name("tokenizer"),
        "training.dataset": "c4_test",  # the one that reads JSON lines from a folder
        "training.dataset_path": text,
        "training.seq_len": config.seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": config.batch_size,
        "training.steps": SKIP.value + STEPS.value,
        "parallelism.data_parallel_replicate_degree": sizes["data"],
        "parallelism.data_parallel_shard_degree": sizes["fsdp"],
        "parallelism.tensor_parallel_degree": sizes["tensor"],
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": LINE_STEPS,
    }
    return [
        *launch, *(f"--{key}={value}" for key, value in options.items()), "--compile.enable",
        "--metrics.disable_color_printing", *shlex.split(PEER_OPTIONS.value),
    ]  # fmt: skip


def run_torchtitan(command: list[str], output: Path) -> dict:
    environment = peer_environment() | {"HF_HOME": str(output.with_name("huggingface"))}
    bench.run(
        command,
        output=output,
        timeout_seconds=TIMEOUT.value,
        environment=environment,
        folder=output.parent,
    )
    lines = [
        line
        for line in parse_lines(output.read_text(errors="replace"))
        if line["step"] >= SKIP.value + LINE_STEPS
    ]
    if not lines:
        raise bench.FailedError(
            f"torchtitan printed no line after step {SKIP.value}:\n{bench.tail(output)}"
        )
    return peer_figures(lines)


def parse_lines(text: str) -> list[dict]:
    """Step, loss, tokens/s a GPU, MFU as a fraction and reserved GiB of each line of torchtitan's log that has them."""
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


def peer_figures(lines: list[dict]) -> dict:
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


def summarize(runs: list[dict]) -> dict:
    """Median of the runs' medians, and the spread of all their steps (of torchtitan: of its lines)."""
    return {
        RATE: statistics.median(run[RATE] for run in runs),
        f"{RATE}_min": min(run[f"{RATE}_min"] for run in runs),
        f"{RATE}_max": max(run[f"{RATE}_max"] for run in runs),
        # Not known of every GPU.
        "mfu_full": None
        if runs[0]["mfu_full"] is None
        else statistics.median(run["mfu_full"] for run in runs),
        "peak_memory_gib": max(run["peak_memory_gib"] for run in runs),
        "runs": runs,
    }


def wait_until_idle() -> None:
    """Until no GPU holds much memory: what ran before may still be leaving. Raises bench.FailedError after a minute."""
    for _ in range(60):
        used = bench.used_memory_gib()
        if used is None or used < IDLE_GIB:
            return
        time.sleep(1)
    raise bench.FailedError(
        f"a GPU holds {used:.1f} GiB of somebody else's: nothing is measured beside other work"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(record: dict) -> str:
    lines = [f"{record['num_devices']} x {record['device_kind']}, {shlex.join(record['settings'])}"]
    lines.append(f"{'':12}{'tokens/s/GPU':>14}{'min':>9}{'max':>9}{'MFU full':>10}{'memory':>12}")
    for name, system in record["systems"].items():
        mfu = "n/a" if system["mfu_full"] is None else f"{system['mfu_full']:.1%}"
        lines.append(
            f"{name:12}{system[RATE]:14,.0f}{system[f'{RATE}_min']:9,.0f}{system[f'{RATE}_max']:9,.0f}"
            f"{mfu:>10}{system['peak_memory_gib']:8.1f} GiB"
        )
    if record["ratio"] is not None:
        lines.append(f"{'ratio':12}{record['ratio']:14.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
