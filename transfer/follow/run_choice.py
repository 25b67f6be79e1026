"""Which run a follower of "auto" follows: the only one whose trainer is alive.

Owns the signs of life of all runs in a relay. A follower leaves its run only when that run's trainer said
that it ended, or was silent for ten minutes, because it never goes back to a run that it left. If no trainer
is alive, the run that was opened last is followed.
"""

import logging

from rose.errors import RelayError
from rose.transfer.format import leases
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import HeadRun, RunSign, unpack_body
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

NAME_IT = "name its run (`--run`, or `run:` in a node's file)"


class RunChoice:
    """The runs of one relay."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._leases = leases.WatchedSigns(leases.RUN_LEASE_S)
        self._gone = leases.WatchedSigns(leases.RUN_GONE_S)
        self._left: set[str] = set()
        self._warned: tuple[bool, list[str]] = (False, [])

    def choose(self, current: str | None, now_s: float) -> str | None:
        """Returns the run to follow; the current one while it is not known which others are alive.

        Raises: RelayError naming the runs when several are alive and none is followed.
        """
        signs = self._signs()
        for each in (self._leases, self._gone):
            each.look({run: sign.beat for run, sign in signs.items()}, now_s)
        ended = {run for run, sign in signs.items() if sign.is_ended}
        others = [
            run
            for run in sorted(signs)
            if run not in ended | self._left | {current} and not self._leases.is_dead(run, now_s)
        ]
        live = [run for run in others if self._leases.is_live(run, now_s)]
        if current is not None and current not in ended and not self._gone.is_dead(current, now_s):
            self._warn(live, current, is_silent=self._leases.is_dead(current, now_s))
            return current
        if len(live) > 1:
            raise RelayError(
                f"{len(live)} runs are live in this relay: {', '.join(live)}; "
                f"an engine without a run follows the only live one; {NAME_IT}"
            )
        if len(others) > 1:
            return current  # some of them may be dead: their signs have to be watched for a while
        chosen = others[0] if others else self._newest(current)
        if current is not None and chosen != current:
            self._left.add(current)
        return chosen

    def _signs(self) -> dict[str, RunSign]:
        bodies = self._relay.get_all(keys.RUN_SIGNS)
        return {
            key.removeprefix(keys.RUN_SIGNS): unpack_body(data, RunSign, key) for key, data in bodies.items()
        }

    def _newest(self, current: str | None) -> str | None:
        data = self._relay.get(keys.HEAD_RUN_KEY)
        newest = unpack_body(data, HeadRun, keys.HEAD_RUN_KEY).run_id if data is not None else None
        return current if newest is None or newest in self._left else newest

    def _warn(self, live: list[str], current: str, *, is_silent: bool) -> None:
        if live and (is_silent, live) != self._warned:
            stays = f"silent, left if it ends or after {leases.RUN_GONE_S:.0f} s" if is_silent else "live"
            logger.log(
                logging.ERROR if is_silent else logging.WARNING,
                "other runs are live in this relay: following=%s (%s) others=%s; %s",
                current,
                stays,
                ", ".join(live),
                NAME_IT,
            )
        self._warned = (is_silent, live)
