"""Measures the whole training path of a config.

    python scripts/bench_step.py --config configs/llama3_8b.py [--config.x=y ...]

Prints one line and, last, one JSON record: tokens/s a device (median, minimum and maximum of
--steps steps after the first --skip), MFU by both rules, seconds to compile and to the first step
with an empty and with a filled compilation cache, memory measured and predicted, and the share of a
step in which communication is exposed.

It starts scripts/train.py, as a user would, with checkpoints, samples and TensorBoard off
(jaxscale/perf/whole_run.py).
"""

import json
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import whole_run
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress

STEPS = flags.DEFINE_integer("steps", 20, "Steps that count.", lower_bound=1)
SKIP = flags.DEFINE_integer("skip", 10, "Steps before them that no median counts.", lower_bound=1)
WARM = flags.DEFINE_bool("warm", True, "Start a second time, with the programs in the cache.")
PROFILE = flags.DEFINE_bool(
    "profile", True, "Record three more steps, for the share of exposed communication."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the runs go and stay; without it: a temporary folder."
)
KEEP = flags.DEFINE_bool(
    "keep", False, "Keep the temporary folder: metrics, what the runs printed, the profile."
)
TIMEOUT = flags.DEFINE_float("timeout", 900, "Seconds after which a run is stopped.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

TRAIN = Path(__file__).with_name("train.py")


def main(argv: list[str]) -> int:
    show_progress()
    options = whole_run.Options(
        train=TRAIN,
        num_steps=STEPS.value,
        skip=SKIP.value,
        has_warm_start=WARM.value,
        has_profile=PROFILE.value,
        workdir=WORKDIR.value,
        is_kept=KEEP.value,
        timeout_seconds=TIMEOUT.value,
        commit=COMMIT.value,
    )
    try:
        record = whole_run.measure(argv[1:], options)
    except FailedError as error:
        return tell(error, EXIT_MISTAKE if error.code == EXIT_MISTAKE else EXIT_FAILED)
    print(whole_run.describe(record))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
