"""Times variants of one training step against each other, in turns on one state.

    python scripts/bench_variants.py --config configs/llama3_8b.py [--config.x=y ...] --variant='base' --pairs \\
        --variant='no_triton: xla_gpu_enable_triton_gemm=false' --variant='kept: mesh.reshard_after_forward=False'

A variant is a name and settings between spaces: compiler options of XLA (their names begin with xla_), optimization_level,
and keys of the config. The first is what the others are compared with; --pairs adds the others two at a time. Prints a
table and, last, one JSON record.

Steps on H100 and H200 sit at the limit of the card's power: their time drifts by 1 to 3% with its temperature, and from
one machine to the next, so runs one after the other cannot tell a difference of 1%. Here every round times every
variant, in rotated order and on the same batches, and what counts is the median over the rounds of the ratio to the
first variant within a round. The same settings under two names show what is noise. The variants share one state, so
none may change its arrays, mesh or shardings, nor the batch.

Data and step are those of scripts/train.py, on one host. What cannot run (an option that this jaxlib has not, a step
that does not fit or raises) is left out with a line.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from jaxscale import config as run_config
from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_own_flags, read_config, tell
from jaxscale.compile import fit
from jaxscale.config import Config, ProfileConfig, Remat
from jaxscale.data.batch import Batch
from jaxscale.data.loader import Corpus, open_dataset
from jaxscale.perf import bench
from jaxscale.step.feed import device_batches
from jaxscale.step.state import Plan, abstract_state, init_state, plan_for_data
from jaxscale.train.profile import Profile
from jaxscale.xla import options as xla

VARIANTS = flags.DEFINE_multi_string(
    "variant", [], "A name, a colon and settings between spaces; may be repeated."
)
PAIRS = flags.DEFINE_bool("pairs", False, "Add every pair of variants, but for the first.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "How often every variant is timed.", lower_bound=1)
STEPS = flags.DEFINE_integer(
    "steps", 3, "Steps that count, in each round, after one that does not.", lower_bound=1
)
PROFILE = flags.DEFINE_list(
    "profile", [], "Variants to record 3 more steps of, in WORKDIR/NAME (scripts/anatomy.py)."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the profiles go.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)

PROFILED_STEPS = 3
NAME = re.compile(r"\w[\w.-]*")  # also of a folder
# Parts of the config that choose the batches, or that the step does not know of.
COMMON = (
    "batch_size",
    "seq_len",
    "seed",
    "data",
    "steps",
    "checkpoint",
    "evaluation",
    "sample",
    "log",
    "profile",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """settings: "key=value" each. pair: the names of the two that it is made of, if --pairs made it."""

    name: str
    settings: tuple[str, ...]
    pair: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"--variant={': '.join(filter(None, [self.name, ' '.join(self.settings)]))!r}"


@dataclasses.dataclass
class Timed:
    """A variant that runs. round_seconds: of a step, for each round; loss: of the last step."""

    variant: Variant
    step: fit.Step
    round_seconds: list[float] = dataclasses.field(default_factory=list)
    loss: float = math.nan

    def num_microbatches(self) -> int:
        return self.step.plan.config.grad_accumulation


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    left_out: dict[str, str] = {}  # name to reason
    try:
        xla.set_environment()
        variants = read_variants(VARIANTS.value)
        check_profiles(variants)
        config = read_config(argv[1:])
        corpus = open_dataset(
            config.data,
            seed=config.seed,
            seq_len=config.seq_len,
            vocab_size=config.model.vocab_size,
        )
        xla.enable_compilation_cache()
        plans = make_plans(variants, config, argv[1:], corpus, left_out)
        timed = measure(plans, corpus, left_out)
    except (ValueError, bench.FailedError) as error:
        return tell(error, EXIT_MISTAKE if isinstance(error, ValueError) else EXIT_FAILED)
    record = make_record(timed, left_out, argv[1:])
    print(table(record))
    print(json.dumps(record))
    return 0


# What the command line says.


def read_variants(texts: list[str]) -> list[Variant]:
    """The user's, then the pairs. Raises ValueError."""
    variants: list[Variant] = []
    for text in texts:
        name, _, settings = text.partition(":")
        variant = Variant(name.strip(), tuple(settings.split()))
        if not NAME.fullmatch(variant.name):
            raise ValueError(
                f"--variant={text!r}: begin with a name of letters, digits, '_', '.' and '-', then ':'"
            )
        if variant.name in [other.name for other in variants]:
            raise ValueError(
                f"--variant={text!r}: there is another of this name; choose another name"
            )
        if wrong := [
            setting for setting in variant.settings if not re.fullmatch(r"\w[\w.]*=\S*", setting)
        ]:
            raise ValueError(
                f"--variant={text!r}: {wrong[0]!r} is no setting; write key=value, without spaces"
            )
        variants.append(variant)
    if not variants:
        raise ValueError("name the variants: --variant='base' --variant='full: remat=full' ...")
    return [*variants, *pairs_of(variants)] if PAIRS.value else variants


def pairs_of(variants: list[Variant]) -> Iterator[Variant]:
    """But for those that set one key twice, and those that the user has named."""
    known = {frozenset(variant.settings) for variant in variants}
    for one, other in itertools.combinations(variants[1:], 2):
        settings = tuple(dict.fromkeys((*one.settings, *other.settings)))
        keys = {setting.partition("=")[0] for setting in settings}
        if len(keys) == len(settings) and frozenset(settings) not in known:
            yield Variant(f"{one.name}+{other.name}", settings, pair=(one.name, other.name))


def check_profiles(variants: list[Variant]) -> None:
    """Raises ValueError."""
    names = [variant.name for variant in variants]
    if unknown := [name for name in PROFILE.value if name not in names]:
        raise ValueError(f"--profile: {unknown[0]!r} is not one of {', '.join(names)}")
    if PROFILE.value and not WORKDIR.value:
        raise ValueError("--profile writes to a folder: name one, --workdir=DIR")


def config_of(variant: Variant, common: Config, words: list[str]) -> Config:
    """The config of these words of a command line, which is `common`, as the variant changes it. Raises ValueError."""
    changes = [setting for setting in variant.settings if setting not in options_of(variant)]
    for setting in changes:
        key = setting.partition("=")[0]
        run_config.check_key(common, key)
        if key.partition(".")[0] in COMMON:
            raise ValueError(
                f"config.{key} is the same for all variants: set it with --config.{setting}"
            )
        if key == "xla_options":
            raise ValueError(
                "config.xla_options: write the options alone, such as xla_gpu_enable_triton_gemm=false"
            )
    config = read_config([*words, *(f"--config.{setting}" for setting in changes)])
    return dataclasses.replace(config, xla_options=(*config.xla_options, *options_of(variant)))


def options_of(variant: Variant) -> list[str]:
    """XLA's, and JAX's optimization_level."""
    return [
        text for text in variant.settings if re.match(r"xla_(?!options=)|optimization_level=", text)
    ]


# Before anything is measured.


def make_plans(
    variants: list[Variant],
    common: Config,
    words: list[str],
    corpus: Corpus,
    left_out: dict[str, str],
) -> list[tuple[Variant, Plan]]:
    """common: the config of `words`. Raises ValueError for a variant that cannot be; such a pair is left out."""
    plans: list[tuple[Variant, Plan]] = []
    for variant in variants:
        if left_out.keys() & set(variant.pair):
            continue  # of an option without effect: it would equal the other one
        try:
            config = config_of(variant, common, words)
            if useless := [
                option for option in options_of(variant) if not has_effect(option, config)
            ]:
                leave_out(variant.name, f"{useless[0]} has no effect here", left_out)
                continue
            plan = plan_of(config, corpus)
            check_common(plan, plans[0][1] if plans else plan)
        except ValueError as error:
            if not variant.pair:
                raise ValueError(f"{variant}: {error}") from None
            leave_out(variant.name, str(error), left_out)
        else:
            plans.append((variant, plan))
    return plans


def has_effect(option: str, config: Config) -> bool:
    """Whether this jaxlib knows it, and it is for this platform; jaxscale.xla says what is wrong with it."""
    sizes, device = config.mesh.sizes(jax.device_count()), jax.devices()[0]
    without, alone = (
        xla.compiler_options(
            dataclasses.replace(config, xla_options=options),
            sizes,
            platform=device.platform,
            device_kind=device.device_kind,
        )
        for options in ((), (option,))
    )
    return alone != without


def plan_of(config: Config, corpus: Corpus) -> Plan:
    """As `train` makes it."""
    return plan_for_data(config, corpus, run_config.validate_on(config, jax.device_count()))


def check_common(plan: Plan, first: Plan) -> None:
    """Raises ValueError if the two cannot go on from the same state."""
    if jax.tree.flatten(abstract_state(plan)) != jax.tree.flatten(abstract_state(first)):
        raise ValueError(
            "the state would have other arrays, another mesh or other shardings than with the first variant, and all "
            "variants share one; set it with --config, and compare two runs of scripts/bench_step.py"
        )


def leave_out(name: str, reason: str, left_out: dict[str, str]) -> None:
    left_out[name] = reason
    print(f"{name} is left out: {reason}", file=sys.stderr)


# Compiling and timing.


def measure(
    plans: list[tuple[Variant, Plan]], corpus: Corpus, left_out: dict[str, str]
) -> dict[str, Timed]:
    """By name, those that were timed to the end. Raises bench.FailedError if none was."""
    # Before there is a state: XLA's autotuning then has the memory for itself, as in `train`.
    timed = compile_all(plans, left_out)
    if not timed:
        raise bench.FailedError("no variant is left")
    contest = Contest(timed, left_out)
    with open_loaders(timed, corpus) as next_batches:
        batches = next_batches(1)
        for name, each in timed.items():  # a first execution sets up communication and CUDA graphs
            contest.run(name, batches[each.num_microbatches()])
        for number in range(ROUNDS.value):
            time_round(contest, number, next_batches(1 + STEPS.value))
        timed = dict(contest.running)
        for name in PROFILE.value:
            record_profile(contest, name, next_batches(1 + PROFILED_STEPS))
    if not timed:
        raise bench.FailedError("no variant is left")
    return timed


def compile_all(plans: list[tuple[Variant, Plan]], left_out: dict[str, str]) -> dict[str, Timed]:
    timed: dict[str, Timed] = {}
    for variant, plan in plans:
        try:
            step = compile_one(plan)
        except Exception as error:  # XLA may refuse an option, a kernel the device
            leave_out(variant.name, f"it does not compile: {first_line(error)}", left_out)
            continue
        usable_gib = fit.USABLE * fit.pool_of(plan)
        if step.compiled is None or step.memory_gib > usable_gib:
            leave_out(
                variant.name,
                f"it needs {step.memory_gib:.1f} GiB, and {usable_gib:.1f} can be used",
                left_out,
            )
            continue
        print(
            f"{variant.name}: compiled in {step.compile_seconds:.1f} s, {step.memory_gib:.1f} GiB",
            file=sys.stderr,
        )
        timed[variant.name] = Timed(variant, step)
    return timed


def compile_one(plan: Plan) -> fit.Step:
    """Without looking for settings that fit, which takes minutes, unless remat="auto" asks for it."""
    if plan.config.remat == Remat.AUTO:
        return fit.compile_to_fit(plan)
    began = time.perf_counter()
    step = fit.compile_plan(plan)
    return dataclasses.replace(step, compile_seconds=time.perf_counter() - began)


# By the number of microbatches: the same rows, cut differently.
Batches = dict[int, list[Batch]]


@contextlib.contextmanager
def open_loaders(timed: dict[str, Timed], corpus: Corpus) -> Iterator[Callable[[int], Batches]]:
    """Yields a function: so many further batches, on the devices."""
    plans = {each.num_microbatches(): each.step.plan for each in timed.values()}
    with contextlib.ExitStack() as stack:
        loaders = {
            num_microbatches: stack.enter_context(
                contextlib.closing(device_batches(plan, corpus.train, start=0))
            )
            for num_microbatches, plan in plans.items()
        }

        def next_batches(count: int) -> Batches:
            return jax.block_until_ready(
                {key: [next(loader) for _ in range(count)] for key, loader in loaders.items()}
            )

        yield next_batches


class Contest:
    """The variants that still run, and the one state that their steps go on from."""

    def __init__(self, timed: dict[str, Timed], left_out: dict[str, str]):
        self.running = dict(timed)
        self._left_out = left_out
        self._plan = next(iter(timed.values())).step.plan
        self._state: Any = init_state(self._plan)

    def run(self, name: str, batches: list[Batch]) -> float | None:
        """Seconds of a step. None: it raises, or its loss is not finite, and from then on the variant runs no more."""
        if name not in self.running:
            return None
        try:
            return self._run(self.running[name], batches)
        except Exception as error:  # whatever it is, the others can go on
            del self.running[name]
            leave_out(name, f"it fails: {first_line(error)}", self._left_out)
            # The state is donated: a step that fails may have taken it along.
            if isinstance(error, FloatingPointError) or not is_alive(self._state):
                self._state = None  # its memory first
                self._state = init_state(self._plan)
            return None

    def _run(self, timed: Timed, batches: list[Batch]) -> float:
        began = time.perf_counter()
        for number, batch in enumerate(batches, 1):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                self._state, metrics = timed.step(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        seconds = (time.perf_counter() - began) / len(batches)
        timed.loss = float(metrics["loss"])
        # Sums over NaNs take less power than real ones, and all that follow on this state would have them.
        if not math.isfinite(timed.loss + float(metrics["grad_norm"])):
            raise FloatingPointError(
                f"the loss is {timed.loss}, the gradient norm {metrics['grad_norm']}"
            )
        return seconds


def is_alive(state: Any) -> bool:
    try:
        jax.block_until_ready(state)
    except RuntimeError:  # what a step that failed has left
        return False
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def time_round(contest: Contest, number: int, batches: Batches) -> None:
    names = list(contest.running)
    first = number % max(len(names), 1)
    for name in (*names[first:], *names[:first]):
        timed = contest.running[name]
        unmeasured, *measured = batches[timed.num_microbatches()]
        contest.run(
            name, [unmeasured]
        )  # after it, the variant before has left nothing in caches and queues
        if (seconds := contest.run(name, measured)) is not None:
            timed.round_seconds.append(seconds)
    shown = ", ".join(
        f"{name} {timed.round_seconds[-1] * 1e3:.1f}" for name, timed in contest.running.items()
    )
    print(f"round {number + 1} of {ROUNDS.value}, ms: {shown}", file=sys.stderr)


def record_profile(contest: Contest, name: str, batches: Batches) -> None:
    if name not in contest.running:  # said when it was left out
        return
    unrecorded, *recorded = batches[contest.running[name].num_microbatches()]
    contest.run(name, [unrecorded])
    folder = Path(str(WORKDIR.value)) / name
    profile = Profile(ProfileConfig(steps=PROFILED_STEPS), folder, first_step=0)
    profile.start()
    try:
        contest.run(name, recorded)
    finally:
        profile.stop()
    print(f"the profile of {name} is in {folder}", file=sys.stderr)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


# What is told.


def make_record(timed: dict[str, Timed], left_out: dict[str, str], words: list[str]) -> dict:
    """The first variant that was timed to the end is what the others are compared with."""
    first = next(iter(timed.values()))
    devices = first.step.plan.mesh.devices
    return {
        "name": "step_variants",
        "settings": words,
        "device_kind": devices.flat[0].device_kind,
        "num_devices": devices.size,
        "rounds": ROUNDS.value,
        "steps": STEPS.value,
        "ratio_to": first.variant.name,
        "variants": {name: figures(each, first) for name, each in timed.items()},
        "left_out": left_out,
        **bench.provenance(COMMIT.value),
    }


def figures(timed: Timed, first: Timed) -> dict:
    plan, seconds = timed.step.plan, statistics.median(timed.round_seconds)
    ratios = [
        mine / its for mine, its in zip(timed.round_seconds, first.round_seconds, strict=True)
    ]
    return {
        "settings": timed.variant.settings,
        "step_seconds": seconds,
        "tokens_per_second_per_device": plan.config.batch_size
        * plan.config.seq_len
        / seconds
        / plan.mesh.size,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "round_step_seconds": timed.round_seconds,
        "remat": plan.execution.remat.value,
        "num_recomputed": timed.step.num_recomputed,
        "loss": timed.loss,
        **timed.step.facts(),
    }


def table(record: dict) -> str:
    """What a person reads; a ratio under 1 is faster."""
    head = ("variant", "ms", "tokens/s/device", "time ratio", "(min - max)", "compile s", "GiB")
    rows = [head, *(cells(name, each) for name, each in record["variants"].items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{record['num_devices']} x {record['device_kind']}, {record['rounds']} rounds of {record['steps']} steps; "
        f"time ratio: to {record['ratio_to']}, of the same round"
    ]
    for name, *numbers in rows:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *aligned)))
    return "\n".join(
        [*lines, *(f"{name}  left out: {reason}" for name, reason in record["left_out"].items())]
    )


def cells(name: str, each: dict) -> tuple[str, ...]:
    return (
        name,
        f"{each['step_seconds'] * 1e3:,.1f}",
        f"{each['tokens_per_second_per_device']:,.0f}",
        f"{each['ratio']:.4f}",
        f"({each['ratio_min']:.4f} - {each['ratio_max']:.4f})",
        f"{each['compile_seconds']:.1f}",
        f"{each['predicted_memory_gib']:.1f}",
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
