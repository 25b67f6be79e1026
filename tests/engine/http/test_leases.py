"""What several routers may have of one engine."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.engine.http.leases import Ask, Leases
from rose.messages import Lease

CAP = 16


def asked(leases: Leases, router: str, now: float, wants: int = 0, **more: Any) -> Lease:
    return leases.asked(Ask(router, 0.5, CAP, wants=wants, **more), now)


def begin(leases: Leases, router: str, count: int, fence: int = 0) -> int:
    """Returns how many of `count` turns began."""
    return sum(leases.begin(router, fence) is None for _ in range(count))


def test_a_router_alone_has_the_whole_cap() -> None:
    leases = Leases()
    assert asked(leases, "a", 0.0).turns == CAP
    assert begin(leases, "a", 20) == CAP
    assert asked(leases, "a", 0.5, wants=20).turns == CAP


def test_a_second_router_gets_what_the_first_gives_back_and_both_get_half_when_both_want_all() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=40)
    begin(leases, "a", CAP)
    assert asked(leases, "b", 0.1, wants=40).turns == 0
    assert asked(leases, "a", 0.5, wants=40).turns == 8
    assert asked(leases, "b", 0.6, wants=40).turns == 0, "what runs counts on"
    for _ in range(8):
        leases.end("a")
    assert asked(leases, "b", 0.7, wants=40).turns == 0, "a may not have heard of its smaller lease"
    assert asked(leases, "a", 0.8, wants=40).turns == 8
    assert asked(leases, "b", 1.1, wants=40).turns == 8
    assert begin(leases, "a", 1) == 0
    assert begin(leases, "b", 20) == 8


def test_a_loan_ends_a_minute_after_the_last_word_of_its_router_though_no_other_asks() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, lends="math", run="run-math", needs=True)
    assert begin(leases, "a", 1, asked(leases, "a", 0.5, lends="math", run="run-math").fence) == 1

    def run_at(now: float) -> str | None:
        leases.lapse(now)
        return leases.run

    assert run_at(59.0) == "run-math", "a router that starts again finds its loan"
    assert run_at(63.0) == "run-math", "a turn of the job still runs"
    leases.end("a")
    assert run_at(63.5) is None
    assert asked(leases, "b", 64.0, lends="code", run="run-code").run == "run-code"


def test_what_one_router_does_not_want_the_other_has() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=40)
    asked(leases, "b", 0.1, wants=2)
    assert asked(leases, "a", 0.5, wants=40).turns == 14
    asked(leases, "a", 0.55, wants=40)  # it knows of it
    assert asked(leases, "b", 0.6, wants=2).turns == 2


def test_a_silent_router_keeps_its_turns_until_another_needs_them() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=CAP)
    begin(leases, "a", 4)
    assert begin(leases, "a", 1) == 1, "nobody else asks, however late it is"
    assert asked(leases, "b", 100.0, wants=40).turns == CAP - 5
    assert begin(leases, "a", 1) == 0
    assert leases.begin("a", 0) == "a has 5 turns here, and may have 5"


def test_the_leases_of_a_router_that_a_peer_found_dead_are_free_at_once() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=CAP)
    assert asked(leases, "b", 0.1, wants=CAP).turns == 0
    assert asked(leases, "b", 0.2, wants=CAP, gone="a").turns == CAP


def test_the_leases_of_an_engine_before_its_restart_are_void() -> None:
    before, after = Leases(first_fence=1000), Leases(first_fence=2000)
    old = asked(before, "a", 0.0, lends="math", needs=True)
    asked(after, "b", 0.0, lends="code", needs=True)
    assert after.begin("a", old.fence) == "the loan of this GPU has changed: fence 1001, now 2001"


def test_a_router_that_has_not_asked_gets_no_turn_that_others_may_have() -> None:
    leases = Leases()
    assert begin(leases, "a", 3) == 3
    assert asked(leases, "b", 0.0, wants=40).turns == CAP - 3
    assert begin(leases, "a", 1) == 0


@pytest.mark.parametrize("seed", range(20))
def test_turns_never_exceed_the_cap_whatever_dies(seed: int) -> None:
    by_chance, leases, now = random.Random(seed), Leases(), 0.0
    running: dict[str, int] = {}
    asked(leases, "r0-0", now)
    for step in range(5000):
        now += by_chance.random() * 0.2
        name = f"r{by_chance.randrange(3)}-{step // 1500}"  # from time to time all routers are new ones
        match by_chance.randrange(6):
            case 0 | 1:
                asked(leases, name, now, wants=by_chance.choice([0, 3, 40]))
            case 2 | 3:
                running[name] = running.get(name, 0) + begin(leases, name, by_chance.randrange(8))
            case 4:
                for _ in range(by_chance.randrange(running.get(name, 0) + 1)):
                    leases.end(name)
                    running[name] -= 1
            case 5 if by_chance.random() < 0.05:  # it dies, and its connections break
                for _ in range(running.pop(name, 0)):
                    leases.end(name)
        assert leases.in_flight == sum(running.values()) <= CAP


# The loan of the GPU --------------------------------------------------------------------------------------


def test_a_loan_is_one_jobs_and_changes_hands_when_none_of_its_turns_is_left() -> None:
    leases = Leases()
    first = asked(leases, "a", 0.0, lends="math", needs=True)
    assert (first.lent_to, first.fence) == ("math", 1)
    begin(leases, "a", 1, fence=1)
    refused = asked(leases, "b", 0.1, lends="code", needs=True)
    assert (refused.lent_to, refused.fence, refused.others, refused.other_users) == ("math", 1, 1, 1)
    assert asked(leases, "a", 0.5, lends="math", needs=False).is_wanted
    closing = asked(leases, "b", 0.6, lends="code", needs=True)
    assert (closing.lent_to, closing.fence) == ("", 2)
    assert leases.begin("a", 1) == "the loan of this GPU has changed: fence 1, now 2"
    leases.end("a")
    handed = asked(leases, "b", 0.7, lends="code", needs=True)
    assert (handed.lent_to, handed.fence) == ("code", 2)
    assert asked(leases, "a", 0.8, lends="math", needs=False).lent_to == "code"


def test_a_job_of_higher_priority_gets_a_used_loan_when_none_of_its_turns_is_left() -> None:
    leases = Leases()
    low: dict[str, Any] = {"wants": 8, "lends": "low", "needs": True}
    high: dict[str, Any] = {"wants": 8, "lends": "high", "needs": True, "priority": 1}
    fence = asked(leases, "a", 0.0, **low).fence
    begin(leases, "a", 1, fence)
    assert asked(leases, "b", 0.1, **{**high, "priority": 0}).lent_to == "low", "the loan is used"
    closing = asked(leases, "b", 0.2, **high)
    assert (closing.lent_to, closing.turns, closing.fence) == ("", 0, fence + 1)
    assert asked(leases, "a", 0.3, **low).lent_to == "", "more waiting turns don't keep it"
    assert begin(leases, "a", 1, fence) == begin(leases, "a", 1, fence + 1) == 0
    leases.end("a")
    assert asked(leases, "a", 0.4, **low).lent_to == "high"
    assert asked(leases, "b", 0.5, **high).turns == CAP
    assert asked(leases, "a", 0.6, **low).lent_to == "high", "a job of lower priority waits"
    asked(leases, "b", 0.7, **{**high, "needs": False})
    assert asked(leases, "a", 0.8, **low).lent_to == "low"


def test_of_the_jobs_that_need_a_loan_the_one_of_the_highest_priority_gets_it() -> None:
    leases = Leases()
    begin(leases, "a", 1, asked(leases, "a", 0.0, lends="first", needs=True).fence)
    asked(leases, "b", 0.1, lends="low", needs=True, priority=1)
    asked(leases, "c", 0.2, lends="high", needs=True, priority=2)
    leases.end("a")
    assert asked(leases, "a", 0.3, lends="first").lent_to == "high"


def test_turns_that_were_sent_before_a_smaller_lease_arrived_are_taken() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=40)
    asked(leases, "b", 0.1, wants=40)
    assert asked(leases, "a", 0.5, wants=40).turns == 8
    assert begin(leases, "a", 20) == CAP, "the answer may still be on its way"
    assert asked(leases, "b", 0.6, wants=40).turns == 0


def test_no_turn_begins_while_a_loan_changes_hands_whatever_its_fence() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=8, lends="math", needs=True)
    begin(leases, "a", 1, fence=1)
    assert asked(leases, "b", 0.1, wants=8, lends="code", needs=True).turns == 0, "the GPU is lent to math"
    closing = asked(leases, "a", 0.5, lends="math", needs=False)
    assert (closing.lent_to, closing.fence, closing.turns) == ("", 2, 0)
    assert leases.begin("a", 2) == "the loan of this GPU is changing hands"
    leases.end("a")
    handed = asked(leases, "b", 0.6, wants=8, lends="code", needs=True)
    assert (handed.lent_to, handed.turns) == ("code", CAP), "a's lease ended with the loan"
    assert begin(leases, "a", 1, fence=2) == 0


@pytest.mark.parametrize("seed", range(20))
def test_turns_of_two_jobs_never_run_together_whatever_routers_ask(seed: int) -> None:
    by_chance, leases, now = random.Random(seed), Leases(), 0.0
    lease: dict[str, Lease] = {}
    placed: list[tuple[str, str, int]] = []
    running: list[tuple[str, str]] = []
    for _ in range(5000):
        now += by_chance.random() * 0.2
        name, job = by_chance.choice("ab"), by_chance.choice(["math", "code"])
        match by_chance.randrange(4):
            case 0:
                claim = {"lends": job, "needs": by_chance.random() < 0.5, "priority": int(job == "code")}
                lease[name] = asked(leases, name, now, wants=8, **claim)
            case 1 if name in lease and lease[name].lent_to:
                placed.append((name, lease[name].lent_to or "", lease[name].fence))
            case 2 if placed:  # sent late, when the loan may have changed twice
                router, its_job, fence = placed.pop(by_chance.randrange(len(placed)))
                if leases.begin(router, fence) is None:
                    running.append((router, its_job))
            case 3 if running:
                leases.end(running.pop(by_chance.randrange(len(running)))[0])
        assert len({its_job for _, its_job in running}) <= 1
        assert len(running) <= CAP


def test_the_loan_of_a_dead_router_is_handed_on() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, lends="math", needs=True)
    assert asked(leases, "b", 0.9, lends="code", needs=True).lent_to == "math"
    assert asked(leases, "b", 1.1, lends="code", needs=True).lent_to == "code"


def test_two_routers_that_lend_to_the_same_job_share_the_loan() -> None:
    leases = Leases()
    asked(leases, "a", 0.0, wants=8, lends="math", needs=True)
    both = asked(leases, "b", 0.1, wants=8, lends="math", needs=True)
    assert (both.lent_to, both.fence) == ("math", 1)
    for now in (0.5, 0.55):  # the second question shows that it knows of its smaller lease
        asked(leases, "a", now, wants=8, lends="math", needs=True)
    assert asked(leases, "b", 0.6, wants=8, lends="math", needs=True).turns == 8


def test_a_loan_ends_with_the_routers_that_lend() -> None:
    leases = Leases()
    asked(leases, "old", 0.0, wants=8, lends="math", needs=True)
    begin(leases, "old", 1, fence=1)
    assert asked(leases, "new", 0.5, wants=8, gone="old").turns == 0, "a turn of math runs still"
    leases.end("old")
    freed = asked(leases, "new", 0.6, wants=8)
    assert (freed.lent_to, freed.fence, freed.turns) == (None, 2, CAP)
    assert asked(leases, "new", 0.7, wants=8).fence == 2


# The routes -----------------------------------------------------------------------------------------------


@pytest.fixture
def http(runtime_dir: Path) -> Iterator[Any]:
    """An API server under ROSE that answers each turn with the turns in flight."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    from rose.engine.http.control import ServedEngine
    from rose.engine.http.endpoint import RoseEndpoint
    from rose.engine.settings import EngineSettings
    from rose.engine.status import StatusPage, page_path
    from rose.types import Role

    app = FastAPI()

    @app.post("/v1/completions")
    async def completions() -> Any:
        return {"in_flight": app.state.rose.leases.in_flight}

    page = StatusPage(page_path(runtime_dir, "e"), create=True)
    engine: Any = object()
    app.state.rose = ServedEngine(engine, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
    RoseEndpoint().attach_router(app)
    with TestClient(app) as client:
        yield client
    page.close()


def test_a_router_gets_its_lease_with_the_status_and_only_turns_under_it_are_counted(http: Any) -> None:
    assert http.get("/rose/v1/status", params={"follower": "a"}).json()["lease"] is None
    question: dict[str, Any] = {
        "follower": "a",
        "every_s": 0.5,
        "cap": 1,
        "wants": 1,
        "lends": "math",
        "needs": 1,
    }
    lease = http.get("/rose/v1/status", params=question).json()["lease"]
    fence = lease.pop("fence")
    assert lease == {
        "router": "a",
        "turns": 1,
        "others": 0,
        "other_users": 0,
        "lent_to": "math",
        "is_wanted": False,
        "run": None,
    }
    counted = http.post("/v1/completions", json={}, headers={"X-Rose-Lease": f"a {fence}"})
    assert (counted.status_code, counted.json()) == (200, {"in_flight": 1})
    assert http.post("/v1/completions", json={}).json() == {"in_flight": 0}
    stale = http.post("/v1/completions", json={}, headers={"X-Rose-Lease": f"a {fence - 1}"})
    assert stale.status_code == 503
    assert f"fence {fence - 1}, now {fence}" in stale.json()["error"]["message"]
    wrong = http.post("/v1/completions", json={}, headers={"X-Rose-Lease": "nonsense"})
    assert (wrong.status_code, "ROUTER FENCE" in wrong.json()["error"]["message"]) == (400, True)
    assert http.get("/rose/v1/status", params={**question, "cap": 0}).status_code == 422


def test_leases_ask_for_the_key_like_every_route_of_the_engine(
    http: Any, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    from rose.engine.http.endpoint import RoseEndpoint

    monkeypatch.setenv("ROSE_KEY", "secret")
    app = FastAPI()
    RoseEndpoint().attach_router(app)
    app.state.rose = http.app.state.rose
    with TestClient(app) as client:
        question: dict[str, Any] = {"follower": "a", "cap": 16}
        assert client.get("/rose/v1/status", params=question).status_code == 401
        allowed = client.get("/rose/v1/status", params=question, headers={"Authorization": "Bearer secret"})
        assert allowed.json()["lease"]["turns"] == 16


def test_a_loan_names_its_jobs_run_until_no_turn_of_it_is_left() -> None:
    leases = Leases()
    first = asked(leases, "a", 0.0, lends="math", needs=True, run="math-1")
    assert (first.lent_to, first.run) == ("math", "math-1")
    assert begin(leases, "a", 1, first.fence) == 1
    asked(leases, "b", 0.1, lends="code", needs=True, run="code-1")
    assert asked(leases, "a", 0.2, lends="math", run="math-1").lent_to == ""
    assert leases.run == "math-1", "a turn still runs under these weights"
    leases.end("a")
    handed = asked(leases, "b", 0.3, lends="code", needs=True, run="code-1")
    assert (handed.lent_to, handed.run) == ("code", "code-1")
    assert asked(leases, "b", 0.4, lends="code", needs=True, run="code-2").run == "code-2"
    assert asked(leases, "b", 2.0).run is None, "no router lends it any more"
