"""Which process of a run is stuck, from what the watchdogs of all of them report."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.watch.ward import STATES, place

# The phase of reading a batch of an evaluation.
HELD_OUT_DATA = "held-out data"
MOST_FRAMES = 30


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one process. who: [process, host, pid]. step: updates done, None before the first.

    phase: "step", "data", or what it pauses for. batch: of such a phase, from 1; 0 where it has
    none. seconds: since it last told where it is. allowed: how many of them are; 0: any number.
    state: the letter of /proc/PID/stat. stopped_seconds: how long that was T. stack: of its main
    thread, the innermost frame first; "" where none came.
    """

    who: list
    step: int | None
    phase: str
    batch: int
    seconds: float
    allowed: float
    state: str
    stopped_seconds: float
    stack: str

    @property
    def is_overdue(self) -> bool:
        return 0 < self.allowed < self.seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
    """text: for the user. is_over: the run ends; else it is known who the others wait for."""

    text: str
    is_over: bool


def judge(reports: list[Report], *, silent: list[list]) -> Verdict:
    """silent: those that have not reported, as lists of process, host and pid."""
    if silent:
        names = ", ".join(name_of(who) for who in silent)
        many = len(silent) > 1
        return Verdict(
            f"process{'es' if many else ''} {names} {'do' if many else 'does'} not answer, nor "
            f"{'do their watchdogs' if many else 'does its watchdog'}: stopped, or out of memory",
            is_over=True,
        )
    stuck = _odd_ones(reports)
    is_over = any(report.is_overdue or report.state == "T" for report in stuck)
    if len(stuck) == len(reports) > 1:
        return Verdict(_all_wait(stuck), is_over)
    others = [report for report in reports if report not in stuck]
    verb = "is stuck" if is_over else "is what the others wait for"
    texts = [f"process {name_of(report.who)} {verb}: {_doing(report)}" for report in stuck]
    text = "; ".join(texts) + (f"; {_where_others_are(others)}" if others else "")
    return Verdict(text + _stack_of(stuck[0]), is_over)


def _odd_ones(reports: list[Report]) -> list[Report]:
    """Those whose doing explains that the others wait; all of them where nothing tells."""
    if stopped := [report for report in reports if report.state == "T"]:
        return stopped
    if behind := _least(reports, key=lambda report: -1 if report.step is None else report.step):
        return behind
    if elsewhere := _least(reports, key=lambda report: report.phase == "step"):
        return elsewhere
    are_in_batches = all(report.batch for report in reports)
    # To read a batch comes before what the devices do with it.
    if are_in_batches and (
        behind := _least(reports, key=lambda report: (report.batch, report.phase != HELD_OUT_DATA))
    ):
        return behind
    places = [place(report.stack) for report in reports]
    commonest = max(set(places), key=places.count)
    is_clear = places.count(commonest) > len(places) / 2
    odd = [report for report, at in zip(reports, places, strict=True) if at != commonest]
    return odd if odd and is_clear else reports


def _least(reports: list[Report], *, key: Callable[[Report], Any]) -> list[Report]:
    """Those with the least key; none if that is all of them."""
    least = min(map(key, reports))
    found = [report for report in reports if key(report) == least]
    return found if len(found) < len(reports) else []


def _doing(report: Report) -> str:
    if report.state == "T":
        return f"stopped by a signal for {report.stopped_seconds:.0f} s, {_when(report)}"
    words = STATES.get(report.state)
    note = f", {words}" if words else ""
    allowed = f" ({report.allowed:.0f} s are allowed)" if report.allowed else ""
    return f"{report.seconds:.0f} s {_when(report)}{allowed}{note}"


def _when(report: Report) -> str:
    if report.step is None:
        return f"in {report.phase}, before its first step"
    if report.phase == "step":
        return f"in step {report.step + 1}"
    if report.phase == "data":
        return f"waiting for the batch of step {report.step + 1}"
    batch = f"batch {report.batch} of the " if report.batch else ""
    return f"in {batch}{report.phase} after step {report.step}"


def _where_others_are(others: list[Report]) -> str:
    many = len(others) > 1
    return f"{'the others are' if many else 'the other is'} {_when(others[0])}"


def _all_wait(reports: list[Report]) -> str:
    longest = max(reports, key=lambda report: report.seconds)
    return (
        f"all {len(reports)} processes are stuck: {_doing(longest)}, in a collective that does not "
        "end or on a device that does not answer; each one's log has its stacks"
        f"{_stack_of(longest)}"
    )


def _stack_of(report: Report) -> str:
    if not report.stack:
        return f"\nprocess {report.who[0]} gives no Python stack: it is inside C, or the kernel"
    frames = report.stack.splitlines()
    shown = "".join(f"\n  {frame}" for frame in frames[:MOST_FRAMES])
    more = f"\n  ... {len(frames) - MOST_FRAMES} more" if len(frames) > MOST_FRAMES else ""
    return f"\nmain thread of process {report.who[0]}, innermost call first:{shown}{more}"


def lost(gone: list[list], crashed: Mapping[int, str]) -> str:
    """What is said of those that went without a word. crashed: number -> how, of some of them.

    Those are named only if no other is gone: it may be why, as gloo aborts what runs on without it.
    """
    killed = [who for who in gone if who[0] not in crashed]
    names = ", ".join(name_of(who) for who in sorted(killed or gone))
    many = len(killed or gone) > 1
    if not killed:
        how = ", ".join(sorted(set(crashed.values())))
        return f"process{'es' if many else ''} {names} crashed: {how}; the log has the stacks"
    return (
        f"process{'es' if many else ''} {names} vanished: killed, out of memory, or "
        f"{'their' if many else 'its'} host was lost; {'their' if many else 'its'} own log and "
        "the kernel's say more"
    )


def name_of(who: list) -> str:
    """`3 (host node1, pid 4242)`."""
    return "{} (host {}, pid {})".format(*who)
