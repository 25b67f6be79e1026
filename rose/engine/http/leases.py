"""What each router may have of an engine: turns at a time, and the loan of its GPU to a job.

The engine is the lock between routers, so routers need no common store. Promises that the turns of all
routers together never exceed the cap that they name, even if a router dies or stops, and that a loan changes
hands only when none of its turns is left. Time is an argument. Runs on the API server's event loop.

A router asks with each heartbeat, and its lease of turns is then renewed, shrunk or grown. A lease grows only
by what no other router holds. A smaller lease counts when the router asks again, which shows that it knows
it. A lease that is not renewed lasts until another router needs its turns; running turns still count. While
the GPU is lent to a job, only routers that lend it to that job have turns. A job of higher priority that
needs the GPU gets it when the turns that run there have ended; one of equal or lower priority waits until the
loan's job needs it no longer. The loan ends when none of its routers has asked for a minute, even if no other
router ever asks. The fence grows when a loan begins to change hands, which ends all leases. A turn under an
older fence is refused, and so is every turn until the change is done.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rose.messages import Lease

LASTS_INTERVALS, LASTS_S = 2.0, 1.0
"""A lease lasts for this many intervals between its router's questions, and at least for this many
seconds."""
_FORGET_S = 60.0
_PAUSES_S = (0.002, 0.01, 0.05)
_CLOSED = ""
"""The loan's value while it changes hands; no router may send turns then."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A router's question."""

    router: str
    every_s: float
    """The seconds between its questions."""
    cap: int
    """The turns of all routers together that may run here at a time."""
    wants: int = 0
    """The number of turns that it runs here, plus those that wait."""
    lends: str | None = None
    """The job to which it would lend the GPU; None if it would lend it to no job."""
    priority: int = 0
    """That job's."""
    needs: bool = False
    """Whether turns of that job run here, or wait."""
    gone: str | None = None
    """Another router that this router has found dead."""
    run: str | None = None
    """The run whose weights that job's turns get; None if any will do."""


@dataclass(slots=True)
class _Holder:
    """A router that has asked, or sent turns."""

    ask: Ask | None = None
    until: float = -math.inf
    told: int = 0
    """The turns that it may have by the last answer."""
    turns: int = 0
    """The turns that it may have by the last answer, or by the answer before if that allowed more."""
    in_flight: int = 0
    begun: int = 0


class Leases:
    """All leases of one engine."""

    def __init__(self, first_fence: int = 0) -> None:
        """``first_fence``: larger than all fences of the engine's earlier processes, whose leases are
        void."""
        self._holders: dict[str, _Holder] = {}
        self._lent_to: str | None = None
        self.run: str | None = None
        """The run that the loan names. It stays while the loan changes hands, since turns still run."""
        self._is_closing = self._is_wanted = False
        self._fence = first_fence

    @property
    def in_flight(self) -> int:
        """The running turns of all routers."""
        return sum(holder.in_flight for holder in self._holders.values())

    def asked(self, ask: Ask, now: float) -> Lease:
        """Renews a router's lease and returns it. ``now``: monotonic seconds."""
        self._forget(now)
        holder = self._holders.setdefault(ask.router, _Holder())
        holder.ask, holder.until = ask, now + max(LASTS_S, LASTS_INTERVALS * ask.every_s)
        if ask.gone in self._holders and ask.gone != ask.router:
            self._holders[ask.gone].until = -math.inf
        for other in self._holders.values():
            if other.until <= now:
                other.told = other.turns = min(other.turns, other.in_flight)
        live = {name: each.ask for name, each in self._holders.items() if each.ask and each.until > now}
        self._settle_loan(live.values())
        granted = self._granted(ask, live)
        holder.turns, holder.told = max(holder.told, granted), granted
        return Lease(
            router=ask.router,
            turns=granted,
            others=self.in_flight - holder.in_flight,
            other_users=sum(each.in_flight > 0 for each in self._holders.values() if each is not holder),
            lent_to=_CLOSED if self._is_closing else self._lent_to,
            is_wanted=self._is_wanted,
            fence=self._fence,
            run=self.run,
        )

    def lapse(self, now: float) -> None:
        """Ends a loan whose routers have all been silent for so long that they won't come back. ``now``:
        monotonic seconds."""
        self._forget(now)
        if not any(holder.ask and holder.ask.lends for holder in self._holders.values()):
            self._settle_loan(())

    def _forget(self, now: float) -> None:
        gone = [n for n, each in self._holders.items() if not each.in_flight and each.until < now - _FORGET_S]
        for name in gone:
            del self._holders[name]

    def _granted(self, ask: Ask, live: Mapping[str, Ask]) -> int:
        """Returns the turns that a router may have from now on."""
        users = {name: each for name, each in live.items() if self._lent_to in (None, each.lends)}
        if self._is_closing or ask.router not in users:
            return 0
        cap = min(each.cap for each in live.values())
        begun = {name: self._holders[name].begun for name in users}
        share = _shares(cap, {name: each.wants for name, each in users.items()}, begun)[ask.router]
        return max(0, min(share, cap - self._taken_by_others(ask.router)))

    def _settle_loan(self, live: Iterable[Ask]) -> None:
        """Keeps the loan while a router uses it and no job of higher priority needs the GPU, or while a
        router has it and no other needs the GPU. Otherwise hands it on."""
        claims = [ask for ask in live if ask.lends is not None]
        if not claims and self._lent_to is not None and self.in_flight == 0:
            self._lent_to, self._fence = None, self._fence + 1  # a dedicated GPU, or one without a loan
            self.run = None
        keepers = [ask for ask in claims if ask.lends == self._lent_to]
        rivals = [ask for ask in claims if ask.lends != self._lent_to]
        needing = [ask for ask in rivals if ask.needs]
        self._is_wanted = bool(needing)
        highest = max((ask.priority for ask in needing), default=-math.inf)
        is_used = any(ask.needs and ask.priority >= highest for ask in keepers)
        if is_used or not (needing if keepers else rivals):
            self._is_closing = False
            if len(runs := {ask.run for ask in keepers}) == 1:  # the job may have got another run
                self.run = runs.pop()
            return
        if not self._is_closing:
            self._is_closing, self._fence = True, self._fence + 1
            for holder in self._holders.values():
                holder.told = holder.turns = 0  # nothing begins under the old fence
        if self.in_flight == 0:
            heir = max(needing or rivals, key=lambda ask: ask.priority)  # the first of equal ones
            self._lent_to, self.run = heir.lends, heir.run
            self._is_closing = self._is_wanted = False

    def begin(self, router: str, fence: int) -> str | None:
        """Counts a turn until end() is called for it. Returns why it is refused, or None."""
        holder = self._holders.get(router, _Holder())
        if fence != self._fence:
            return f"the loan of this GPU has changed: fence {fence}, now {self._fence}"
        if self._is_closing:
            return "the loan of this GPU is changing hands"
        most = holder.turns if holder.ask is not None else self._unclaimed(router)
        if holder.in_flight >= most:
            return f"{router} has {holder.in_flight} turns here, and may have {most}"
        holder.in_flight += 1
        holder.begun += 1
        self._holders[router] = holder
        return None

    def _unclaimed(self, router: str) -> float:
        """Returns how many turns a router may have that has not asked for a lease, or not lately."""
        caps = [each.ask.cap for each in self._holders.values() if each.ask is not None]
        return min(caps, default=math.inf) - self._taken_by_others(router)

    def _taken_by_others(self, router: str) -> int:
        others = [each for name, each in self._holders.items() if name != router]
        return sum(max(each.turns, each.in_flight) for each in others)

    def end(self, router: str) -> None:
        """Notes that a turn has ended."""
        self._holders[router].in_flight -= 1


async def begun(leases: Leases, router: str, fence: int) -> str | None:
    """Begins a turn as soon as there is room; returns why it is refused, or None.

    A router may know that a turn has ended before the engine's server has left it, and send the next one.
    """
    for pause_s in _PAUSES_S:
        if leases.begin(router, fence) is None:
            return None
        await asyncio.sleep(pause_s)
    return leases.begin(router, fence)


def _shares(cap: int, wants: Mapping[str, int], begun: Mapping[str, int]) -> dict[str, int]:
    """Divides the cap: first by what each router wants, then the rest equally."""
    fair = max(1, cap // len(wants))
    # Who wants less than a fair part gets it; the remainders of the divisions go to those that had least.
    order = sorted(wants, key=lambda name: (min(wants[name], fair), -begun[name], name))
    shares = dict.fromkeys(wants, 0)
    for limits in (wants, dict.fromkeys(wants, cap)):
        left = cap - sum(shares.values())
        for index, name in enumerate(order):
            part = min(left // (len(order) - index), limits[name] - shares[name])
            shares[name] += part
            left -= part
    return shares
