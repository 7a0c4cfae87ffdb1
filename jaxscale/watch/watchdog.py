"""The watchdog of one process: `python -m jaxscale.watch.watchdog PIPE STACKS PROCESS PID ADVICE`.

Every watchdog has one connection to that of process 0, open for as long as its process lives: the
kernel closes it whatever ends the process, and a host that is silent is given up. Process 0's tells
the others. JAX's own heartbeat aborts with a native stack that names nobody; it is what is left
where a network lets only JAX through.

A message of a watchdog to that of process 0: failed, crashed, bye, stuck, report, ping. The other
way: vanished, failed, bye, report, verdict, ping.
"""

import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import secrets
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

from jaxscale.watch.lines import Line
from jaxscale.watch.verdict import Report, judge, lost, name_of
from jaxscale.watch.ward import CRASH, Ward, say

CONNECT_SECONDS = 10
TICK_SECONDS = 1.0
# A host that says nothing is given up; this process itself may have been starved or suspended for
# a part of that time (GAP_SECONDS), which counts for nobody.
PING_SECONDS, SILENT_SECONDS, GAP_SECONDS = 3.0, 15.0, 3.0
# Those that a lost host takes with it are gone at once, and are named together.
GATHER_SECONDS = 0.3
# Where all make the same mistake each says so itself, before it hears it of another.
OWN_WORDS_SECONDS = 2.0
# JAX ends a process in C++, without a word, once process 0 is gone: the others go first.
LEAD_STAYS_SECONDS = 0.5
# A process that is stopped for longer than a user's slip keeps all others waiting.
STOPPED_SECONDS = 4.0
# What all watchdogs have to report, what one of them waits for the verdict, and for the next.
REPORT_SECONDS, VERDICT_SECONDS, AGAIN_SECONDS = 4.0, 10.0, 60.0
# What a process has to end by itself, once told.
END_SECONDS = 5.0


@dataclasses.dataclass
class _Place:
    """Where the process says that it is; the fields are those of `Report`."""

    since: float
    step: int | None = None
    phase: str = "start-up"
    allowed: float = 0.0
    batch: int = 0


class Seen(Protocol):
    """The process, as `Ward` sees it."""

    def state(self) -> str: ...
    def stack(self) -> str: ...
    def crash(self) -> str: ...
    def kill(self) -> None: ...


class Watchdog:
    """me: [process, host, pid]. pipe: to the process. advice: what the user is to do if it ends.

    It tells where it is (at), and with whom it runs (lead, follow); that it failed, and why; or
    that it ends well (bye). It is told: invitation, following, warn, stacks, end.
    """

    def __init__(self, me: list, *, ward: Seen, pipe: Line, advice: str = ""):
        self.me, self._ward, self._pipe, self._advice = me, ward, pipe, advice
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_over = self._is_closing = self._is_told = self._knows_why = False
        self._unsaid = ""  # why the process ends, until it is told
        self._place = _Place(time.monotonic())
        self._stopped_since: float | None = None
        self._quiet_until = 0.0  # nothing more is said of what is stuck before
        self._above: Line | None = None
        self._server: socket.socket | None = None
        self._token, self._num_others, self._missing = "", 0, 0
        self._below: dict[int, Line] = {}
        self._gone: list[list] = []
        self._crashed: dict[int, str] = {}
        self._heard: dict[Line, float] = {}
        self._reports: dict[int, Report] | None = None
        self._stack, self._awaits_verdict = "", False
        self._add(pipe, self._from_process)
        self._last_turn = time.monotonic()

    # The loop.

    def run(self) -> None:
        """Until the process has ended, or says that it will end well; closes all connections."""
        self._after(TICK_SECONDS, self._tick)
        self._after(PING_SECONDS, self._ping)
        while not self._is_over:
            wait = max(0.0, self._timers[0][0] - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # nobody took it out meanwhile
                    key.data(key.fileobj)
            while self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        for open_one in (*self._heard, self._server):
            if open_one is not None:
                open_one.close()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), do))

    def _add(self, line: Line, hears: Callable[[list, Line], None]) -> None:
        """hears: takes each message; one that is [] says that the other end is gone."""

        def read(line: Line):
            messages = line.receive()
            self._heard[line] = time.monotonic()
            for message in messages or ():
                hears(message, line)
            if messages is None:
                self._remove(line)
                hears([], line)

        self._heard[line] = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, read)

    def _remove(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        self._heard.pop(line, None)
        if line is not self._pipe:
            line.close()

    def _tick(self) -> None:
        self._after(TICK_SECONDS, self._tick)
        now = time.monotonic()
        since_last, self._last_turn = now - self._last_turn, now
        if since_last > TICK_SECONDS + GAP_SECONDS:
            self._forgive(since_last)
        for line in [line for line in self._heard if now - self._heard[line] > SILENT_SECONDS]:
            if line in (self._above, *self._below.values()):
                self._remove(line)
                (self._from_above if line is self._above else self._from_below)([], line)
        self._look(now, since_last)

    def _forgive(self, seconds: float) -> None:
        """Of so much time nobody can be asked what he did in it."""
        now = time.monotonic()
        self._place.since = min(now, self._place.since + seconds)
        for line in self._heard:
            self._heard[line] = min(now, self._heard[line] + seconds)

    def _look(self, now: float, since_last: float) -> None:
        """At the process."""
        state, place = self._ward.state(), self._place
        is_still = state == "t" or (state == "T" and not self._num_others)
        if is_still:  # somebody debugs it; or has stopped it, and keeps nobody waiting
            place.since = min(now, place.since + since_last)
        self._stopped_since = (self._stopped_since or now) if state == "T" else None
        is_stopped = self._num_others and now - (self._stopped_since or now) > STOPPED_SECONDS
        is_overdue = 0 < place.allowed < now - place.since
        if (is_stopped or is_overdue) and now >= self._quiet_until and not self._is_told:
            self._quiet_until, self._awaits_verdict = now + AGAIN_SECONDS, True
            self._after(VERDICT_SECONDS, self._judge_alone)
            self._tell_above(["stuck"])

    def _ping(self) -> None:
        self._after(PING_SECONDS, self._ping)
        for line in (self._above, *self._below.values()):
            if line is not None:
                _send(line, ["ping"])

    # The process itself.

    def _from_process(self, message: list, line: Line) -> None:
        kind, *rest = message or [""]
        if kind == "at":
            self._place = _Place(time.monotonic(), *rest)
        elif kind == "lead":
            self._lead(*rest)
        elif kind == "follow":
            host, invitation, num_processes = rest
            self._follow(host, invitation, num_processes=num_processes)
        elif kind == "failed":
            self._is_closing = True
            self._tell_above(["failed", *rest])
        elif kind == "bye":
            self._is_closing = self._is_over = True
            for other in (self._above, *self._below.values()):
                if other is not None:
                    _send(other, ["bye"])
        else:
            self._end_with_process()

    def hears_of_end(self, pidfd: int) -> None:
        """By a descriptor that can be read once the process has ended.

        That is sooner than by the pipe, which a child of the process may hold open.
        """
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._take_last_words())

    def _take_last_words(self) -> None:
        while not self._is_over and select.select([self._pipe], [], [], 0)[0]:
            for message in self._pipe.receive() or [[]]:
                self._from_process(message, self._pipe)
        if not self._is_over:
            self._end_with_process()

    def _end_with_process(self) -> None:
        """It has ended, and with this watchdog the connections that say so.

        gloo aborts what runs on without another, often before that one is named here: so why it
        ended is said now.
        """
        if crash := self._ward.crash():
            say(f"\n{crash}")
            if not self._is_closing:
                self._tell_above(["crashed", crash.splitlines()[0].removeprefix(CRASH)])
        if self._gone:
            self._tell_of_the_gone()
        if self._unsaid:
            say(f"\nerror: {self._unsaid}")
        self._is_over = True

    def _end(self, text: str) -> None:
        """Ends the process, which says why; for one that cannot it is said here."""
        if self._is_closing or self._is_told:
            return
        self._is_told = True
        reason, line, stack = text.partition("\n")
        text = "; ".join(filter(None, (reason, self._advice))) + line + stack

        self._unsaid = text

        def tell():
            self._unsaid = ""
            _send(self._pipe, ["end", text])

        def kill():
            say(f"\nerror: {text}")
            self._ward.kill()

        stays = LEAD_STAYS_SECONDS if self._below else 0.0
        self._after(stays, tell)
        self._after(stays + END_SECONDS, kill)

    # Joining.

    def _lead(self, host: str, num_processes: int) -> None:
        """Listens, on that address ("": all), and says what the others need."""
        self._token, self._num_others = secrets.token_hex(16), num_processes - 1
        self._missing = self._num_others
        self._server = _listen_on(host)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        port = self._server.getsockname()[1]
        _send(self._pipe, ["invitation", json.dumps([port, self._token, self.me])])
        self._close_server_if_all_are_there()

    def _accept(self, server: socket.socket) -> None:
        connection, _address = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._add(Line(connection), self._from_stranger)

    def _from_stranger(self, message: list, line: Line) -> None:
        kind, *rest = message or [""]
        if line.who:
            self._from_below(message, line)
        elif kind != "hello" or len(rest) != len([self._token, *self.me]):
            self._remove(line)
        elif not secrets.compare_digest(str(rest[0]), self._token):
            self._remove(line)
        else:
            line.who = rest[1:]
            self._below[line.who[0]] = line
            self._missing -= 1
            self._close_server_if_all_are_there()

    def _close_server_if_all_are_there(self) -> None:
        """Nobody else has any business here."""
        if self._missing == 0 and self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None

    def _follow(self, host: str, invitation: str, *, num_processes: int) -> None:
        """Connects to the watchdog of process 0, with what that returned."""
        port, token, lead = json.loads(invitation)
        self._num_others = num_processes - 1
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            _send(self._pipe, ["following", str(error)])
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._above = Line(connection)
        self._above.who = lead
        self._add(self._above, self._from_above)
        _send(self._above, ["hello", token, *self.me])
        _send(self._pipe, ["following", ""])

    # The others.

    def _tell_above(self, message: list) -> None:
        if self._above is not None:
            _send(self._above, message)
        else:
            self._take(message, self.me)

    def _tell_all(self, message: list) -> None:
        for line in list(self._below.values()):
            _send(line, message)
        self._from_above(message, None)

    def _from_below(self, message: list, line: Line) -> None:
        if message:
            line.is_done |= message[0] in ("bye", "failed")
            self._take(message, line.who)
            return
        self._below.pop(line.who[0], None)
        if not line.is_done:
            self._gone.append(line.who)
            self._after(GATHER_SECONDS, self._tell_of_the_gone)

    def _take(self, message: list, who: list) -> None:
        """What a process has to say to all; process 0's own watchdog too."""
        kind, *rest = message
        if kind == "failed":
            self._tell_all(["failed", who, *rest])
        elif kind == "crashed":
            self._crashed[who[0]] = rest[0]
            if who == self.me:
                self._gone.append(who)
        elif kind == "stuck" and self._reports is None:
            self._reports = reports = {}
            self._after(REPORT_SECONDS, lambda: self._judge(reports))
            self._tell_all(["report"])
        elif kind == "report" and self._reports is not None:
            self._reports[who[0]] = Report(**rest[0])
            if len(self._reports) == 1 + len(self._below):
                self._judge(self._reports)

    def _tell_of_the_gone(self) -> None:
        self._tell_all(["vanished", lost(self._gone, self._crashed)])

    def _from_above(self, message: list, line: Line | None) -> None:
        kind, *rest = message or [""]
        if kind == "vanished" and not self._knows_why:
            self._end(*rest)
        elif kind == "failed":
            who, said = rest
            self._knows_why = True  # also why others are gone in a moment
            if who != self.me:
                text = f"process {name_of(who)} failed: {said}"
                self._after(OWN_WORDS_SECONDS, lambda: self._end(text))
        elif kind == "report":
            self._tell_above(["report", dataclasses.asdict(self._report())])
        elif kind == "verdict":
            self._obey(*rest)
        elif kind == "bye":
            assert line is not None
            line.is_done = True
        elif not kind and line is not None:
            self._above = None
            if not line.is_done and not self._knows_why:
                self._end(lost([line.who], {}))

    # Who is stuck.

    def _report(self) -> Report:
        now, place, state = time.monotonic(), self._place, self._ward.state()
        self._stack = self._ward.stack()
        return Report(
            self.me,
            place.step,
            place.phase,
            place.batch,
            now - place.since,
            place.allowed,
            state,
            now - (self._stopped_since or now),
            self._stack,
        )

    def _judge(self, reports: dict[int, Report]) -> None:
        if reports is not self._reports:  # all had reported before the time was over
            return
        self._reports = None
        silent = [line.who for number, line in self._below.items() if number not in reports]
        verdict = judge(list(reports.values()), silent=silent)
        self._tell_all(["verdict", verdict.text, verdict.is_over])

    def _judge_alone(self) -> None:
        """Where the watchdog of process 0 does not judge."""
        if self._awaits_verdict:
            verdict = judge([self._report()], silent=[])
            self._obey(verdict.text, verdict.is_over)

    def _obey(self, text: str, is_over: bool) -> None:
        self._awaits_verdict = False
        self._quiet_until = time.monotonic() + AGAIN_SECONDS
        if is_over:
            if not self._is_closing and not self._is_told:
                # The main thread's at once: a process that hangs in C says no more.
                name = name_of(self.me)
                say(f"\nstacks of process {name}, its main thread's first:\n{self._stack}\n")
                _send(self._pipe, ["stacks", ""])
            self._end(text)
        elif self._above is None:
            _send(self._pipe, ["warn", text])


def _send(line: Line, message: list) -> None:
    """As far as that can be done: who is gone is noticed where he is read."""
    with contextlib.suppress(OSError):
        line.send(message)


def _listen_on(host: str) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=4096)


def main() -> None:
    *numbers, advice = sys.argv[1:]
    pipe, stacks, process, pid = map(int, numbers)
    line = Line(socket.socket(fileno=pipe))
    ward = Ward(pid, stacks=stacks)
    me = [process, socket.gethostname(), pid]
    watchdog = Watchdog(me, ward=ward, pipe=line, advice=advice)
    with contextlib.suppress(OSError):  # a kernel that has none, or it has ended already
        watchdog.hears_of_end(os.pidfd_open(pid))
    watchdog.run()


if __name__ == "__main__":
    main()
