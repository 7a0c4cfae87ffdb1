"""jaxscale beside torchtitan.

    python scripts/bench_peers.py --config configs/llama3_8b.py [--config.x=y ...]

Trains the same model with the same rows and tokens a GPU, on the same text, on this machine's GPUs,
one after the other, and prints both rates, their ratio and, last, one JSON record. The peer's
settings are in jaxscale/perf/torchtitan.py; --peer_options adds to them, or overrides them:
--peer_options='--activation_checkpoint.mode=none'.

MFU counts attention over the whole sequence on both sides. Not alike: torchtitan attends across the
documents of a row, and sums all gradients over the GPUs in float32; jaxscale stays inside a
document, and sums those of a block in bfloat16. Memory is what JAX had in use and what PyTorch had
reserved.
"""

import json
import sys
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import peers, torchtitan
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress

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


def main(argv: list[str]) -> int:
    show_progress()
    peer = torchtitan.Options(
        python=PEER_PYTHON.value,
        num_steps=STEPS.value,
        skip=SKIP.value,
        more=PEER_OPTIONS.value,
        timeout_seconds=TIMEOUT.value,
    )
    options = peers.Options(
        bench_step=BENCH_STEP,
        order=ORDER.value,
        rounds=ROUNDS.value,
        peer=peer,
        workdir=WORKDIR.value,
        commit=COMMIT.value,
    )
    try:
        record = peers.compare(argv[1:], options)
    except (ValueError, torchtitan.MissingPeerError) as error:
        return tell(error, EXIT_MISTAKE)
    except FailedError as error:
        return tell(error, EXIT_FAILED)
    print(peers.table(record))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
