"""Tests put this TCP proxy before a relay; it passes bytes on slowly, like a slow link."""

import contextlib
import socket
import threading
import time

from rose.transfer.relay.url import parse_relay_url

CHUNK_BYTES = 128 << 10


class SlowProxy:
    """Stands before a relay of this host and passes at most CHUNK_BYTES per ``pause_s`` in each direction.

    ``pause_s`` may change.
    """

    def __init__(self, relay_url: str, pause_s: float = 0.01) -> None:
        self.pause_s = pause_s
        self._target = ("127.0.0.1", parse_relay_url(relay_url)[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        # The buffers are small, so that the sender notices the slow link.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        self.url = f"embedded://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._copy, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while chunk := source.recv(CHUNK_BYTES):
                time.sleep(self.pause_s)
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the proxy was closed

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # the connection never existed, or is gone
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()
