"""Notices that another process of the run is gone, within a second, and says which.

Every process has one connection to process 0, open for as long as it lives: the kernel closes it
whatever ends the process, and asks a host that is silent. Process 0 tells the others. JAX's own
heartbeat is slower (10 s at best) and aborts with a native stack that names nobody; it stays behind
this one, for a process that is there and does nothing.
"""

import contextlib
import json
import math
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from jaxscale.launch import EXIT_AGAIN

# A silent host is given up after 2 + 3 * 2 s, before JAX's heartbeat of 10 s would abort.
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
CONNECT_SECONDS = 10
# Those that a lost host takes with it are gone at once, and are named together.
GATHER_SECONDS = 0.3
# Where all make the same mistake each says so itself, before it hears it of another.
OWN_WORDS_SECONDS = 2.0
LONGEST_LINE = 2**16


class Watch:
    """The connections of a process. Its threads are daemons; `close` before a normal end.

    leave: what to do with the text that says who is gone; ends the process. advice: what the user
    is to do then.
    """

    def __init__(
        self, process: int, *, advice: str = "", leave: Callable[[str], None] | None = None
    ):
        self._advice = advice
        self._leave = leave or end_with
        self.me = [process, socket.gethostname(), os.getpid()]
        self._is_closed = threading.Event()
        self._told = threading.Event()
        self._line: _Line | None = None
        self._hub: _Hub | None = None

    def lead(self, host: str, *, num_processes: int) -> str:
        """For process 0: listens, on that address ("": all), and returns what the others need."""
        self._hub = _Hub(self, host, num_processes=num_processes)
        return json.dumps([self._hub.port, self._hub.token, self.me])

    def follow(self, host: str, invitation: str) -> None:
        """For the others: connects to process 0, with what it returned. Raises OSError."""
        port, token, lead = json.loads(invitation)
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        self._line = _Line(connection)
        self._line.who = lead
        self._line.send(["hello", token, *self.me])
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def _listen(self) -> None:
        assert self._line is not None
        while True:
            messages = self._line.receive()
            for kind, *rest in messages or ():
                if kind == "bye":
                    self._is_closed.set()
                elif kind == "vanished":
                    self.lost(*rest)
                elif kind == "failed":
                    self.failed(*rest)
            if messages is None:
                if not self._is_closed.is_set():
                    self.lost([self._line.who])
                return

    def lost(self, gone: list[list]) -> None:
        """Ends this process because those are no longer there."""
        names = ", ".join(name_of(who) for who in gone)
        many = len(gone) > 1
        self._end(
            f"process{'es' if many else ''} {names} vanished: killed, out of memory, or "
            f"{'their' if many else 'its'} host was lost; {'their' if many else 'its'} own log and "
            "the kernel's say more"
        )

    def failed(self, who: list, said: str) -> None:
        """Ends this process because that one has failed, and said why."""
        time.sleep(OWN_WORDS_SECONDS)
        self._end(f"process {name_of(who)} failed: {said}")

    def _end(self, text: str) -> None:
        if not self._is_closed.is_set() and not self._told.is_set():
            self._told.set()
            self._leave(f"{text}; {self._advice}" if self._advice else text)

    def report(self, said: str) -> None:
        """Tells the others, as far as that can be done in a second, why this process ends now."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            if self._line is not None:
                self._line.send(["failed", self.me, said])
            elif self._hub is not None:
                self._hub.send(["failed", self.me, said])

    def close(self) -> None:
        """Before a normal end: the others need not worry."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            if self._line is not None:
                self._line.send(["bye"])
            elif self._hub is not None:
                self._hub.send(["bye"])


class _Hub:
    """Process 0's end of all connections, in a thread."""

    def __init__(self, watch: Watch, host: str, *, num_processes: int):
        self.token = secrets.token_hex(16)
        self._watch, self._missing = watch, num_processes - 1
        self._server = _listen_on(host)
        self.port = self._server.getsockname()[1]
        self._lines: dict[int, _Line] = {}
        self._gone: list[list] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def send(self, message: list) -> None:
        with self._lock:
            lines = list(self._lines.values())
        for line in lines:
            with contextlib.suppress(OSError):
                line.send(message)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        give_up_at = math.inf
        while (left := give_up_at - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 3600)):
                if key.fileobj is self._server:
                    connection, _address = self._server.accept()
                    selector.register(connection, selectors.EVENT_READ, _Line(connection))
                elif not self._is_there(key.data):
                    selector.unregister(key.fileobj)
                    key.data.close()
            if self._gone:
                give_up_at = min(give_up_at, time.monotonic() + GATHER_SECONDS)
            if self._missing == 0 and self._server.fileno() >= 0:
                selector.unregister(self._server)
                self._server.close()  # all are there: nobody else has any business here
        self._gone.sort()
        self.send(["vanished", self._gone])
        self._watch.lost(self._gone)

    def _is_there(self, line: "_Line") -> bool:
        """Takes what it says; one that goes without a word is among the gone."""
        messages = line.receive()
        for kind, *rest in messages or ():
            if not line.who:
                is_ours = kind == "hello" and len(rest) == len([self.token, *self._watch.me])
                if not is_ours or not secrets.compare_digest(str(rest[0]), self.token):
                    return False
                line.who = rest[1:]
                self._missing -= 1
                with self._lock:
                    self._lines[line.who[0]] = line
            elif kind == "bye":
                line.is_done = True
            elif kind == "failed":
                line.is_done = True
                self.send(["failed", *rest])
                threading.Thread(target=self._watch.failed, args=rest, daemon=True).start()
        if messages is None and line.who:
            with self._lock:
                del self._lines[line.who[0]]
            if not line.is_done:
                self._gone.append(line.who)
        return messages is not None


class _Line:
    """A connection that carries a JSON list in each line."""

    def __init__(self, connection: socket.socket):
        self._connection, self._begun = connection, b""
        self._lock = threading.Lock()
        self.who: list = []
        self.is_done = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # Nobody waits for a process that does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        # A child that outlives this process would keep the connection open.
        os.register_at_fork(after_in_child=connection.close)

    def send(self, message: list) -> None:
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list] | None:
        """What has come, perhaps nothing whole yet; None once the other end is gone."""
        try:
            data = self._connection.recv(LONGEST_LINE)
            *lines, self._begun = (self._begun + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        is_whole = data and len(self._begun) <= LONGEST_LINE
        are_ours = all(isinstance(message, list) and message for message in messages)
        return messages if is_whole and are_ours else None

    def close(self) -> None:
        self._connection.close()


def _listen_on(host: str) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=4096)


def name_of(who: list) -> str:
    """`3 (host node1, pid 4242)`."""
    return "{} (host {}, pid {})".format(*who)


def end_with(text: str) -> None:
    """Says it and ends this process at once, whatever its other threads wait for."""
    with contextlib.suppress(Exception):
        os.write(2, f"\nerror: {text}\n".encode(errors="replace"))
    sys.stderr.flush()
    os._exit(EXIT_AGAIN)
