"""Which rollout engines hang with memory that serving lacks.

An engine that runs gives the slabs of a cut back within one scheduling pass. One that hangs, or that somebody
has stopped, never does, and requests of the serving engine would wait for these slabs without end.
"""

from rose.memory.ledger.ledger import Ledger
from rose.memory.policy.budget import BudgetPolicy
from rose.types import Role

HUNG_S = 120.0
"""How long an engine may keep what it has to give back. Steps take less, and so do most updates; loading
a very large model whole may take longer."""


class HungEngines:
    """Watches one pool. ``now`` is time.monotonic()."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[tuple[int, int], float]] = {}
        """For each slot that has slabs to give back: how many it has and is giving back, and since when
        neither number has changed."""

    def find(self, ledger: Ledger, now: float) -> dict[int, int]:
        """Returns the slots of the rollout engines that hang while serving lacks memory, each with the number
        of slabs that it has to give back. Call it about once a second."""
        due = _due(ledger)
        seen = {slot: (ledger.num_owned(slot), ledger.num_giving(slot)) for slot in due}
        self._since = {
            slot: before if (before := self._since.get(slot)) and before[0] == has else (has, now)
            for slot, has in seen.items()
        }
        if ledger.serving_lacks <= ledger.num_free:
            return {}
        return {slot: due[slot] for slot, (_, since_s) in self._since.items() if now - since_s >= HUNG_S}


def _due(ledger: Ledger) -> dict[int, int]:
    """Returns how many slabs each rollout engine has to give back, or has not given back yet."""
    policy = BudgetPolicy(num_slabs=ledger.num_slabs, headroom_slabs=ledger.headroom_slabs)
    owned = {slot: ledger.num_owned(slot) for slot in ledger.slots_of(Role.ROLLOUT)}
    due = {}
    for slot, its in owned.items():
        share = policy.rollout_share(
            budget=ledger.policy.rollout_budget_slabs,
            num_engines=len(owned),
            others_owned=sum(owned.values()) - its,
        )
        due[slot] = max(0, its - share) + ledger.num_giving(slot)
    return {slot: count for slot, count in due.items() if count}
