"""The other routers before the same workers.

Owns: the exchange with peers, and the record of which peers live.
Promises: whatever an admin sets at one router reaches the others within a heartbeat of their connection, even
if it was set while they could not reach each other. Workers are told of a peer that has died, so that this
router may use its leases at once. A router goes on working without its peers.
Never does: decide between routers over turns or loans (rose/engine/http/leases.py); no token waits for this.
"""

import asyncio
import contextlib
import logging
import time

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from rose.scheduler.rollout.http.shared.changes import AdminChanges
from rose.scheduler.rollout.http.shared.entries import Entry
from rose.scheduler.rollout.placing.borrowing import Borrower
from rose.scheduler.rollout.placing.views import Wants
from rose.scheduler.rollout.turn.dataplane import DataPlane

logger = logging.getLogger(__name__)

_PATH = "/admin/peers"
_GONE_AFTER_INTERVALS = 4.0


class Borrowing(BaseModel):
    """A job that has work at a router, as a borrower of serving GPUs."""

    job: str
    """The job's name."""
    weight: float = Field(ge=1e-3, le=1e3)
    """Its weight, relative to other jobs."""
    max_serving_gpus: int | None = None
    """The most serving GPUs that it may borrow. None: no limit."""
    wants: list[tuple[str | None, str | None]] | None = None
    """The models and runs of its turns; None if any will do."""

    @classmethod
    def of(cls, each: Borrower) -> "Borrowing":
        wants = (
            sorted([(w.model, w.run_id) for w in each.wants], key=repr) if each.wants is not None else None
        )
        return cls(job=each.job, weight=each.weight, max_serving_gpus=each.max_serving_gpus, wants=wants)

    def borrower(self) -> Borrower:
        wants = frozenset(Wants(*each) for each in self.wants) if self.wants is not None else None
        return Borrower(job=self.job, weight=self.weight, max_serving_gpus=self.max_serving_gpus, wants=wants)


class Exchange(BaseModel):
    """What two routers tell each other: the body of POST /admin/peers, and the answer."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The router that speaks."""
    every_s: float = Field(gt=0)
    """The interval of its heartbeats."""
    digest: str
    """A hash that is equal at two routers if all their entries are."""
    entries: dict[str, Entry] = {}
    """All entries if the other router's digest differs; otherwise none."""
    borrowers: list[Borrowing] = []
    """The jobs that have work at this router."""


class _Peer:
    """A router that was heard of."""

    def __init__(self, said: Exchange, now: float) -> None:
        self.until = now + _GONE_AFTER_INTERVALS * said.every_s
        self.borrowers = [each.borrower() for each in said.borrowers]


class Peers:
    """All peers of one router. Runs on its event loop."""

    def __init__(self, plane: DataPlane, changes: AdminChanges) -> None:
        self._plane = plane
        self._changes = changes
        changes.noted = self._wake
        self._peers: dict[str, _Peer] = {}
        self._is_due: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for url in self._plane.config.peers:
            is_due = asyncio.Event()
            self._is_due.append(is_due)
            self._tasks.append(asyncio.create_task(self._follow(url, is_due), name=f"peer-{url}"))
        self._tasks.append(asyncio.create_task(self._look(), name="peers"))
        self._tasks.append(asyncio.create_task(self._keep(), name="newest-weights"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def names(self) -> list[str]:
        """The names of the peers that live."""
        return sorted(self._peers)

    def _wake(self) -> None:
        for is_due in self._is_due:
            is_due.set()

    async def _look(self) -> None:
        """Notes peers that fell silent."""
        while True:
            await asyncio.sleep(self._plane.config.heartbeat_s)
            now = time.monotonic()
            if silent := [name for name, peer in self._peers.items() if peer.until < now]:
                logger.warning("peers are silent names=%s", silent)
                self._peers = {name: peer for name, peer in self._peers.items() if name not in silent}
                self._share()

    async def _keep(self) -> None:
        """Keeps what the workers have reported. The disk may take longer than a heartbeat."""
        while True:
            await asyncio.sleep(self._plane.config.heartbeat_s)
            try:
                await self._changes.keep_newest()
            except OSError as error:
                logger.error("state not kept error=%s", error)

    async def _follow(self, url: str, is_due: asyncio.Event) -> None:
        """Talks to one peer with every heartbeat, and at once when an admin has set something."""
        name, theirs, problem, is_again = "", "", "", False
        while True:
            is_due.clear()
            try:
                said = await self._tell(url, theirs)
                if name != said.name:
                    logger.info("peer url=%s name=%s", url, said.name)
                name, theirs, problem = said.name, said.digest, ""
                is_again = theirs != self._changes.entries.digest and not is_again
                if is_again:
                    continue  # the peer lacks entries that this router has
            except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
                is_unreached = isinstance(error, aiohttp.ClientConnectorError)
                is_closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                is_again = is_closed and not is_unreached and not is_again
                if is_again:
                    continue  # the peer closed an old connection, and may still listen
                if is_refused(error) and name in self._peers:
                    self._died(name)
                if not problem:
                    problem = f"{type(error).__name__}: {error}"
                    logger.warning("no answer from peer url=%s error=%s", url, problem)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._plane.config.heartbeat_s):
                    await is_due.wait()

    async def _tell(self, url: str, theirs: str) -> Exchange:
        """Sends one exchange and returns the answer. Raises: ValueError if the answer is malformed."""
        config = self._plane.config
        own = self._own(theirs)
        headers = {"Authorization": f"Bearer {config.admin_key}"} if config.admin_key is not None else {}
        headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=config.lost_after_s)
        async with self._plane.http.post(
            url + _PATH, data=own.model_dump_json(), headers=headers, timeout=timeout
        ) as response:
            data = await response.read()
        if response.status != 200:
            raise ValueError(f"{response.status} {data[:200].decode(errors='replace')}")
        said = Exchange.model_validate_json(data)
        await self._take(said)
        return said

    def _own(self, theirs: str) -> Exchange:
        entries, config = self._changes.entries, self._plane.config
        return Exchange(
            name=self._plane.registry.name,
            every_s=config.heartbeat_s,
            digest=entries.digest,
            entries=entries.all() if theirs != entries.digest else {},
            borrowers=[Borrowing.of(each) for each in self._plane.jobs.own_borrowers()],
        )

    async def _take(self, said: Exchange) -> None:
        if said.name == self._plane.registry.name:
            raise ValueError("this is the router itself; name the other ones")
        if said.name not in self._peers:
            self._plane.registry.router_lives(said.name)
        self._peers[said.name] = _Peer(said, time.monotonic())
        self._share()
        await self._changes.take(said.entries)

    async def told(self, said: Exchange) -> Exchange:
        """Takes in what a peer says; returns what this router says. Raises: OSError; ValueError."""
        await self._take(said)
        return self._own(said.digest)

    def _died(self, name: str) -> None:
        logger.warning("peer died name=%s", name)
        del self._peers[name]
        self._share()
        self._plane.registry.router_gone(name)

    def _share(self) -> None:
        others = [each for peer in self._peers.values() for each in peer.borrowers]
        self._plane.jobs.share(1 + len(self._peers), others)


def is_refused(error: Exception) -> bool:
    """Returns whether no process listens at the address. An unknown name or host, or a lack of file
    descriptors here, tells nothing about the peer."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )
