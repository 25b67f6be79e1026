"""The mirror of a host's engines: its bits in a file that they map, and what each version changed.

Owns a folder, preferably in memory. It has the file of the planes (shared_planes.py), from which an engine
loads the weights whole, and a changes file for each of the last versions (changes.py), from which it takes
only what changed. No weight is written twice. If an engine can use no changes file, the update says why.
"""

import fcntl
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rose.messages import WeightUpdate
from rose.transfer.follow.mirror import Note
from rose.transfer.format.changes import ChangesWriter
from rose.transfer.format.codec import Elements
from rose.transfer.format.layout import Bucket, Layout
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.shared_planes import SharedPlanes
from rose.transfer.format.state_hash import StateHash
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

MOST_CHANGED = 0.1
"""The share of changed elements above which engines load everything: as fast, with less memory."""
KEPT_SHARE = 0.1
"""Earlier changes are kept for engines that are behind, up to this share of the weights' bytes. The mirror
waits for engines that would need more."""


SPARE_SHARE = 0.05
"""The most memory of a changes file that is kept for the next one, as a share of the weights' bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """From one version to the next; path: None where engines have to load everything, for `reason`."""

    base: str
    version: str
    path: Path | None
    num_bytes: int
    reason: str | None


class SharedMirror:
    """The store of a mirror, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Raises: ValueError where another process keeps its mirror in the folder, OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._spare = folder / "changes-spare"
        """A changes file that no engine needs, if there is one. To give its pages back and get others takes
        two thirds of the time in which the next one is written."""
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ValueError(
                f"{folder} holds another subscriber's weights; give each its own (--staging)"
            ) from error
        self._remove("weights*", "changes-*")  # those of a process that was killed
        self._planes: SharedPlanes | None = None
        self._coming: SharedPlanes | None = None
        self._version: str | None = None
        self._state_hash = ""
        self._steps: deque[_Step] = deque()
        self._writer: ChangesWriter | None = None
        """Writes the changes file of the coming version; None if there is none, or a problem with it."""
        self._problem: str | None = None
        self._is_followed = False
        """Whether an engine runs or takes a version from which the kept changes lead on."""

    def make_planes(self, layout: Layout) -> SharedPlanes:
        """Returns new planes; those in use stay until these hold a version. Raises: OSError."""
        self.drop_coming()
        self._coming = SharedPlanes(self._folder / "weights.partial", layout)
        return self._coming

    @property
    def has_coming(self) -> bool:
        """Whether planes of a snapshot that is being fetched have their memory."""
        return self._coming is not None

    def drop_coming(self) -> None:
        """Gives back the memory of a snapshot that was not fetched to its end."""
        if self._coming is not None:
            self._coming.remove()
            self._coming = None

    @contextmanager
    def changing(self, planes: WeightPlanes, counts: Sequence[tuple[Bucket, int]]) -> Iterator[Note | None]:
        assert isinstance(planes, SharedPlanes) and planes is self._planes
        with planes.changing():
            self._problem = self._begin_changes(planes, counts)
            try:
                yield self._note if self._writer is not None else None
            finally:
                if self._writer is not None:  # the bits are those of the version before
                    self._writer.discard()
                    self._writer = None

    def has_room(self) -> bool:
        """Returns whether one more version leaves engines the changes that they need, if they use any."""
        is_whole = not self._is_followed or any(step.reason is not None for step in self._steps)
        return is_whole or not self._is_too_much(self._steps)

    def arrived(self, planes: WeightPlanes, version: WeightVersion, state_hash: StateHash) -> None:
        assert isinstance(planes, SharedPlanes)
        if planes is self._planes:
            self.drop_coming()
            self._steps.append(self._step(str(version), str(state_hash)))
            planes.settle(str(version), str(state_hash))
        else:
            with planes.changing():
                planes.settle(str(version), str(state_hash))
            self._take(planes)
        self._version, self._state_hash = str(version), str(state_hash)

    def update_from(self, base: str | None) -> WeightUpdate | None:
        """Returns what brings an engine from version `base` to the mirror's; None while that is empty."""
        if self._planes is None or self._version is None:
            return None
        steps, reason = self._steps_from(base)
        return WeightUpdate(
            version=self._version,
            path=str(self._planes.path),
            state_hash=self._state_hash,
            changes=[str(step.path) for step in steps],
            whole_because=reason,
        )

    def forget(self, in_use: Collection[str]) -> None:
        """Removes the changes that no engine needs. in_use: the versions that engines run or are taking."""
        if self._planes is None:
            return
        bases = [number for number, step in enumerate(self._steps) if step.base in in_use]
        self._is_followed = bool(bases) or self._version in in_use
        needed = len(self._steps) - min(bases) if bases else 0
        while len(self._steps) > needed or self._is_too_much(list(self._steps)[:-1]):
            step = self._steps.popleft()
            if step.path is not None:
                self._put_aside(step.path, step.num_bytes)

    def _put_aside(self, path: Path, num_bytes: int) -> None:
        """Keeps the memory of a small changes file for the next one."""
        assert self._planes is not None
        if num_bytes <= SPARE_SHARE * self._planes.layout.num_bytes:
            path.replace(self._spare)
        else:
            path.unlink()

    def close(self) -> None:
        """Removes all files."""
        for planes in (self._planes, self._coming):
            if planes is not None:
                planes.remove()
        self._remove("weights*", "changes-*")
        os.close(self._lock)

    def _is_too_much(self, steps: Iterable[_Step]) -> bool:
        assert self._planes is not None
        return sum(step.num_bytes for step in steps) > KEPT_SHARE * self._planes.layout.num_bytes

    def _take(self, planes: SharedPlanes) -> None:
        """Puts new planes in the place of those in use, from which no changes lead to them."""
        planes.rename(self._folder / "weights.safetensors")
        if self._planes is not None:
            self._planes.close()
        self._planes, self._coming = planes, None
        self._is_followed = False
        self._steps.clear()
        self._remove("changes-*")

    def _begin_changes(self, planes: SharedPlanes, counts: Sequence[tuple[Bucket, int]]) -> str | None:
        """Opens the next changes file; returns why there is to be none, or None."""
        num_changed, num_elements = sum(count for _, count in counts), planes.layout.num_elements
        if num_changed > MOST_CHANGED * num_elements:
            return f"{num_changed} of {num_elements} elements change"
        try:
            path = self._folder / "changes-partial"
            with suppress(FileNotFoundError):
                self._spare.replace(path)
            self._writer = ChangesWriter(path, planes.layout, self._state_hash, counts)
        except OSError as error:
            return f"changes can't be kept: {error}"
        return None

    def _note(self, bucket: Bucket, elements: Elements) -> None:
        """Writes what changed. A failure is a reason and no error, as an engine can load everything."""
        if self._writer is None:
            return
        try:
            self._writer.put(bucket, elements)
        except OSError as error:
            self._writer.discard()
            self._problem, self._writer = f"changes can't be kept: {error}", None

    def _step(self, version: str, state_hash: str) -> _Step:
        """Ends the changes file of the version that the planes hold now."""
        assert self._version is not None
        path, num_bytes, writer = self._folder / f"changes-{version.replace('/', '-')}", 0, self._writer
        try:
            if writer is not None:
                num_bytes = writer.finish(state_hash, path)
        except OSError as error:
            self._problem = f"changes can't be kept: {error}"
        self._writer = None
        if self._problem is None:
            return _Step(base=self._version, version=version, path=path, num_bytes=num_bytes, reason=None)
        reason = f"from {self._version} to {version}, {self._problem}"
        logger.info("engines load all weights: %s", reason)
        return _Step(base=self._version, version=version, path=None, num_bytes=0, reason=reason)

    def _steps_from(self, base: str | None) -> tuple[list[_Step], str | None]:
        """Returns the steps from that version to the newest, or none and why."""
        if base is None:
            return [], "this is the first delivery to this engine"
        bases = [step.base for step in self._steps]
        if base not in bases:
            return [], f"the changes since {base} are not kept"
        steps = list(self._steps)[bases.index(base) :]
        reason = next((step.reason for step in steps if step.reason is not None), None)
        return ([], reason) if reason is not None else (steps, None)

    def _remove(self, *patterns: str) -> None:
        for pattern in patterns:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
