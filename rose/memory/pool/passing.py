"""Lines and file descriptors over a Unix stream socket.

The kernel takes at most 253 descriptors with one message. A line is therefore cut into as many pieces as it
takes, each with its share of the descriptors, and is padded if it is too short for that. Received descriptors
are closed unless the caller takes them.
"""

import os
import resource
import socket
from collections.abc import Sequence

from rose.errors import PoolError

MAX_LINE_BYTES = 16 * 1024
_MAX_FDS_PER_MESSAGE = 253  # SCM_MAX_FD
_RECEIVE_BYTES = 4096


def send_line(connection: socket.socket, line: bytes, fds: Sequence[int] = ()) -> None:
    """Sends a line of JSON with descriptors, on a blocking socket. Raises: OSError."""
    num_pieces = max(1, -(-len(fds) // _MAX_FDS_PER_MESSAGE))
    line = line[:-1].ljust(num_pieces - 1) + line[-1:]  # JSON ignores blanks at the end
    for piece in range(num_pieces - 1):
        share = fds[piece * _MAX_FDS_PER_MESSAGE : (piece + 1) * _MAX_FDS_PER_MESSAGE]
        socket.send_fds(connection, [line[piece : piece + 1]], share)
    last = num_pieces - 1
    num_sent = socket.send_fds(connection, [line[last:]], fds[last * _MAX_FDS_PER_MESSAGE :])
    # Checked: even an empty send fails if the other side has read the line, answered and closed.
    if rest := line[last + num_sent :]:
        connection.sendall(rest)


class Inbox:
    """What has arrived on one socket and has not been taken yet."""

    def __init__(self, max_fds: int) -> None:
        self._max_fds = max_fds
        self._bytes = bytearray()
        self._fds: list[int] = []

    def receive(self, connection: socket.socket) -> bool:
        """Reads once; returns False at the end of the stream. Raises: PoolError for too much; OSError."""
        received, fds, flags, _ = socket.recv_fds(
            connection, _RECEIVE_BYTES, _MAX_FDS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC
        )
        self._fds += fds
        self._bytes += received
        if flags & socket.MSG_CTRUNC:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PoolError(
                f"file descriptors were cut off on arrival: this process may have {limit} open files; "
                f"raise that with ulimit -n"
            )
        if len(self._bytes) > MAX_LINE_BYTES or len(self._fds) > self._max_fds:
            raise PoolError(
                f"{len(self._bytes)} bytes and {len(self._fds)} descriptors on one line, at most "
                f"{MAX_LINE_BYTES} and {self._max_fds} are expected"
            )
        return bool(received)

    def take_line(self) -> bytes | None:
        """Takes the next whole line without its end; None if there is none."""
        line, end, rest = bytes(self._bytes).partition(b"\n")
        if not end:
            return None
        self._bytes = bytearray(rest)
        return line

    @property
    def num_fds(self) -> int:
        return len(self._fds)

    def take_fds(self) -> list[int]:
        """Takes all descriptors so far; the caller closes them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
