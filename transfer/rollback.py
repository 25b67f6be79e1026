"""Going back to an earlier version of a run, without the trainer's own checkpoint of it.

Owns reading one version from the relay. The relay keeps the versions since the last snapshot but one, or
since the last one that all workers have passed. Version numbers only grow: the old weights are published as a
new version, whose delta engines take like any other. Never touches an optimizer's state.
"""

import re

from rose.errors import RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.publisher import SyncReport, WeightPublisher


def roll_back(publisher: WeightPublisher, number: int) -> SyncReport:
    """Writes the weights of version `number` into the trainer's tensors, in place, and publishes them as the
    run's next version.

    Trainer weights that are wider than the published ones get the published values. For a trainer of one
    rank. Raises: ValueError for more; RelayError if the relay does not have the version any more, and
    FrameError if what it has is damaged: nothing has changed then; what publish() raises.
    """
    if publisher.num_ranks > 1:
        raise ValueError(
            f"run {publisher.run_id} has {publisher.num_ranks} trainer ranks, and roll_back() takes one: "
            "load the trainer's own checkpoint in all of them, and publish()"
        )
    publisher.load(_read_version(publisher, number))
    return publisher.publish()


def _read_version(publisher: WeightPublisher, number: int) -> WeightPlanes:
    """Returns the weights of one version, checked by its state hash."""
    relay, run_id = publisher.relay, publisher.run_id
    found = relay.keys(keys.run_prefix(run_id))
    pattern = re.compile(rf"{re.escape(keys.run_prefix(run_id))}(\d+)-(none|\d+)/MANIFEST")
    versions = [match.groups() for key in found if (match := pattern.fullmatch(key)) is not None]
    snapshots = [int(version) for version, base in versions if base == "none"]
    start = max((each for each in snapshots if each <= number), default=None)
    newest = max((int(version) for version, _ in versions), default=-1)
    if start is None or number > newest:
        has = f"the relay has {min(snapshots)} to {newest}" if snapshots else "the relay has none of it"
        raise RelayError(f"no version {number} of run {run_id}: {has}; choose one of these")
    mirror = WeightMirror()
    follower = Follower(
        relay, run_id, mirror, public_key=publisher.public_key, takes_adapter=publisher.is_adapter
    )
    follower.load_version(start, number)
    assert mirror.planes is not None
    return mirror.planes
