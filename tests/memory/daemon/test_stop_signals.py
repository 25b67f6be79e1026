"""A stop signal ends the pool daemon, also while it makes the pool's memory."""

import subprocess
import sys

import pytest

from rose.host_memory import available_bytes

NUM_SLABS = 2048
SLAB_BYTES = 2 << 20

# The timer counts the process's own CPU time, so the signal comes at the same point on a machine that stalls.
INTERRUPTED_MAKING = f"""
import resource, signal
from rose._vmm import SlabFile

class Ended(Exception): pass

def end(*_): raise Ended

def num_faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

signal.signal(signal.SIGPROF, end)
before = num_faults()
signal.setitimer(signal.ITIMER_PROF, 0.03)
try:
    SlabFile.create({NUM_SLABS}, {SLAB_BYTES})
except Ended:
    print(num_faults() - before)
"""

SIGNALS_IN_TURN = """
import os, signal
from rose.memory.daemon.event_loop import EventLoop, Stopped

loop = EventLoop()
loop.stop_on_signals()
try:
    with loop.stop_raises():
        os.kill(os.getpid(), signal.SIGTERM)
    print("went on")
except Stopped:
    print("stopped", loop.is_stopping)
loop = EventLoop()
loop.stop_on_signals()
os.kill(os.getpid(), signal.SIGINT)
loop.run(timeout_s=300.0)
print("left", loop.is_stopping)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True)
    return done.stdout


@pytest.mark.skipif(available_bytes() < NUM_SLABS * SLAB_BYTES, reason="needs 4 GiB of free memory")
def test_a_signal_handler_that_raises_ends_the_making_of_memory() -> None:
    # Each slab that was made cost a page fault or more.
    assert int(run(INTERRUPTED_MAKING)) < NUM_SLABS // 2


def test_a_stop_signal_raises_where_asked_and_ends_the_loop_elsewhere() -> None:
    assert run(SIGNALS_IN_TURN).splitlines() == ["stopped True", "left True"]
