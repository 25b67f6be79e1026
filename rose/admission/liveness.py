"""Which process is on the other side of the board, and whether it still lives.

An identity stays distinct when another process gets its pid. Both sides must share a pid namespace.
"""

import os

PID_BITS = 22  # Linux: pid_max is at most 4194304
NOBODY = 0
STAT_BYTES = 1024
"""More bytes than /proc/PID/stat ever has."""


def own_identity() -> int:
    """Returns this process as one word: its start time in clock ticks above PID_BITS bits of its pid."""
    ticks = _start_ticks(os.getpid())
    assert ticks is not None
    return ticks << PID_BITS | os.getpid()


def pid_of(identity: int) -> int:
    """Returns the pid in an identity; 0 for NOBODY."""
    return identity & ((1 << PID_BITS) - 1)


def is_alive(identity: int) -> bool:
    """Returns whether the identity's process runs; a zombie does not. It takes tens of microseconds, too long
    for every step."""
    return identity != NOBODY and _start_ticks(pid_of(identity)) == identity >> PID_BITS


def _start_ticks(pid: int) -> int | None:
    # Not through pathlib and a text layer: this may run while the GPU is being handed over.
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            stat = os.read(fd, STAT_BYTES)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may hold spaces: count the fields after it.
    fields = stat[stat.rindex(b")") + 2 :].split(None, 20)
    state, start_ticks = fields[0], fields[19]
    return None if state in b"ZX" else int(start_ticks)
