"""Of several processes that wait, the one that the others wait for is named."""

import dataclasses
from typing import Any

import pytest

from jaxscale.watch.verdict import HELD_OUT_DATA, Report, judge
from jaxscale.watch.ward import place

WAITING = """\
File "/venv/jax/_src/array.py", line 623 in _value
File "/src/jaxscale/train/loop.py", line 48 in train"""
READING = """\
File "/src/jaxscale/data/loader.py", line 120 in read
File "/src/jaxscale/train/loop.py", line 44 in train"""


def report(process, **changes):
    who = [process, f"node{process}", 100 + process]
    waits = Report(who, 7, "step", 0, 41.0, 30.0, "S", 0.0, WAITING)
    return dataclasses.replace(waits, **changes)


def test_the_place_of_a_process_is_its_innermost_frame():
    assert place(WAITING) == "array.py:623 in _value"
    assert place("") == ""


# What process 2 of four does, whether the run ends, and what is told of it.
ODD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "stopped": (
        {"state": "T", "stopped_seconds": 4.2, "seconds": 5.0},
        True,
        "process 2 (host node2, pid 102) is stuck: stopped by a signal for 4 s, in step 8; the "
        "others are in step 8\nmain thread of process 2, innermost call first:\n  File",
    ),
    "behind": (
        {"step": 6},
        True,
        "process 2 (host node2, pid 102) is stuck: 41 s in step 7 (30 s are allowed); the others "
        "are in step 8\n",
    ),
    "in the kernel": (
        {"step": 6, "state": "D", "stack": ""},
        True,
        "process 2 (host node2, pid 102) is stuck: 41 s in step 7 (30 s are allowed), inside the "
        "kernel, such as for a disk or a network folder; the others are in step 8\nprocess 2 gives "
        "no Python stack",
    ),
    "without a batch": (
        {"phase": "data", "allowed": 600.0, "stack": READING},
        False,
        "process 2 (host node2, pid 102) is what the others wait for: 41 s waiting for the batch "
        "of step 8 (600 s are allowed); the others are in step 8\nmain thread of process 2, "
        'innermost call first:\n  File "/src/jaxscale/data/loader.py", line 120 in read',
    ),
    "without a batch for too long": (
        {"phase": "data", "allowed": 600.0, "seconds": 601.0},
        True,
        "process 2 (host node2, pid 102) is stuck: 601 s waiting for the batch of step 8",
    ),
    "without a limit": (
        {"phase": "checkpoint", "allowed": 0.0},
        False,
        "process 2 (host node2, pid 102) is what the others wait for: 41 s in checkpoint after "
        "step 7; the others",
    ),
    "elsewhere in the same step": (
        {"stack": READING},
        True,
        "process 2 (host node2, pid 102) is stuck: 41 s in step 8 (30 s are allowed); the others",
    ),
    "not there yet": (
        {"step": None, "phase": "start-up", "allowed": 0.0},
        False,
        "process 2 (host node2, pid 102) is what the others wait for: 41 s in start-up, before "
        "its first step",
    ),
}


@pytest.mark.parametrize("doing", ODD)
def test_the_odd_one_is_named(doing):
    changes, is_over, told = ODD[doing]
    verdict = judge([report(0), report(1), report(2, **changes), report(3)], silent=[])
    assert verdict.text.startswith(told), verdict.text
    assert verdict.is_over == is_over


def test_where_all_do_the_same_all_are_named_once():
    verdict = judge([report(0), report(1, seconds=42.0)], silent=[])
    assert verdict.is_over and verdict.text.startswith(
        "all 2 processes are stuck: 42 s in step 8 (30 s are allowed), in a collective that does "
        "not end or on a device that does not answer"
    )


# What process 1 of two does, both in an evaluation, the other in its batch 5.
ODD_IN_AN_EVALUATION: dict[str, tuple[dict[str, Any], bool, str]] = {
    "a batch behind": (
        {"batch": 4},
        True,
        "process 1 (host node1, pid 101) is stuck: 41 s in batch 4 of the evaluation after step 7 "
        "(30 s are allowed); the other is in batch 5 of the evaluation after step 7\n",
    ),
    "without a batch": (
        {"phase": HELD_OUT_DATA, "allowed": 600.0},
        False,
        "process 1 (host node1, pid 101) is what the others wait for: 41 s in batch 5 of the "
        "held-out data after step 7 (600 s are allowed); the other is in batch 5 of the evaluation",
    ),
    "in the same batch": (
        {},
        True,
        "all 2 processes are stuck: 41 s in batch 5 of the evaluation after step 7 (30 s are",
    ),
    "not in it yet": (
        {"phase": "integrity", "batch": 0},
        True,
        "all 2 processes are stuck: 41 s in batch 5 of the evaluation after step 7 (30 s are",
    ),
}


@pytest.mark.parametrize("doing", ODD_IN_AN_EVALUATION)
def test_the_odd_one_of_an_evaluation_is_named(doing):
    changes, is_over, told = ODD_IN_AN_EVALUATION[doing]
    both = [report(number, phase="evaluation", batch=5) for number in (0, 1)]
    verdict = judge([both[0], dataclasses.replace(both[1], **changes)], silent=[])
    assert verdict.text.startswith(told), verdict.text
    assert verdict.is_over == is_over


def test_two_that_are_both_elsewhere_tell_nothing():
    assert "all 2 processes" in judge([report(0), report(1, stack=READING)], silent=[]).text


def test_one_that_does_not_report_is_the_one():
    verdict = judge([report(0), report(1)], silent=[[2, "node2", 102]])
    assert verdict.is_over
    assert verdict.text.startswith("process 2 (host node2, pid 102) does not answer, nor does its")


def test_a_process_that_is_alone_is_named():
    verdict = judge([report(0)], silent=[])
    assert verdict.is_over
    assert verdict.text.startswith("process 0 (host node0, pid 100) is stuck: 41 s in step 8 (30 s")
    assert "others" not in verdict.text


def test_a_long_stack_is_cut():
    deep = "\n".join(f'File "a.py", line {line} in f' for line in range(100))
    text = judge([report(0, stack=deep)], silent=[]).text
    assert len(text.splitlines()) == 33 and text.endswith("... 70 more")
