"""Profiles of stages: the fit of measured passes, and the file.

Promises that a profile of other hardware is refused by name where the hardware is known. Never measures.
Source: LeMix §IV-A.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rose.errors import ConfigError
from rose.scheduler.node.model import NodeProfile, PassCost

_FILE = TypeAdapter(NodeProfile)


def fit_cost(tokens: Sequence[int], seconds: Sequence[float], pairs: Sequence[int] | None = None) -> PassCost:
    """Returns the pass cost with the least relative squared error and no negative coefficient.

    `tokens`: those of each measured pass, `seconds`: what it took. `pairs`: the sum of the squares of its
    sequences' lengths; None for passes of one sequence.
    Raises: ValueError if there are fewer than three different lengths.
    """
    if len(set(tokens)) < 3:
        raise ValueError(f"three coefficients need at least 3 different lengths, got {sorted(set(tokens))}")
    lengths, taken = np.asarray(tokens, float), np.asarray(seconds, float)
    squares = lengths**2 if pairs is None else np.asarray(pairs, float)
    columns = np.stack([np.ones_like(lengths), lengths, squares], axis=1) / taken[:, None]
    best, least = np.zeros(3), np.inf
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        found = np.zeros(3)
        found[list(used)] = np.linalg.lstsq(columns[:, used], np.ones(len(taken)), rcond=None)[0]
        error = float(np.sum((columns @ found - 1) ** 2))
        if (found >= 0).all() and error < least:
            best, least = found, error
    constant_s, per_token_s, per_pair_s = map(float, best)
    return PassCost(constant_s=constant_s, per_token_s=per_token_s, per_pair_s=per_pair_s)


def write_profile(profile: NodeProfile, path: Path) -> None:
    path.write_bytes(_FILE.dump_json(profile, indent=2) + b"\n")


def read_profile(path: Path, hardware: str | None = None) -> NodeProfile:
    """Reads a profile; `hardware`: what it must have been measured on, if that is known.

    Raises: ConfigError for a file that is none, or a profile of other hardware.
    """
    try:
        profile = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: not a profile of stages ({where}: {first['msg']}); "
            "make one with rose sched profile-stages"
        ) from error
    if hardware is not None and profile.hardware != hardware:
        raise ConfigError(
            f"{path}: the profile is of {profile.hardware} and these nodes are {hardware}; "
            "run rose sched profile-stages there"
        )
    return profile
