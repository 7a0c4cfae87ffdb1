"""What is measured on the GPUs of one host, in parts of under ten minutes.

A part is commands of scripts that measure, for N GPUs, and the programs of jaxscale among them, so
that they can be compiled without a GPU first. Everything is Llama 3 8B in rows of 8192 but where
the part says else; torchtitan runs beside it where it has the same.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxscale.perf import peer_cases, pipeline_speed

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG_8B, CONFIG_70B = (f"--config={CONFIGS / name}.py" for name in ("llama3_8b", "llama3_70b"))
CALM = ("--config.schedule.warmup_steps=10", "--config.schedule.peak=3e-5")
MEASURED_ONCE = ("--nowarm", "--noprofile")
GATHERED_TWICE = "--config.mesh.reshard_after_forward=True"
LIKE_MEMORY = ("--config.remat=attention_mlp", GATHERED_TWICE)
PRODUCTS_KEPT = ("--config.remat=gemms_lean", GATHERED_TWICE)
ROWS = 2  # of a GPU

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """commands: one after the other; a script, and its words.

    programs: by name, the words of a config that jaxscale compiles in them.
    """

    commands: Sequence[Words]
    programs: Mapping[str, Words]


def _peers(*words: str) -> Words:
    return ("bench_peers.py", *words, "--steps=8", "--skip=4")


def bf16(num: int) -> Part:
    """At its best, and with the memory that torchtitan takes."""
    best = (CONFIG_8B, *CALM, f"--config.batch_size={ROWS * num}")
    like_memory = (*best, *LIKE_MEMORY)
    return Part(
        [_peers(*best), _peers(*like_memory, "--order=jaxscale")],
        {"8b_best": best, "8b_like_memory": like_memory},
    )


def default(num: int) -> Part:
    """configs/llama3_8b.py as it is; its rows are two a GPU on four, one on eight."""
    del num
    words = (CONFIG_8B, *CALM)
    return Part([_peers(*words)], {"8b_default": words})


def fp8(num: int) -> Part:
    """Products in 8 bits."""
    rows = f"--config.batch_size={ROWS * num}"
    return Part(
        [("bench_peers.py", "--cases=fp8", "--order=jaxscale,rowwise", rows)],
        {"8b_fp8": (CONFIG_8B, *peer_cases.CASES["fp8"].settings, rows)},
    )


# One GPU a stage. Those that keep products have an order of their own for what they hold.
PIPELINE = (CONFIG_8B, *CALM, *LIKE_MEMORY, "--config.evaluation.batches=1")
MICROBATCHES = (8, 32)


def _schedule(name: str, num_microbatches: int, *, num: int) -> Words:
    settings = pipeline_speed.settings(name, num_microbatches, num=num)
    return tuple(f"--config.{setting}" for setting in settings)


def pipeline(num: int) -> Part:
    """Every schedule and FSDP, with 8 and with 32 microbatches: their bubbles."""
    schedules = [name for name in pipeline_speed.SCHEDULES if name != pipeline_speed.FSDP]
    numbers = ",".join(map(str, MICROBATCHES))
    counted = (f"--microbatches={numbers}", "--steps=3", f"--profile={','.join(schedules)}")
    return Part(
        [("bench_pipeline.py", *PIPELINE, *counted)],
        {
            f"{name}_{number}": (*PIPELINE, *_schedule(name, number, num=num))
            for name in schedules
            for number in MICROBATCHES
        },
    )


# Layers of a chunk of torchtitan's, of which embedding and head count as four: 36 in two chunks a
# stage. It can make no four a stage of four, and no two of eight.
TWO_CHUNKS = {2: 9, 4: 5}


def _stages(num: int, *words: str) -> tuple[Words, Words]:
    """jaxscale's config of a stage a GPU, and what compares it with torchtitan's, but its order."""
    words = (f"--config.mesh.stage={num}", *words)
    whole = (CONFIG_8B, *peer_cases.PIPELINE.settings, *words)
    return whole, ("bench_peers.py", "--cases=pipeline", *words)


def _in_two_chunks(num: int, peers: Words) -> list[Words]:
    """torchtitan by itself, where it can make them."""
    if num not in TWO_CHUNKS:
        return []
    options = f"--peer_options={peer_cases.LAYERS}={TWO_CHUNKS[num]}"
    return [(*peers, "--order=interleaved_2", options)]


def pipeline_peers(num: int) -> Part:
    """A pipeline of 32 microbatches beside torchtitan's, each side in one chunk and in several."""
    whole, peers = _stages(num)
    chunks = (*whole, "--config.pipeline.schedule=interleaved", "--config.pipeline.chunks=4")
    commands: list[Words] = [
        (*peers, "--order=jaxscale,1f1b"),
        ("bench_step.py", *chunks, *MEASURED_ONCE, "--steps=3", "--skip=2"),
        *_in_two_chunks(num, peers),
    ]
    return Part(commands, {"8b_stages": whole, "8b_stages_in_chunks": chunks})


def pipeline_peers_few(num: int) -> Part:
    """The same of one chunk with 8 microbatches, beside torchtitan's 1F1B, GPipe and two chunks."""
    whole, peers = _stages(num, "--config.batch_size=8", "--config.grad_accumulation=8")
    commands: list[Words] = [(*peers, "--order=jaxscale,1f1b,gpipe"), *_in_two_chunks(num, peers)]
    return Part(commands, {"8b_stages_few": whole})


# Tokens of a GPU up to which two H200 keep every product of 8B, or all but the first layers' whole
# feed-forward parts, beside half of its state; four and more have memory to spare.
TOKENS_OF_PRODUCTS = 16_384


def _context(name: str, seq_len: int) -> Callable[[int], Part]:
    """Rows of one document that all GPUs share."""

    def part(num: int) -> Part:
        words, tokens = [f"--config.mesh.context={num}"], seq_len // num
        if tokens <= TOKENS_OF_PRODUCTS:
            words += ["--config.remat=gemms_lean", "--config.leaner_layers=0"]
        elif num > 2:
            words += ["--config.leaner_layers=0"]
        # The faster one, where it fits: on four H200 it took 78 GiB with 16,384 tokens a GPU, and
        # takes 124 of 140 with twice as many, as the other took 45 and 58.
        is_selective = tokens <= TOKENS_OF_PRODUCTS * (2 if num > 2 else 1)
        peer = "allgather_selective" if is_selective else "allgather"
        return Part(
            [("bench_peers.py", f"--cases={name}", f"--order=jaxscale,{peer}", *words)],
            {name: (CONFIG_8B, *peer_cases.CASES[name].settings, *words)},
        )

    part.__doc__ = _context.__doc__
    return part


WAITS, HIDES = (f"--config.mesh.async_tensor={value}" for value in ("off", "auto"))


def _wide(num: int, *mesh: str) -> Words:
    """Six layers of 70B's width."""
    layers = ("--config.model.num_layers=6", "--config.scan_unroll=6", "--config.remat=gemms_lean")
    return (CONFIG_70B, *CALM, *layers, f"--config.batch_size={ROWS * num}", *mesh)


def _tensor(num: int) -> dict[str, Words]:
    """The same, products split over all GPUs, without async and with it."""
    split = ("--config.mesh.fsdp=1", f"--config.mesh.tensor={num}")
    waits, hides = (_wide(num, *split, how) for how in (WAITS, HIDES))
    return {"70b_width_tensor": waits, "70b_width_async": hides}


def tensor(num: int) -> Part:
    """Six layers of 70B's width: tensor parallelism over all GPUs, with and without async, FSDP."""
    whole = _wide(num, f"--config.mesh.fsdp={num}", "--config.mesh.tensor=1", WAITS)
    programs = _tensor(num) | {"70b_width_fsdp": whole}
    return Part(
        [
            (
                *("bench_variants.py", *programs["70b_width_tensor"], "--variant=tensor"),
                *("--variant=async: mesh.async_tensor=auto", "--rounds=2", "--steps=3"),
            ),
            (
                *("bench_step.py", *programs["70b_width_fsdp"]),
                *(*MEASURED_ONCE, "--steps=5", "--skip=2"),
            ),
        ],
        programs,
    )


def tensor_peers(num: int) -> Part:
    """The same tensor parallelism beside torchtitan's, without async and with each side's own."""
    programs = _tensor(num)
    waits, hides = programs.values()
    theirs = "--peer_options=--parallelism.enable_async_tensor_parallel"
    return Part([_peers(*waits), _peers(*hides, theirs)], programs)


def hsdp(num: int) -> Part:
    """Two copies of the state, each over half of the GPUs, beside torchtitan, and FSDP over all."""
    whole = (CONFIG_8B, *CALM, f"--config.batch_size={ROWS * num}", *PRODUCTS_KEPT)
    copies = (*whole, "--config.mesh.data=2", f"--config.mesh.fsdp={num // 2}")
    return Part(
        [_peers(*copies), _peers(*whole, "--order=jaxscale")],
        {"8b_hsdp": copies, "8b_fsdp": whole},
    )


def checkpoint(num: int) -> Part:
    """Saved by one process a GPU, gone on with by half of them."""
    words = (f"--config.batch_size={num}", *CALM, *PRODUCTS_KEPT, "--config.evaluation.batches=1")
    command = ("bench_checkpoint.py", "-n", f"{num},{num // 2}", "--every=12", "--")
    return Part(
        [(*command, CONFIG_8B, *words)],
        {"8b_checkpoint": (CONFIG_8B, *words)},
    )


PARTS: Mapping[str, Callable[[int], Part]] = {
    "bf16": bf16,
    "default": default,
    "fp8": fp8,
    "pipeline": pipeline,
    "pipeline_peers": pipeline_peers,
    "pipeline_peers_few": pipeline_peers_few,
    "context_64k": _context("context_64k", 65_536),
    "context_128k": _context("context_128k", 131_072),
    "tensor": tensor,
    "tensor_peers": tensor_peers,
    "hsdp": hsdp,
    "checkpoint": checkpoint,
}
