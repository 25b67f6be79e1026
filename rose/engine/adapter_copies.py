"""An engine's copies of the LoRA adapters that it holds: one folder for each engine, in memory.

Owns the copies' files, which are links where they can be. Promises that a copy does not change when its
source is removed or replaced; a source must not be written in place. Whichever engine or command starts next
removes the folder of an engine that was killed, and never that of a running one: its API server locks it.
"""

import atexit
import fcntl
import os
import shutil
import time
from pathlib import Path

from rose.config import SHARE_FILES, make_private_dir
from rose.errors import ConfigError, FrameError
from rose.messages import AdapterUpdate
from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE
from rose.transfer.format.checkpoint import checkpoint_state_hash

_PREFIX = "adapters-"
_REMOVED_WITHIN_S = 10.0
"""Another process may just be removing a folder of the same name that was left."""


class AdapterCopies:
    """The folder of one engine, until its API server ends."""

    def __init__(self, root: Path, engine_id: str) -> None:
        """root: Settings.staging_root. Raises: ConfigError if another user owns it."""
        make_private_dir(root, "remove it, or let its owner do so")
        remove_left(root)
        self.folder = root / f"{_PREFIX}{engine_id}"
        self._fd = _make_locked(self.folder)
        atexit.register(self.close)

    def take(self, update: AdapterUpdate, name: str) -> Path:
        """Makes a copy, and checks it. Raises: ConfigError, FrameError, OSError."""
        source, folder = Path(update.path), self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        for file in (CONFIG_FILE, TENSORS_FILE):
            if not (source / file).is_file():
                raise ConfigError(
                    f"{source} has no {file}: an adapter is a folder as PEFT saves it, and {SHARE_FILES}"
                )
            try:
                os.link(source / file, folder / file)
            except OSError:  # on another file system
                shutil.copyfile(source / file, folder / file)
        found = str(checkpoint_state_hash(folder / TENSORS_FILE))
        if found != update.state_hash:
            wanted = update.state_hash
            raise FrameError(f"{source}: state hash {found}, expected {wanted}; adapter not loaded")
        return folder

    def close(self) -> None:
        """Removes all copies."""
        if self._fd >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_left(root: Path) -> None:
    """Removes the folders of engines that have ended. root: Settings.staging_root."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            fd = _locked(folder)
        except OSError:  # its engine runs, or it was removed just now
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _make_locked(folder: Path) -> int:
    """Makes a folder and returns the descriptor that keeps it. Raises: ConfigError."""
    until_s = time.monotonic() + _REMOVED_WITHIN_S
    while time.monotonic() < until_s:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = _locked(folder)
        except OSError:
            time.sleep(0.05)
            continue
        if folder.exists() and os.path.samestat(os.fstat(fd), folder.stat()):
            return fd
        os.close(fd)  # removed before it was locked
    raise ConfigError(f"{folder}: another engine has the same engine_id; give each its own")


def _locked(folder: Path) -> int:
    """Locks a folder until its descriptor is closed or the process ends. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
