"""Which rollout engines hang with memory that serving lacks.

An engine that runs gives the slabs of a cut back within one scheduling pass. One that hangs, or that somebody
has stopped, never does, and requests of the serving engine would wait for these slabs without end.
"""

from rose.memory.ledger.ledger import Ledger
from rose.memory.policy.budget import BudgetPolicy
from rose.types import Role

HUNG_LOOKS = 600
"""The looks in a row, one a second, after which an engine hangs. A healthy engine has given the slabs back
before: it loads a large model whole within minutes, and vLLM's NixlConnector keeps blocks for a peer that
does not read them for 480 s. Looks and not seconds, because a machine that was frozen must not count."""


class HungEngines:
    """Watches one pool."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, int], int]] = {}
        """For each slot that keeps serving waiting: how many slabs it has and is giving back, and at how many
        looks in a row it had as many."""

    def find(self, ledger: Ledger) -> dict[int, int]:
        """Returns the slots of the rollout engines that hang, each with the number of slabs that it has to
        give back. Such an engine has given none at HUNG_LOOKS looks in a row, and serving lacked slabs at all
        of them. Call it about once a second. A slot that it has returned begins anew."""
        due = _due(ledger) if ledger.serving_lacks > ledger.num_free else {}
        seen = {}
        for slot in due:
            has = ledger.num_owned(slot), ledger.num_giving(slot)
            before, num_looks = self._seen.get(slot, (has, 0))
            seen[slot] = has, num_looks + 1 if before == has else 1
        hung = {slot: due[slot] for slot, (_, num_looks) in seen.items() if num_looks >= HUNG_LOOKS}
        self._seen = {slot: each for slot, each in seen.items() if slot not in hung}
        return hung


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
