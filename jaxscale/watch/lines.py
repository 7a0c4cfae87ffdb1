"""JSON lists over a socket, one in each line."""

import json
import os
import socket
import struct

LONGEST_LINE = 2**20


class Line:
    """A connection that carries a JSON list in each line. who: at its other end, once known."""

    def __init__(self, connection: socket.socket):
        self._connection, self._begun = connection, b""
        self.who: list = []
        self.is_done = False
        # Nobody waits for a process that does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        # A child that outlives this process would keep the connection open.
        os.register_at_fork(after_in_child=connection.close)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: list) -> None:
        """Raises OSError where the other end is gone, or does not read for a second."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list] | None:
        """What has come, perhaps nothing whole yet; None once the other end is gone.

        Waits until something has come.
        """
        try:
            data = self._connection.recv(2**16)
            *lines, self._begun = (self._begun + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        is_whole = data and len(self._begun) <= LONGEST_LINE
        are_ours = all(isinstance(message, list) and message for message in messages)
        return messages if is_whole and are_ours else None

    def close(self) -> None:
        self._connection.close()
