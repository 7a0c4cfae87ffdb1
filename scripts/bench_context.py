"""Trains on long rows that `context` splits, on two GPUs; checks the kernels of their parts first.

    python scripts/bench_context.py --workdir=DIR [--cases=all_to_all_32k,...] [--config.x=y ...]
    python scripts/bench_context.py --check

Each case is configs/llama3_8b.py on rows of 32,768, 65,536 or 131,072 tokens that are
one document, through scripts/train.py (jaxscale/perf/whole_run.py). Prints a line a case and one
JSON record: tokens/s a device, MFU by both rules, memory measured and predicted, first loss. What
each prints goes to DIR; a case that fails, or for which --seconds leaves no time, is left out with
a line. --check alone prints how far each kernel that sees some of the keys, and all-gather, ring
and all-to-all over all GPUs with it, are from plain XLA in float32.
"""

import json
import sys
import time
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, tell
from jaxscale.perf import whole_run
from jaxscale.perf.processes import FailedError, run
from jaxscale.perf.progress import show_progress
from jaxscale.xla.environment import set_environment

CHECK = flags.DEFINE_bool("check", False, "Only compare kernels and exchanges with plain XLA.")
CASES = flags.DEFINE_list(
    "cases",
    ["all_to_all_32k", "fsdp_32k", "all_to_all_128k", "all_to_all_64k"],
    "Which to train; jaxscale/perf/context_speed.py has them all.",
)
STEPS = flags.DEFINE_integer("steps", 4, "Steps that count.", lower_bound=1)
SKIP = flags.DEFINE_integer("skip", 2, "Steps before them that no median counts.", lower_bound=1)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the runs and what they print go.")
SECONDS = flags.DEFINE_float("seconds", 520, "Of all together.")
TIMEOUT = flags.DEFINE_float("timeout", 200, "Seconds after which one is stopped.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

HERE = Path(__file__).resolve().parent
CONFIG = f"--config={HERE.parent / 'configs' / 'llama3_8b.py'}"
# Of a start that trains nothing: not worth beginning with less left.
LEAST_SECONDS = 60


def main(argv: list[str]) -> int:
    show_progress()
    set_environment()
    # Imported late: they import jax, whose environment is set now.
    import jax

    from jaxscale.perf import context_speed

    if CHECK.value:
        verdicts = []
        for name, kernel in context_speed.kernels_here().items():
            errors = context_speed.check(kernel, size=jax.device_count())
            for line in context_speed.describe(errors):
                print(f"{name}: {line}", flush=True)
            verdicts.append(line)
        return EXIT_FAILED if any(line.startswith("NOT") for line in verdicts) else 0
    if unknown := set(CASES.value) - set(context_speed.CASES):
        known = ", ".join(context_speed.CASES)
        return tell(ValueError(f"--cases={min(unknown)} is not one of {known}"), EXIT_MISTAKE)
    if not WORKDIR.value:
        return tell(ValueError("--workdir=DIR: name a folder for the runs"), EXIT_MISTAKE)
    began, folder = time.monotonic(), Path(WORKDIR.value).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failed = _check(folder)
    text = context_speed.write_long_text(folder / "text")
    for name in CASES.value:
        left = SECONDS.value - (time.monotonic() - began)
        if left < LEAST_SECONDS:
            print(f"{name}: left out, {left:.0f} s are left", flush=True)
            continue
        case = [*context_speed.CASES[name].settings, f"--config.data.path={text}"]
        try:
            record = _measure(name, [CONFIG, *case, *argv[1:]], seconds=left)
        except FailedError as error:
            failed = True
            print(f"{name}: {error}", flush=True)
            continue
        print(f"{name}: {whole_run.describe(record)}, first loss {record['first_loss']}")
        print(json.dumps(record | {"case": name}), flush=True)
    return EXIT_FAILED if failed else 0


def _check(folder: Path) -> bool:
    """Whether it failed; in a process of its own, as the GPUs are for one at a time."""
    output = folder / "check.log"
    command = [sys.executable, str(Path(__file__).resolve()), "--check"]
    try:
        run(command, output=output, timeout_seconds=TIMEOUT.value)
    except FailedError as error:
        print(error, flush=True)
        return True
    print(output.read_text(), flush=True)
    return False


def _measure(name: str, settings: list[str], *, seconds: float) -> whole_run.Record:
    options = whole_run.Options(
        train=HERE / "train.py",
        num_steps=STEPS.value,
        skip=SKIP.value,
        has_warm_start=False,
        has_profile=False,
        workdir=WORKDIR.value,
        timeout_seconds=min(TIMEOUT.value, seconds),
        commit=COMMIT.value,
    )
    return whole_run.measure(settings, options) | {"name": f"context_{name}"}


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
