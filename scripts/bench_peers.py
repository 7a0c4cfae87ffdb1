"""jaxscale beside torchtitan.

    python scripts/bench_peers.py --config configs/llama3_8b.py [--config.x=y ...]
    python scripts/bench_peers.py --cases=pipeline [--order=jaxscale,1f1b,...] [--config.x=y ...]

Trains the same model with the same rows and tokens a GPU, on the same text, on this machine's GPUs,
one after the other, and prints the rates, their ratio and, last, one JSON record. The peer's
settings are in jaxscale/perf/torchtitan.py; --peer_options adds to them, or overrides them:
--peer_options='--activation_checkpoint.mode=none'. config.mesh.stage and config.mesh.context become
torchtitan's pipeline and context parallelism, with the same schedule and microbatches.

--cases compares Llama 3 8B on two GPUs in layouts where torchtitan has settings of its own to
choose from (jaxscale/perf/peer_cases.py), each a name for --order: `pipeline`, with its schedules;
`context_32k`, `context_64k` and `context_128k`, rows of one document of so many tokens, with its
ways to exchange keys; `fp8`, with its recipes (torchao beside it). A case has its own --steps and
--skip, and prints a table and a record. A run that fails, runs out of memory or time, or for which
--seconds leaves none, is a row that says so.

MFU counts attention over the whole sequence on both sides. Not alike: torchtitan attends across the
documents of a row, and sums all gradients over the GPUs in float32; jaxscale stays inside a
document, and sums those of a block in bfloat16 (over stages nothing is summed). Both keep float32
parameters and compute in bfloat16; where a stage has one GPU, torchtitan 0.2.2 would compute in
float32, and jaxscale/perf/torchtitan_extension.py has it cast. Memory is what JAX had in use and
what PyTorch had reserved, of the fullest GPU.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import peer_cases, peers, torchtitan
from jaxscale.perf.progress import show_progress

STEPS = flags.DEFINE_integer("steps", 20, "Steps that count, in each run.", lower_bound=5)
SKIP = flags.DEFINE_integer("skip", 10, "Steps before them that no median counts.", lower_bound=1)
CASES = flags.DEFINE_list("cases", [], "Cases of jaxscale/perf/peer_cases.py, for two GPUs.")
ORDER = flags.DEFINE_list(
    "order", None, "Who runs, one after the other; without it: jaxscale, then what torchtitan has."
)
ROUNDS = flags.DEFINE_integer("rounds", 1, "How often the order is gone through.", lower_bound=1)
PEER_OPTIONS = flags.DEFINE_string(
    "peer_options", "", "More options of torchtitan.train; the last of two counts."
)
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "A Python that has torchtitan.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the runs' logs go and stay; without it: a temporary folder."
)
TIMEOUT = flags.DEFINE_float("timeout", 900, "Seconds after which a run is stopped.")
SECONDS = flags.DEFINE_float("seconds", math.inf, "Of all runs together.", lower_bound=0)
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

HERE = Path(__file__).resolve().parent
BENCH_STEP = HERE / "bench_step.py"
CONFIG = HERE.parent / "configs" / "llama3_8b.py"


def main(argv: list[str]) -> int:
    show_progress()
    has_failed = False
    try:
        contests = list(_contests(argv[1:]))
        for _, options in contests:
            peers.check_order(options)
        for settings, options in contests:
            record = peers.compare(settings, options)
            has_failed |= peers.has_failed(record)
            print(peers.table(record))
            print(json.dumps(record), flush=True)
    except (ValueError, torchtitan.MissingPeerError) as error:
        return tell(error, EXIT_MISTAKE)
    return EXIT_FAILED if has_failed else 0


def _contests(words: list[str]) -> Iterator[tuple[list[str], peers.Options]]:
    """The config of these words; or each case, whose own the words follow."""
    options = _options()
    if not CASES.value:
        yield words, options
    elif STEPS.present or SKIP.present:
        raise ValueError("--steps and --skip: a case of --cases has its own; leave them out")
    for name in CASES.value:
        if name not in peer_cases.CASES:
            raise ValueError(f"--cases={name} is not one of {', '.join(peer_cases.CASES)}")
        case = peer_cases.CASES[name]
        of_the_case = dataclasses.replace(
            options,
            peer=dataclasses.replace(options.peer, num_steps=case.num_steps, skip=case.skip),
            order=ORDER.value or [peers.OURS, *case.variants],
            variants=case.variants,
            has_long_text=case.has_long_text,
            workdir=WORKDIR.value and str(Path(WORKDIR.value) / name),
        )
        yield [f"--config={CONFIG}", *case.settings, *words], of_the_case


def _options() -> peers.Options:
    peer = torchtitan.Options(
        python=PEER_PYTHON.value,
        num_steps=STEPS.value,
        skip=SKIP.value,
        more=PEER_OPTIONS.value,
        timeout_seconds=TIMEOUT.value,
    )
    return peers.Options(
        bench_step=BENCH_STEP,
        order=ORDER.value or [peers.OURS, "torchtitan"],
        rounds=ROUNDS.value,
        peer=peer,
        ends=time.monotonic() + SECONDS.value,
        workdir=WORKDIR.value,
        commit=COMMIT.value,
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
