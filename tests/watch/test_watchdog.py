"""Of processes whose watchdogs know each other, those that go or are stuck are named to all."""

import json
import queue
import socket
import threading
import time

import pytest

from jaxscale.watch import watchdog
from jaxscale.watch.lines import Line
from jaxscale.watch.watchdog import Watchdog

PATIENCE = 60
STACK = 'File "/src/loop.py", line 44 in train'


class Process:
    """One that is watched: its end of the pipe, what it is told, and what is seen of it."""

    def __init__(self, number):
        self.number, self.seen, self.crashed, self.is_killed = number, "S", "", False
        self.ends, self.warnings, self.stacks = queue.Queue(), queue.Queue(), queue.Queue()
        self._answers = queue.Queue()
        mine, its = socket.socketpair()
        self._line = Line(mine)
        self.watchdog = Watchdog([number, f"node{number}", 100 + number], ward=self, pipe=Line(its))
        self._dog = threading.Thread(target=self.watchdog.run)
        self._listener = threading.Thread(target=self._listen)
        self._dog.start()
        self._listener.start()

    def _listen(self):
        places = {"end": self.ends, "warn": self.warnings, "stacks": self.stacks}
        while (messages := self._line.receive()) is not None:
            for kind, text in messages:
                places.get(kind, self._answers).put(text)

    def tell(self, *message):
        self._line.send(list(message))

    def ask(self, *message):
        self.tell(*message)
        return self._answers.get(timeout=PATIENCE)

    def vanish(self):
        """As the kernel does it for a process that was killed."""
        self._line._connection.shutdown(socket.SHUT_RDWR)
        self._dog.join(PATIENCE)
        self._listener.join(PATIENCE)
        self._line.close()

    # What `Ward` says of a real one.

    def state(self):
        return self.seen

    def stack(self):
        return STACK

    def crash(self):
        return self.crashed

    def kill(self):
        self.is_killed = True


@pytest.fixture
def crew(monkeypatch):
    """`crew(4)`: that many processes whose watchdogs are connected."""
    for name, seconds in {
        "OWN_WORDS_SECONDS": 0.0,
        "TICK_SECONDS": 0.05,
        "PING_SECONDS": 0.1,
        "STOPPED_SECONDS": 0.2,
        "END_SECONDS": 0.2,
        "AGAIN_SECONDS": 0.3,
    }.items():
        monkeypatch.setattr(watchdog, name, seconds)
    members = []

    def crew(num):
        members.extend(Process(number) for number in range(num))
        invitation = members[0].ask("lead", "127.0.0.1", num)
        for member in members[1:]:
            assert member.ask("follow", "127.0.0.1", invitation, num) == ""
        deadline = time.monotonic() + PATIENCE
        while members[0].watchdog._missing and time.monotonic() < deadline:
            time.sleep(0.01)
        return members

    yield crew
    for member in members:
        if member._dog.is_alive():
            member.tell("bye")
    for member in members:
        if member._line.fileno() >= 0:
            member.vanish()


def test_a_process_that_goes_without_a_word_is_named_to_all_others(crew):
    members = crew(4)
    members[2].vanish()
    for number in (0, 1, 3):
        text = members[number].ends.get(timeout=PATIENCE)
        assert text.startswith(
            "process 2 (host node2, pid 102) vanished: killed, out of memory, or its host was lost"
        )
        assert members[number].stacks.empty()


def test_those_that_a_host_takes_with_it_are_named_together(crew, monkeypatch):
    monkeypatch.setattr(watchdog, "GATHER_SECONDS", 2.0)
    members = crew(4)
    members[3].vanish()
    members[1].vanish()
    text = members[2].ends.get(timeout=PATIENCE)
    assert text.startswith("processes 1 (host node1, pid 101), 3 (host node3, pid 103) vanished")


def test_the_lead_that_goes_is_named_by_everyone(crew):
    members = crew(3)
    members[0].vanish()
    for number in (1, 2):
        assert members[number].ends.get(timeout=PATIENCE).startswith("process 0 (host node0, ")


@pytest.mark.parametrize("which", [0, 2])
def test_a_process_that_fails_is_named_with_its_own_words(crew, monkeypatch, which):
    monkeypatch.setattr(watchdog, "OWN_WORDS_SECONDS", 0.5)
    members = crew(3)
    members[which].tell("failed", "config.steps=0: set it to 1 or more")
    members[which].vanish()
    for number in {0, 1, 2} - {which}:
        text = members[number].ends.get(timeout=PATIENCE)
        assert text.startswith(f"process {which} (host node{which}, pid 10{which}) failed: config.")
        assert text.endswith(": config.steps=0: set it to 1 or more")


def test_after_a_normal_end_nobody_is_missed(crew):
    members = crew(3)
    for member in (members[2], members[0]):
        member.tell("bye")
        member._dog.join(PATIENCE)
    time.sleep(2 * watchdog.GATHER_SECONDS)
    assert all(member.ends.empty() for member in members)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'["hello","x",3,"a",1]\n'])
def test_a_stranger_is_turned_away_and_the_watch_goes_on(crew, words):
    (lead,) = crew(1)
    port, token, who = json.loads(lead.ask("lead", "127.0.0.1", 2))
    assert who == [0, "node0", 100]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.sendall(words)
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(json.dumps(["hello", token, 1, "node1", 101]).encode() + b"\n")
        while lead.watchdog._missing:
            time.sleep(0.01)
    assert lead.ends.get(timeout=PATIENCE).startswith("process 1 (host node1, pid 101) vanished")


@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_is_stopped_is_named_to_all_with_its_stack(crew, which):
    members = crew(3)
    for member in members:
        member.tell("at", 7, "step", 0)
    members[which].seen = "T"
    for member in members:
        text = member.ends.get(timeout=PATIENCE)
        name = f"process {which} (host node{which}, pid 10{which})"
        assert text.startswith(f"{name} is stuck: stopped by a signal")
        assert text.endswith('innermost call first:\n  File "/src/loop.py", line 44 in train')
        assert member.stacks.get(timeout=PATIENCE) == ""


def test_who_is_waited_for_is_told_to_the_lead_and_ends_the_run_once_his_own_time_is_over(crew):
    members = crew(3)
    members[1].tell("at", 7, "data", 5.0)
    for member in (members[0], members[2]):
        member.tell("at", 7, "step", 0.2)
    told = members[0].warnings.get(timeout=PATIENCE)
    assert told.startswith("process 1 (host node1, pid 101) is what the others wait for: ")
    assert "waiting for the batch of step 8 (5 s are allowed)" in told
    for member in members:
        text = member.ends.get(timeout=PATIENCE)
        assert text.startswith("process 1 (host node1, pid 101) is stuck: ")
    assert members[1].warnings.empty() and members[2].warnings.empty()


def test_a_process_that_tells_where_it_is_in_time_is_left_alone(crew):
    members = crew(2)
    for step in range(12):
        for member in members:
            member.tell("at", step, "step", 5.0)
        time.sleep(0.5)
    for member in members:
        member.tell("at", 12, "closing", 0)
    assert all(member.ends.empty() and member.warnings.empty() for member in members)


def test_a_process_that_cannot_end_by_itself_is_killed(crew, capfd):
    members = crew(2)
    for member in members:
        member.tell("at", 3, "step", 0.1)
    text = members[0].ends.get(timeout=PATIENCE)
    assert text.startswith("all 2 processes are stuck")
    deadline = time.monotonic() + PATIENCE
    while not members[0].is_killed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert members[0].is_killed
    assert f"error: {text}" in capfd.readouterr().err


def test_for_a_process_that_ends_before_it_is_told_why_its_watchdog_says_it(
    crew, monkeypatch, capfd
):
    members = crew(2)
    monkeypatch.setattr(watchdog, "LEAD_STAYS_SECONDS", PATIENCE)
    monkeypatch.setattr(watchdog, "END_SECONDS", PATIENCE)  # the other's says it no sooner
    members[1].seen = "T"
    text = members[1].ends.get(timeout=PATIENCE)
    members[0].stacks.get(timeout=PATIENCE)  # so that its watchdog knows too
    members[0].vanish()
    assert members[0].ends.empty() and f"\nerror: {text}\n" in capfd.readouterr().err


def test_a_lead_that_ends_while_it_gathers_who_is_gone_names_them_first(crew, monkeypatch, capfd):
    members = crew(3)
    monkeypatch.setattr(watchdog, "GATHER_SECONDS", PATIENCE)
    monkeypatch.setattr(watchdog, "END_SECONDS", PATIENCE)
    members[2].vanish()
    while not members[0].watchdog._gone:
        time.sleep(0.01)
    members[0].vanish()
    text = members[1].ends.get(timeout=PATIENCE)
    assert text.startswith("process 2 (host node2, pid 102) vanished: ")
    assert f"\nerror: {text}\n" in capfd.readouterr().err


CRASHED = "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"


@pytest.mark.parametrize("which", [0, 2])
def test_a_process_that_crashes_is_named_with_the_signal_and_shows_its_stacks(crew, capfd, which):
    members = crew(3)
    members[which].crashed = CRASHED
    members[which].vanish()
    for number in {0, 1, 2} - {which}:
        text = members[number].ends.get(timeout=PATIENCE)
        name = f"process {which} (host node{which}, pid 10{which})"
        assert text == f"{name} crashed: Aborted; the log has the stacks"
    assert CRASHED in capfd.readouterr().err


@pytest.mark.parametrize("first", [1, 2])
def test_one_that_crashes_when_another_was_killed_is_not_named(crew, monkeypatch, first):
    monkeypatch.setattr(watchdog, "GATHER_SECONDS", 2.0)
    members = crew(4)
    members[2].crashed = CRASHED
    for number in (first, 3 - first):
        members[number].vanish()
    for number in (0, 3):
        text = members[number].ends.get(timeout=PATIENCE)
        assert text.startswith("process 1 (host node1, pid 101) vanished: killed")


def test_what_is_said_again_is_asked_again(crew, monkeypatch):
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 2.0)
    members = crew(2)
    members[1].tell("at", 3, "checkpoint", 0)
    members[0].tell("at", 3, "step", 0.1)
    for _ in range(10):  # 0.3 s apart
        told = members[0].warnings.get(timeout=PATIENCE)
        assert told.startswith("process 1 (host node1, pid 101) is what the others wait for")
    assert members[0].ends.empty()


def test_one_whose_watchdog_hangs_too_is_named(crew, monkeypatch):
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 3.0)
    members = crew(3)
    release = threading.Event()
    members[1].stack = lambda: release.wait(PATIENCE) and ""
    members[2].tell("at", 3, "step", 0.1)
    text = members[2].ends.get(timeout=PATIENCE)
    release.set()
    assert text.startswith("process 1 (host node1, pid 101) does not answer, nor does its watchdog")


def test_a_host_that_is_silent_is_given_up(crew, monkeypatch):
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", 0.8)
    members = crew(2)
    monkeypatch.setattr(members[1].watchdog, "_ping", lambda: None)
    text = members[0].ends.get(timeout=PATIENCE)
    assert text.startswith("process 1 (host node1, pid 101) vanished")


def test_a_time_in_which_the_watchdog_itself_stood_still_counts_for_nobody(crew, monkeypatch):
    monkeypatch.setattr(watchdog, "GAP_SECONDS", 0.3)
    (alone,) = crew(1)
    release = threading.Event()
    alone.state = lambda: "S" if release.wait(PATIENCE) else ""
    time.sleep(0.1)
    alone.tell("at", 3, "step", 3.0)
    time.sleep(4.0)
    release.set()
    time.sleep(0.5)
    assert alone.ends.empty()
    assert alone.ends.get(timeout=PATIENCE).startswith("process 0 (host node0, pid 100) is stuck")


@pytest.mark.parametrize("seen", ["t", "T"])
def test_a_process_that_is_alone_may_be_stopped_or_debugged(crew, seen):
    (alone,) = crew(1)
    alone.seen = seen
    alone.tell("at", 3, "step", 0.3)
    time.sleep(1.0)
    assert alone.ends.empty()
