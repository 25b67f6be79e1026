"""Serving first on the host's CPUs as well.

Owns the priority of a rollout engine's threads. Never raises one.
"""

import os

GUEST_NICE = 10
"""Of a rollout engine's threads that may take a CPU from serving's."""


def give_way_on_cpus() -> None:
    """The calling thread, and those that it starts from here on, run when serving's don't want the CPU.

    Answers of many rollouts, streamed at once, kept a burst of serving requests from its engine for 220 ms.
    And what a rollout engine does in Python after its step has ended comes while serving computes already:
    where one CPU stands for the GPU, each side's engine waited 2 s of 30 for that CPU.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # Linux: of the thread
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, GUEST_NICE))
