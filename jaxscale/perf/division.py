"""One GPU's time in a trace: where its steps begin, and what each instant of them belongs to.

E calls, K launches, G groups, T tiers of groups, I intervals between starts and ends of calls,
M calls of the main program, W windows between marks.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxscale.perf.categories import CATEGORIES, COMPUTE, Launch, classify, collective_kind
from jaxscale.perf.trace import Events


@dataclass(frozen=True)
class Division:
    """Of the mean step of one GPU, seconds.

    marks: where its steps begin and the last one ends, nanoseconds. groups: of each of its launches
    a category, or a kind of collective. seconds: by key of CATEGORIES. exposed: by kind of
    collective. hidden: of all collectives.
    """

    module: str
    marks: np.ndarray
    groups: list[str]
    seconds: dict[str, float]
    exposed: dict[str, float]
    hidden: float

    @property
    def compute(self) -> float:
        return sum(self.seconds[category] for category in COMPUTE)

    @property
    def num_steps(self) -> int:
        return len(self.marks) - 1

    def are_inside(self, start_E: np.ndarray) -> np.ndarray:
        """Of calls that start then."""
        return (start_E >= self.marks[0]) & (start_E < self.marks[-1])


def divide(events: Events) -> Division:
    groups = [_group(launch) for launch in events.launches]
    module, marks = find_steps(events)
    time, hidden, idle = partition(events, groups, begin=marks[0], end=marks[-1])
    scale = 1e-9 / (len(marks) - 1)  # nanoseconds of the whole to seconds of a step
    exposed = {group: value * scale for group, value in time.items() if group not in CATEGORIES}
    seconds = {category: time.get(category, 0.0) * scale for category in CATEGORIES}
    seconds |= {"communication_exposed": sum(exposed.values()), "idle": idle * scale}
    return Division(module, marks, groups, seconds, exposed, hidden * scale)


@functools.cache
def _group(launch: Launch) -> str:
    category = classify(launch)
    return collective_kind(launch) if category == "communication" else category


def partition(
    events: Events, groups: Sequence[str], *, begin: float, end: float
) -> tuple[dict[str, float], float, float]:
    """Divides the time from `begin` to `end`, nanoseconds, as `anatomy`'s module says.

    groups: for each of events.launches one of COMPUTE, "copy", "transfer", or else a kind of
    collective. Returns the time of each group, the time of hidden collectives, and the idle time;
    the first and the last add up to end - begin. Sorts the calls' ends once: 0.1 s for 100,000.
    """
    names, group_K = np.unique(np.array(groups), return_inverse=True)
    tier_G = np.array([_tier(name) for name in names], dtype=int)
    start_E, end_E = np.clip(events.start_E, begin, end), np.clip(events.end_E, begin, end)
    times = np.concatenate([[begin], start_E, end_E, [end]])
    change = np.zeros((len(times), len(names)), np.int32)
    which = np.arange(1, len(start_E) + 1)
    change[which, group_K[events.index_E]] = 1
    change[which + len(start_E), group_K[events.index_E]] = -1
    order = np.argsort(times, kind="stable")
    # Between neighbours of the ordered times the same events run throughout.
    length_I, running_IG = np.diff(times[order]), np.cumsum(change[order], axis=0)[:-1]
    running_IT = np.stack([running_IG[:, tier_G == tier].sum(1) for tier in range(4)], axis=1)
    time_G, is_free_I = np.zeros(len(names)), np.ones(len(length_I), bool)
    for tier in range(4):
        share_I = np.where(is_free_I, length_I, 0) / np.maximum(running_IT[:, tier], 1)
        time_G[tier_G == tier] = share_I @ running_IG[:, tier_G == tier]
        is_free_I &= running_IT[:, tier] == 0
    hidden = length_I[(running_IT[:, 2] > 0) & (running_IT[:, :2].sum(1) > 0)].sum()
    time = dict(zip(names.tolist(), time_G.tolist(), strict=True))
    return time, float(hidden), float(length_I[is_free_I].sum())


def _tier(group: str) -> int:
    """An instant belongs to the lowest tier that runs."""
    return 0 if group in COMPUTE else {"copy": 1, "transfer": 3}.get(group, 2)


def find_steps(events: Events) -> tuple[str, np.ndarray]:
    """The program that takes most of the GPU's time, and where its complete steps begin.

    The last mark, nanoseconds, is where the last step ends. Steps are told apart by a launch that
    is called once in each: between any two of its calls lie all of the program's launches. If there
    is none, for there is one run or the profiler dropped too many calls, the steps that the host
    marked are taken as equal, from the first call to the end of the last.
    """
    module, is_main_K = _main_module(events)
    is_main_E = is_main_K[events.index_E]
    keys, index_M = np.unique(_recorded_K(events)[events.index_E[is_main_E]], return_inverse=True)
    start_M = events.start_E[is_main_E]
    # A few that the profiler dropped may be missing; not so many that a microbatch passes for a
    # step.
    enough = len(keys) - min(4, len(keys) // 50)
    best = np.empty(0)
    for key in np.unique(index_M, return_index=True)[1].argsort():
        is_mark_M = index_M == key
        num_windows = int(is_mark_M.sum()) - 1
        if num_windows < max(1, len(best)) or num_windows * enough > len(index_M):
            continue
        if _fewest_in_a_window(is_mark_M, index_M, num_keys=len(keys)) >= enough:
            best = start_M[is_mark_M]
    if not len(best):
        ends = start_M.min(), events.end_E[is_main_E].max()
        best = np.linspace(*ends, max(1, events.num_marked) + 1)
    return module, best


def _fewest_in_a_window(is_mark_M: np.ndarray, index_M: np.ndarray, *, num_keys: int) -> int:
    """How many different launches each window between two marks has at least."""
    num_windows = int(is_mark_M.sum()) - 1
    window_M = np.cumsum(is_mark_M) - 1
    is_inside_M = (window_M >= 0) & (window_M < num_windows)
    has_WK = np.zeros((num_windows, num_keys), bool)
    has_WK[window_M[is_inside_M], index_M[is_inside_M]] = True
    return int(has_WK.sum(1).min())


def _main_module(events: Events) -> tuple[str, np.ndarray]:
    """The program that takes most time and which launches are its own.

    All are, if most time is of launches without a program.
    """
    time = defaultdict(float)
    for index, value in enumerate(np.bincount(events.index_E, events.end_E - events.start_E)):
        time[events.launches[index].module] += value
    module = max(time, key=lambda name: time[name])
    return module, np.array([not module or launch.module == module for launch in events.launches])


def _recorded_K(events: Events) -> np.ndarray:
    """Numbers of the launches, the same for those that differ in names which were found.

    Not each run finds all.
    """
    recorded = [
        replace(launch, hlo_op="", op_name="") if launch.graph else launch
        for launch in events.launches
    ]
    numbers = {launch: number for number, launch in enumerate(recorded)}
    return np.array([numbers[launch] for launch in recorded])
