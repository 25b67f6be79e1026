"""The CPU priority of a rollout engine's threads, which is lower than serving's. It is never raised."""

import os

GUEST_NICE = 10
"""The nice value of a rollout engine's threads that could take a CPU from serving."""


def give_way_on_cpus() -> None:
    """Lowers the priority of the calling thread and of those that it starts later.

    Why: many rollouts that streamed their answers at once delayed a burst of serving requests by 220 ms. And
    a rollout engine still runs Python code after its step, while serving already computes: with one CPU in
    place of the GPU, each engine waited 2 s of 30 for it.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # on Linux, that of the thread
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, GUEST_NICE))
