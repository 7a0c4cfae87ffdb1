"""Of processes that watch each other, those that go without a word are named by the others."""

import contextlib
import json
import queue
import socket
import time

import pytest

from jaxscale import watch
from jaxscale.watch import Watch

PATIENCE = 60


@pytest.fixture
def crew(monkeypatch):
    """`crew(number)`: that many watches that are connected, and what each said when it left."""
    monkeypatch.setattr(watch, "OWN_WORDS_SECONDS", 0.0)

    def crew(num):
        said: list[queue.Queue[str]] = [queue.Queue() for _ in range(num)]
        watches = [Watch(number, leave=said[number].put) for number in range(num)]
        invitation = watches[0].lead("127.0.0.1", num_processes=num)
        for follower in watches[1:]:
            follower.follow("127.0.0.1", invitation)
        deadline = time.monotonic() + PATIENCE
        while len(lines_of(watches[0])) < num - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        members.extend(watches)
        return watches, said

    members: list[Watch] = []
    yield crew
    for member in members:
        member.close()
    for member in members:
        cut(member)
        for line in lines_of(member):
            line.close()
        if member._hub is not None:
            member._hub._server.close()


def lines_of(watch):
    """Its connections."""
    of_hub = list(watch._hub._lines.values()) if watch._hub else []
    return of_hub + ([watch._line] if watch._line else [])


def cut(watch):
    """As the kernel does it for a process that was killed."""
    for line in lines_of(watch):
        with contextlib.suppress(OSError):  # the other end was first
            line._connection.shutdown(socket.SHUT_RDWR)


def test_a_process_that_goes_without_a_word_is_named_to_all_others(crew):
    watches, said = crew(4)
    cut(watches[2])
    for number in (0, 1, 3):
        text = said[number].get(timeout=PATIENCE)
        assert text.startswith(f"process 2 (host {socket.gethostname()}, pid "), text
        assert ") vanished: killed, out of memory, or its host was lost" in text


def test_those_that_a_host_takes_with_it_are_named_together(crew):
    watches, said = crew(4)
    cut(watches[1])
    cut(watches[3])
    text = said[2].get(timeout=PATIENCE)
    assert text.startswith("processes 1 (host ") and ", 3 (host " in text and "vanished" in text


def test_the_lead_that_goes_is_named_by_everyone(crew):
    watches, said = crew(3)
    cut(watches[0])
    for number in (1, 2):
        assert said[number].get(timeout=PATIENCE).startswith("process 0 (host ")


@pytest.mark.parametrize("which", [0, 2])
def test_a_process_that_fails_is_named_with_its_own_words(crew, which):
    watches, said = crew(3)
    watches[which].report("config.steps=0: set it to 1 or more")
    cut(watches[which])
    for number in {0, 1, 2} - {which}:
        text = said[number].get(timeout=PATIENCE)
        assert text.startswith(f"process {which} (host ") and text.endswith(
            "failed: config.steps=0: set it to 1 or more"
        )


def test_after_a_normal_end_nobody_is_missed(crew):
    watches, said = crew(3)
    for member in (watches[2], watches[0]):
        member.close()
        time.sleep(0.1)
        cut(member)
    time.sleep(2 * watch.GATHER_SECONDS)
    assert all(words.empty() for words in said)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'["hello","x",3,"a",1]\n'])
def test_a_stranger_is_turned_away_and_the_watch_goes_on(crew, words):
    watches, said = crew(1)
    watches[0]._hub._missing = 2  # so that it listens
    port = watches[0]._hub.port
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(words)
        stranger.settimeout(PATIENCE)
        assert stranger.recv(1) == b""
    assert said[0].empty()
    follower = Watch(1, leave=said[0].put)
    follower.follow("127.0.0.1", json.dumps([port, watches[0]._hub.token, watches[0].me]))
    deadline = time.monotonic() + PATIENCE
    while not lines_of(watches[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    cut(follower)
    assert said[0].get(timeout=PATIENCE)
    for line in lines_of(follower):
        line.close()
