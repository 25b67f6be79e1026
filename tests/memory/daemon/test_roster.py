"""Who may attach to a pool, and when a slot is vacated."""

import os

import pytest

from rose.errors import PoolError
from rose.memory.daemon.roster import AttachRefused, Roster
from rose.memory.ledger.ledger import EngineSlot
from rose.memory.pool.wire import ClientHello, Kind, Refusal, Welcome, read_answer
from rose.types import MAX_ENGINES, Role


def hello(
    role: Role = Role.ROLLOUT,
    engine_id: str = "r0",
    kind: Kind = Kind.WORKER,
    rank: int = 0,
    world_size: int = 1,
) -> ClientHello:
    return ClientHello(
        role=role, engine_id=engine_id, kind=kind, rank=rank, world_size=world_size, pid=os.getpid()
    )


def shown(roster: Roster, slot: int) -> EngineSlot:
    engine = roster.engine(slot)
    assert engine is not None
    return engine


def test_all_parts_of_an_engine_share_a_slot() -> None:
    roster = Roster("p")
    slot = roster.admit(1, hello(rank=0, world_size=2), pid=11)
    assert roster.engine(slot) == EngineSlot(role=Role.ROLLOUT, pid=0, world_size=2)
    assert roster.admit(2, hello(rank=1, world_size=2), pid=12) == slot
    assert roster.admit(3, hello(kind=Kind.SCHEDULER, world_size=2), pid=13) == slot
    assert shown(roster, slot).pid == 13
    assert roster.admit(4, hello(Role.SERVING, "s0"), pid=14) != slot
    roster.check_integrity()


def test_slot_is_vacated_with_the_last_process() -> None:
    roster = Roster("p")
    slot = roster.admit(1, hello(), pid=11)
    roster.admit(2, hello(kind=Kind.SCHEDULER), pid=12)
    roster.lose(2)
    assert roster.bury(1) is None
    with pytest.raises(AttachRefused, match="is leaving") as refusal:
        roster.admit(3, hello(engine_id="r1"), pid=13)
    assert refusal.value.is_transient
    assert roster.bury(2) == slot
    assert roster.admit(3, hello(engine_id="r1"), pid=13) == slot
    roster.check_integrity()


def test_whoever_comes_back_is_present_again() -> None:
    roster = Roster("p")
    slot = roster.admit(1, hello(rank=0, world_size=2), pid=11)
    roster.admit(2, hello(rank=1, world_size=2), pid=12)
    back = hello(rank=0, world_size=2).model_copy(update={"slot": slot})
    assert roster.lose(1) == slot
    assert shown(roster, slot).is_leaving
    assert roster.find(back, 11) == 1
    roster.replace(1, 3)
    assert not shown(roster, slot).is_leaving
    assert roster.find(back, 11) == 3
    roster.bury(3)
    roster.lose(2)
    roster.replace(2, 4)
    assert shown(roster, slot).is_leaving and roster.broken_slots() == [slot]
    roster.check_integrity()


@pytest.mark.parametrize(
    "change", [{"rank": 1}, {"kind": Kind.SCHEDULER}, {"engine_id": "r1"}, {"slot": 2}, {"world_size": 1}]
)
def test_nobody_comes_back_as_somebody_else(change: dict[str, object]) -> None:
    roster = Roster("p")
    slot = roster.admit(1, hello(rank=0, world_size=2), pid=11)
    back = hello(rank=0, world_size=2).model_copy(update={"slot": slot})
    with pytest.raises(AttachRefused, match="with pid 12"):
        roster.find(back, 12)
    with pytest.raises(AttachRefused, match="the pool is a new one; restart the engine") as refusal:
        roster.find(back.model_copy(update=change), 11)
    assert not refusal.value.is_transient


def test_a_restored_roster_equals_the_one_that_was_saved() -> None:
    roster = Roster("p")
    for connection, one in enumerate((hello(world_size=2), hello(rank=1, world_size=2), hello(Role.SERVING))):
        roster.admit(connection, one, pid=10 + connection)
    heir = Roster("p")
    for connection, one in roster.members():
        heir.restore(connection, one, one.pid, is_broken=False)
    assert list(heir.members()) == list(roster.members())
    for connection, one in roster.members():
        assert shown(heir, one.slot).is_leaving
        heir.replace(connection, connection + 10)
    assert [heir.engine(slot) for slot in (1, 2)] == [roster.engine(slot) for slot in (1, 2)]
    heir.check_integrity()


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (hello(), "already has its worker of rank 0"),
        (hello(world_size=2, rank=1), "world size 1, got 2"),
        (hello(rank=1), "rank 1 of 1 workers"),
    ],
)
def test_conflicts_are_refused_for_good(second: ClientHello, reason: str) -> None:
    roster = Roster("p")
    roster.admit(1, hello(), pid=11)
    with pytest.raises(AttachRefused, match=reason) as refusal:
        roster.admit(2, second, pid=12)
    assert not refusal.value.is_transient
    roster.check_integrity()


def test_as_many_engines_of_a_role_are_admitted_as_a_gpus_board_has_places_for() -> None:
    roster = Roster("p")
    slots = {
        roster.admit(index, hello(Role.SERVING, f"s{index}"), pid=index)
        for index in range(MAX_ENGINES[Role.SERVING])
    }
    assert len(slots) == MAX_ENGINES[Role.SERVING]
    with pytest.raises(AttachRefused, match=r"has 4 serving engines, the most that can share a GPU.*'s3'"):
        roster.admit(9, hello(Role.SERVING, "s9"), pid=9)
    assert roster.admit(9, hello(), pid=9) not in slots
    roster.check_integrity()


def test_answers_survive_the_wire() -> None:
    welcome = Welcome(slot=1, num_fds=3, daemon_pid=9)
    refusal = Refusal(refused="no", is_transient=True)
    assert read_answer(welcome.to_line()) == welcome
    assert read_answer(refusal.to_line()) == refusal
    for line in (b"", b"7\n", b"{}\n", b'{"slot": "x"}\n'):
        with pytest.raises(PoolError):
            read_answer(line)
