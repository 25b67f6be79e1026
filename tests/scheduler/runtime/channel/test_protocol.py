"""Both channels, with a scheduler in a thread that can be stopped and replaced."""

import logging
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from lib.cluster.redis_server import RedisServer

from rose.errors import ChannelError, ConfigError
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.embedded import RETRY_S, EmbeddedScheduler
from rose.scheduler.runtime.channel.messages import Answer, Status, decode_call, encode
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import COMMAND, Batch, ClientSide, Outgoing

PATIENCE_S = 300.0
EMBEDDED = "rose.scheduler.runtime.channel.embedded"


def answer(url: ChannelUrl, num_calls: int, *, rows: dict[str, bytes | None]) -> list[int]:
    """A scheduler that answers this many calls with its rows, and ends; the calls' numbers."""
    side = url.serve()
    seen: list[int] = []
    try:
        while len(seen) < num_calls:
            arrived = side.receive(0.1)
            batch = Batch(rows=rows if arrived else {}, events=[b"{}"] if arrived else [])
            for incoming in arrived:
                call = decode_call(incoming.body)
                seen.append(call.seq)
                body = {"keys": sorted({*side.load(), *rows})}
                batch.outgoing.append(
                    Outgoing(client=incoming.client, body=encode(Answer(seq=call.seq, body=body)))
                )
            side.commit(batch, arrived)
    finally:
        side.close()
    return seen


def ask(client: ControlClient) -> Answer:
    reply = client.ask(Status(seq=client.next_seq()), PATIENCE_S)
    assert isinstance(reply, Answer)
    return reply


def test_rows_and_calls_outlive_a_scheduler(channel_url: str) -> None:
    url = ChannelUrl.parse(channel_url)
    first = threading.Thread(target=answer, args=(url, 1), kwargs={"rows": {"a": b"1", "b": b"2"}})
    first.start()
    with ControlClient(url.join("test"), PATIENCE_S) as client:
        assert ask(client).body == {"keys": ["a", "b"]}
        first.join()
        replies: list[Answer] = []
        waiting = threading.Thread(target=lambda: replies.append(ask(client)))
        waiting.start()  # nobody is there to answer it
        second = threading.Thread(target=answer, args=(url, 1), kwargs={"rows": {"a": None, "c": b"3"}})
        second.start()
        waiting.join()
        second.join()
        assert replies[0].body["keys"] == ["a", "b", "c"], "what the second one found, and its own"
    side = url.serve()
    assert side.load() == {"b": b"2", "c": b"3"}
    assert len(side.events(10)) == 2
    side.close()


def test_a_command_without_a_scheduler_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="start one with: rose sched serve"):
        ControlClient(ChannelUrl.parse(f"unix:{tmp_path}").join("test"), 0.0)


@pytest.mark.parametrize("url", ["", "unix:", "tcp://host:1", "/tmp/x"])
def test_a_channel_of_an_unknown_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected unix:FOLDER or redis://"):
        ChannelUrl.parse(url)


def test_nonsense_of_one_client_is_refused(tmp_path: Path) -> None:
    for body in (
        b"",
        b"{}",
        b'{"op": "Status"}',
        b'{"op": "Rm", "seq": 1}',
        b'{"op":"Status","seq":1,"now":2}',
    ):
        with pytest.raises(ChannelError, match="not a call"):
            decode_call(body)


class SlowToResend:
    """A client's end after whose second connection others may send before its reading thread does."""

    def __init__(self, side: ClientSide) -> None:
        self.side = side
        self.num_connections = 0
        self.is_back, self.may_go_on = threading.Event(), threading.Event()

    def connect(self) -> None:
        self.side.connect()
        self.num_connections += 1
        if self.num_connections > 1:
            self.is_back.set()
            self.may_go_on.wait(PATIENCE_S)

    def send(self, body: bytes) -> None:
        self.side.send(body)

    def receive(self) -> bytes:
        return self.side.receive()

    def close(self) -> None:
        self.side.close()


def test_calls_arrive_in_their_order_after_a_lost_connection(tmp_path: Path) -> None:
    url = ChannelUrl.parse(f"unix:{tmp_path / 'ch'}")
    side = url.serve()
    channel = SlowToResend(url.join("test"))
    with ControlClient(channel, PATIENCE_S) as client:
        client.tell(Status(seq=client.next_seq()))
        side.close()
        side = url.serve()
        assert channel.is_back.wait(PATIENCE_S)
        client.tell(Status(seq=client.next_seq()))
        channel.may_go_on.set()
        seen: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while 2 not in seen or 1 not in seen:
            seen += [decode_call(each.body).seq for each in side.receive(0.1)]
            assert time.monotonic() < deadline
        assert seen == [1, 2]
    side.close()


class LateToNotice(SlowToResend):
    """A client's end with two connections, as Redis's: one fails to send a call, and works again at once; the
    other notices it later."""

    def __init__(self, side: ClientSide) -> None:
        super().__init__(side)
        self.num_failures = 0
        self.may_notice = threading.Event()

    def send(self, body: bytes) -> None:
        if not self.num_failures:
            self.num_failures += 1
            raise ConnectionError("broken")
        super().send(body)

    def receive(self) -> bytes:
        if self.num_connections == 1:
            self.may_notice.wait(PATIENCE_S)
            raise ConnectionError("a call could not be sent")
        return super().receive()


def test_a_call_does_not_overtake_one_that_could_not_be_sent(tmp_path: Path) -> None:
    url = ChannelUrl.parse(f"unix:{tmp_path / 'ch'}")
    side = url.serve()
    channel = LateToNotice(url.join("test"))
    channel.may_go_on.set()
    with ControlClient(channel, PATIENCE_S) as client:
        for _ in range(2):
            client.tell(Status(seq=client.next_seq()))
        channel.may_notice.set()
        seen: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while 2 not in seen or 1 not in seen:
            seen += [decode_call(each.body).seq for each in side.receive(0.1)]
            assert time.monotonic() < deadline
        assert seen[0] == 1
    side.close()


def test_what_a_command_has_given_up_is_not_carried_out_later(channel_url: str) -> None:
    url = ChannelUrl.parse(channel_url)
    side = url.serve()  # it hangs: it reads nothing while the command waits
    with ControlClient(url.join("job:a:1:0"), PATIENCE_S) as job:
        job.tell(Status(seq=job.next_seq()))
        command = ControlClient(url.join(f"{COMMAND}here"), PATIENCE_S)
        with pytest.raises(ChannelError, match="status: no answer from the scheduler in"), command:
            command.ask(Status(seq=command.next_seq()), 0.1)
        seen: list[str] = []
        deadline = time.monotonic() + PATIENCE_S
        while not seen or time.monotonic() < deadline - PATIENCE_S + 1:
            seen += [each.client.partition(":")[0] for each in side.receive(0.1)]
            assert time.monotonic() < deadline
        assert seen == ["job"], "a job's call is kept, a command's is not"
    side.close()


def test_a_client_that_is_closed_ends_its_waiting_calls(channel_url: str) -> None:
    url = ChannelUrl.parse(channel_url)
    side = url.serve()
    client = ControlClient(url.join("test"), PATIENCE_S)
    errors: list[ChannelError] = []

    def wait() -> None:
        with pytest.raises(ChannelError) as caught:
            client.ask(Status(seq=client.next_seq()))
        errors.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    deadline = time.monotonic() + PATIENCE_S
    while not side.receive(0.05):
        assert time.monotonic() < deadline
    client.close()
    waiting.join()
    assert "closed" in str(errors[0])
    side.close()


def test_a_commit_on_a_full_disk_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = EmbeddedScheduler(str(tmp_path / "ch"))
    pages = side._database.execute("PRAGMA page_count").fetchone()[0]
    side._database.execute(f"PRAGMA max_page_count = {pages}")  # SQLite says the same as on a full disk
    found: list[dict[str, bytes]] = []

    def wait(seconds: float) -> None:
        found.append(dict(side.load()))
        if len(found) == 3:
            side._database.execute("PRAGMA max_page_count = 1000000")

    monkeypatch.setattr(f"{EMBEDDED}.time.sleep", wait)
    rows: dict[str, bytes | None] = {"a": b"1", "b": bytes(100_000)}
    side.commit(Batch(rows=rows, events=[b"{}"]), [])
    assert found == [{}] * 3, "nothing is kept of a batch that has no room as a whole"
    assert side.load() == rows and len(side.events(10)) == 1
    side.close()


def test_a_commit_that_fails_is_tried_again_and_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of the size of files makes SQLite's own writes fail, as a broken disk does."""
    caplog.set_level(logging.INFO)
    side = EmbeddedScheduler(str(tmp_path / "ch"))
    waits_s: list[float] = []
    monkeypatch.setattr(f"{EMBEDDED}.TELL_S", 0.0)
    rows: dict[str, bytes | None] = {"a": bytes(1 << 20)}
    with broken_disk() as mend:

        def wait(seconds: float) -> None:
            waits_s.append(seconds)
            if len(waits_s) == 3:
                mend()

        monkeypatch.setattr(f"{EMBEDDED}.time.sleep", wait)
        side.commit(Batch(rows=rows, events=[b"{}"]), [])
    assert waits_s == [RETRY_S] * 3 and side.load() == rows and side.events(10) == [b"{}"]
    *errors, last = [record.getMessage() for record in caplog.records]
    assert len(errors) == 3 and "written again after" in last
    for said in (f"{tmp_path / 'ch' / 'state.db'}: not written", "disk I/O error", "check its disk"):
        assert said in errors[0]
    side.close()


def test_a_file_that_fails_for_too_long_ends_the_scheduler_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = EmbeddedScheduler(str(tmp_path / "ch"))
    side.commit(Batch(rows={"a": b"1"}), [])
    monkeypatch.setattr(f"{EMBEDDED}.GIVE_UP_S", 0.3)
    said = r"state\.db: not written for \d+ s: disk I/O error .* and start again"
    with broken_disk(), pytest.raises(ChannelError, match=said):
        side.commit(Batch(rows={"a": bytes(1 << 20)}), [])
    side.close()
    again = EmbeddedScheduler(str(tmp_path / "ch"))
    assert again.load() == {"a": b"1"}, "what was answered is kept"
    again.close()


def test_a_file_that_another_program_has_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = EmbeddedScheduler(str(tmp_path / "ch"))
    side._database.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "ch" / "state.db")
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(f"{EMBEDDED}.time.sleep", lambda seconds: other.rollback())
    side.commit(Batch(rows={"a": b"1"}), [])
    assert side.load() == {"a": b"1"}
    other.close()
    side.close()


def test_a_file_that_has_gone_is_not_made_anew_without_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a disk is no longer mounted, and its folder is there."""
    path, kept = tmp_path / "ch" / "state.db", tmp_path / "kept.db"
    side = EmbeddedScheduler(str(path.parent))
    side.commit(Batch(rows={"a": b"1"}), [])
    monkeypatch.setattr(f"{EMBEDDED}.GIVE_UP_S", 0.3)
    monkeypatch.setattr(f"{EMBEDDED}.time.sleep", lambda seconds: path.exists() and path.rename(kept))
    with broken_disk(), pytest.raises(ChannelError, match="and start again"):
        side.commit(Batch(rows={"b": bytes(1 << 20)}), [])
    assert kept.exists() and not path.exists()
    side.close()


def test_a_damaged_file_is_said_to_be_so(tmp_path: Path) -> None:
    side = EmbeddedScheduler(str(tmp_path / "ch"))
    side._database.execute("DROP TABLE rows")
    side._database.execute("DROP TABLE events")
    with pytest.raises(ChannelError, match=r"state\.db: the jobs can't be read: .* move the file away"):
        side.load()
    with pytest.raises(ChannelError, match=r"state\.db: the events can't be read"):
        side.events(10)
    with pytest.raises(ChannelError, match=r"state\.db: not written .* move the file away"):
        side.commit(Batch(rows={"a": b"1"}), [])
    side.close()


@contextmanager
def broken_disk() -> Iterator[Callable[[], None]]:
    """No file of this process grows beyond 64 KiB until the context ends, or what it yields is called."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_jobs_and_scheduler_wait_for_a_redis_that_has_no_room(redis_server: RedisServer) -> None:
    """It refuses writes at its limit of memory as it does when its append-only file's disk is full."""
    url = ChannelUrl.parse(redis_server.url)
    admin = redis.Redis.from_url(redis_server.url)
    scheduler = threading.Thread(target=answer, args=(url, 2), kwargs={"rows": {"a": b"1"}})
    scheduler.start()
    replies: list[Answer] = []
    with ControlClient(url.join("job:a:1:0"), PATIENCE_S) as client:
        assert ask(client).body == {"keys": ["a"]}
        admin.config_set("maxmemory", 1)
        waiting = threading.Thread(target=lambda: replies.append(ask(client)))
        waiting.start()
        with (
            ControlClient(url.join(f"{COMMAND}here"), PATIENCE_S) as command,
            pytest.raises(ChannelError, match="status: no answer from the scheduler in"),
        ):
            command.ask(Status(seq=command.next_seq()), 0.5)
        waiting.join(1.0)
        assert waiting.is_alive() and scheduler.is_alive() and not replies
        admin.config_set("maxmemory", 0)
        waiting.join(PATIENCE_S)
        scheduler.join(PATIENCE_S)
    assert [reply.body for reply in replies] == [{"keys": ["a"]}]
    admin.close()
