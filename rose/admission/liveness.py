"""Who is on the other side of the board, and whether that process still lives.

Owns process identities that survive pid reuse. Both sides must share a pid namespace. Never signals.
"""

import os

PID_BITS = 22  # Linux: pid_max is at most 4194304
NOBODY = 0
STAT_BYTES = 1024
"""More than /proc/PID/stat ever has."""


def own_identity() -> int:
    """This process as one word: start time in clock ticks above PID_BITS, pid below."""
    ticks = _start_ticks(os.getpid())
    assert ticks is not None
    return ticks << PID_BITS | os.getpid()


def pid_of(identity: int) -> int:
    """The pid in an identity; 0 for NOBODY."""
    return identity & ((1 << PID_BITS) - 1)


def is_alive(identity: int) -> bool:
    """Whether that very process runs; a zombie does not. Tens of microseconds: not for every step."""
    return identity != NOBODY and _start_ticks(pid_of(identity)) == identity >> PID_BITS


def _start_ticks(pid: int) -> int | None:
    # Without pathlib and a text layer: a side looks at the other while the GPU may be handed over.
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
