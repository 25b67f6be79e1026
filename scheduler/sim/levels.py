"""The scheduler's four levels, as `--level` of `rose sched simulate` and `rose sched explain` names them.

Owns the choice of the command for a level; the cluster level is the default. Each level can be simulated and
explained without the others.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from rose.errors import ConfigError
from rose.scheduler.runtime.command import explain as cluster_command
from rose.scheduler.sim.gpu_command import simulate_pair
from rose.scheduler.sim.group_command import explain_groups, simulate_groups
from rose.scheduler.sim.node_command import simulate_nodes
from rose.scheduler.sim.simulate import simulate_cluster

Command = Callable[[Sequence[str]], int]
NUM_EXPLAINED = "10"


class Level(StrEnum):
    """A level of decisions. docs/levels.md says which level decides what."""

    CLUSTER = "cluster"
    """Which group a job joins."""
    GROUP = "group"
    """Whose phase has the group's nodes when."""
    NODE = "node"
    """Which node gets a request or a training task."""
    GPU = "gpu"
    """What two pipelines run on a device at once."""


def simulate(argv: Sequence[str]) -> int:
    """Runs ``rose sched simulate [--level LEVEL] ...``. Raises: ConfigError for an unknown level."""
    commands: Mapping[Level, Command] = {
        Level.CLUSTER: simulate_cluster,
        Level.GROUP: simulate_groups,
        Level.NODE: simulate_nodes,
        Level.GPU: simulate_pair,
    }
    level, rest = _level(argv)
    return commands[level](rest)


def explain(argv: Sequence[str]) -> int:
    """Runs ``rose sched explain [--level LEVEL] ...``. Raises: ConfigError for an unknown level."""
    commands: Mapping[Level, Command] = {
        Level.CLUSTER: cluster_command.main,
        Level.GROUP: explain_groups,
        Level.NODE: lambda rest: simulate_nodes(["--explain", NUM_EXPLAINED, *rest]),
        Level.GPU: simulate_pair,
    }
    level, rest = _level(argv)
    return commands[level](rest)


def _level(argv: Sequence[str]) -> tuple[Level, list[str]]:
    """Returns the level and the other arguments. Raises: ConfigError for an unknown level."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--level", nargs="?", default=Level.CLUSTER.value, help=argparse.SUPPRESS)
    found, rest = first.parse_known_args(list(argv))
    try:
        return Level(found.level), rest
    except ValueError:
        raise ConfigError(f"--level {found.level}: the levels are {', '.join(Level)}") from None
