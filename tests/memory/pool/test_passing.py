"""Lines and descriptors over a socket: many at once, and too many."""

import gc
import os
import resource
import socket
from collections.abc import Iterator
from itertools import count, islice

import pytest

from rose.errors import PoolError
from rose.memory.pool.passing import MAX_LINE_BYTES, Inbox, send_line


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def receive_line(inbox: Inbox, connection: socket.socket) -> bytes:
    while (line := inbox.take_line()) is None:
        assert inbox.receive(connection)
    return line


@pytest.mark.parametrize("num_fds", [0, 1, 253, 254, 600])
def test_descriptors_arrive_whole_and_in_order(
    ends: tuple[socket.socket, socket.socket], num_fds: int
) -> None:
    one, other = ends
    pipes = [os.pipe() for _ in range(3)]
    sent = [pipes[i % 3][0] for i in range(num_fds)]
    send_line(one, b'{"a": 1}\n', sent)
    send_line(one, b"next\n")
    inbox = Inbox(max_fds=num_fds)
    assert receive_line(inbox, other) == b'{"a": 1}'
    received = inbox.take_fds()
    assert receive_line(inbox, other) == b"next"
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in sent]
    for fd in (*received, *(end for pipe in pipes for end in pipe)):
        os.close(fd)


def test_too_much_is_refused_and_what_came_is_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    gc.collect()  # or what others have left is closed meanwhile, and its number is taken for ours
    before = set(os.listdir("/proc/self/fd"))
    send_line(one, b"x\n", [one.fileno()] * 3)
    inbox = Inbox(max_fds=2)
    with pytest.raises(PoolError, match="3 descriptors on one line, at most 16384 and 2 are expected"):
        inbox.receive(other)
    inbox.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    inbox = Inbox(max_fds=0)
    send_line(one, b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(PoolError, match="16385 bytes"):
        while True:
            inbox.receive(other)


def test_a_line_that_was_read_and_answered_with_a_close_was_sent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends

    class ClosedAfterwards(socket.socket):
        """The other side is gone as soon as the kernel has the line."""

        def sendmsg(self, *args: object, **kwargs: object) -> int:
            num_sent = super().sendmsg(*args, **kwargs)  # type: ignore[arg-type]
            other.close()
            return num_sent

    with ClosedAfterwards(fileno=one.detach()) as connection:
        send_line(connection, b"bye\n")


def limit_that_leaves(num_fds: int) -> int:
    """The limit is of numbers: those that are open need not be the lowest ones, after other tests."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    return next(islice((number for number in count() if number not in taken), num_fds, None))


def test_descriptors_beyond_this_process_limit_are_missed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    send_line(one, b"x\n", [one.fileno()] * 50)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_that_leaves(10)
    inbox = Inbox(max_fds=100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises(PoolError, match=f"may have {limit} open files; raise that with ulimit -n"):
            inbox.receive(other)
        inbox.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        inbox.close()
