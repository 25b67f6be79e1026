"""A follower of one adapter's run, with the folders that it writes."""

from pathlib import Path

from rose.transfer.adapters.folders import AdapterFolders
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.relay.opening import open_relay


class Following:
    """Follows when it is asked for the newest version."""

    def __init__(self, relay_url: str, run_id: str, folder: Path) -> None:
        self.relay = open_relay(relay_url)
        self.folders = AdapterFolders(folder, lambda: self.follower.adapter)
        mirror = WeightMirror(store=self.folders)
        self.follower = Follower(self.relay, run_id, mirror, takes_adapter=True)

    def newest(self) -> tuple[str, Path, str]:
        self.follower.advance()
        update = self.folders.update_from(None)
        assert update is not None
        return update.version, Path(update.path), update.state_hash

    def close(self) -> None:
        self.folders.close()
        self.relay.close()
