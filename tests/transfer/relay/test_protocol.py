"""Every relay keeps the same protocol."""

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from relay_process import SharedRelays, StartRelay
from slow_proxy import SlowProxy

from rose.arguments import run_command
from rose.errors import RelayError, RelayFull
from rose.transfer.relay import calls as relay_calls
from rose.transfer.relay import mooncake
from rose.transfer.relay.change_log import ChangeLog
from rose.transfer.relay.mooncake import INSTALL_LIBRARIES, explain_import_failure, mooncake_available
from rose.transfer.relay.object_store import ObjectStore
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay, remove_run
from rose.transfer.relay.server import main


def test_an_object_comes_back_as_it_went_in(relay: Relay) -> None:
    data = os.urandom(3 << 20)
    relay.put("rose/run/1-0/0", data)
    assert relay.get("rose/run/1-0/0") == data
    assert relay.get("rose/run/1-0/1") is None


def test_put_never_replaces(relay: Relay) -> None:
    relay.put("rose/run/a", b"first")
    with pytest.raises(RelayError, match="immutable"):
        relay.put("rose/run/a", b"second")
    assert relay.get("rose/run/a") == b"first"


def test_upsert_replaces_with_any_length(relay: Relay) -> None:
    for data in (b"one", b"three", b"2"):
        relay.upsert("rose/run/HEAD", data)
        assert relay.get("rose/run/HEAD") == data


def test_keys_are_listed_by_prefix_and_removed_right_after_a_read(relay: Relay) -> None:
    for name in ("rose/a/1", "rose/a/2", "rose/b/1"):
        relay.put(name, b"x")
        assert relay.get(name) == b"x"
    assert relay.keys("rose/a/") == ["rose/a/1", "rose/a/2"]
    relay.remove(["rose/a/1", "rose/a/1-never-there"])
    assert relay.keys("rose/a/") == ["rose/a/2"]
    assert remove_run(relay, "b") == 1
    assert relay.keys("rose/") == ["rose/a/2"]


def test_small_objects_are_read_together_by_prefix(relay: Relay) -> None:
    acks = {f"rose/run/ack/w{number}": os.urandom(50 + number) for number in range(20)}
    for key, data in {**acks, "rose/run/HEAD": b"head", "rose/run2/ack/w": b"other"}.items():
        relay.upsert(key, data)
    assert relay.get_all("rose/run/ack/") == acks
    assert relay.get_all("rose/run3/") == {}


def test_a_relay_tells_which_of_some_keys_it_lacks(relay: Relay) -> None:
    relay.put("rose/run/1-0/0", b"frame")
    relay.put("rose/run/2-1/0", b"frame")
    names = [f"rose/run/1-0/{name}" for name in (0, 1, 10, "MANIFEST")]
    assert relay.lacking(names) == set(names[1:])
    assert relay.lacking(names[:1]) == relay.lacking([]) == set()


def test_several_objects_are_put_and_read_together(relay: Relay) -> None:
    objects = [(f"rose/run/1-0/{number:02}", os.urandom(300_000 + number)) for number in range(20)]
    left = list(objects)
    while left:
        del left[: relay.put_several(left)]
    names = ["rose/run/1-0/none", *(key for key, _ in objects)]
    found: list[bytes | None] = []
    num_calls = 0
    while len(found) < len(names):
        came = relay.get_several(names[len(found) :])
        found += [bytes(data) if data is not None else None for data in came]
        num_calls += 1
    assert found == [None, *(data for _, data in objects)]
    assert num_calls == (1 if relay.batch_bytes > 0 else len(names))
    with pytest.raises(RelayError, match="00 exists already and is immutable"):
        relay.put_several([objects[0], ("rose/run/1-0/new", b"new")])
    assert relay.keys("rose/") == names[1:]


def test_objects_that_are_larger_than_the_clients_memory_together_are_read_one_after_another(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_READ_BYTES", 5 << 20)
    objects = {f"rose/run/1-0/{number}": os.urandom(2 << 20) for number in range(5)}
    for key, data in objects.items():
        relay.put(key, data)
    names = list(objects)
    while names:
        came = relay.get_several(names)
        assert len(came) == (min(2, len(names)) if relay.batch_bytes > 0 else 1)
        assert came == [objects[name] for name in names[: len(came)]]
        del names[: len(came)]


def test_of_several_objects_those_are_put_for_which_a_relay_has_room(relay: Relay) -> None:
    objects = [(f"rose/run/{number}", os.urandom(20 << 20)) for number in range(5)]
    left = list(objects)
    with pytest.raises(RelayFull):
        while True:
            del left[: relay.put_several(left)]
    assert 0 < len(left) < 5
    assert relay.keys("rose/") == [key for key, _ in objects[: 5 - len(left)]]


def test_what_is_behind_the_first_object_without_room_is_not_put(relay: Relay) -> None:
    objects = [
        (f"rose/run/{number}", os.urandom(size)) for number, size in enumerate((40 << 20, 40 << 20, 1))
    ]
    assert relay.put_several(objects) == 1
    assert relay.keys("rose/") == ["rose/run/0"]
    with pytest.raises(RelayFull):
        relay.put_several(objects[1:])
    relay.put(*objects[2])


def test_a_relay_names_the_copies_that_it_handed_an_object_to(relay: Relay, start_relay: StartRelay) -> None:
    nobody, peer = "embedded://127.0.0.1:1", start_relay("embedded")
    taken = set()
    for number, is_replacing in enumerate((False, True, True)):
        data = str(number).encode()
        taken = set(
            relay.put_with_copies(
                "rose/run/HEAD", data, is_replacing=is_replacing, copy_to=[nobody, peer.url]
            )
        )
        assert relay.get("rose/run/HEAD") == data and nobody not in taken
    other = open_relay(peer.url)
    assert other.get("rose/run/HEAD") == (b"2" if peer.url in taken else None)
    with pytest.raises(RelayError, match="immutable"):
        relay.put_with_copies("rose/run/HEAD", b"3", is_replacing=False, copy_to=[])
    other.close()


def test_repairing_a_relay_without_copies_changes_nothing(relay: Relay) -> None:
    relay.put("rose/run/1-0/0", b"frame")
    relay.repair("rose/run/", [], [])
    assert relay.keys("rose/") == ["rose/run/1-0/0"]


def test_a_full_relay_refuses_and_keeps_what_it_has(relay: Relay) -> None:
    chunk = os.urandom(20 << 20)
    relay.put("rose/run/0", chunk)
    with pytest.raises(RelayError, match=r"free of|full"):
        for number in range(1, 5):
            relay.put(f"rose/run/{number}", chunk)
    assert relay.get("rose/run/0") == chunk
    relay.remove(["rose/run/1"])
    relay.put("rose/run/9", chunk)


def test_opening_a_relay_where_nobody_listens_is_a_relay_error() -> None:
    for url in ("embedded://127.0.0.1:1", "mooncake://127.0.0.1:1"):
        with pytest.raises(RelayError):
            open_relay(url)


@pytest.mark.parametrize("url", ["redis://a:1", "embedded://a", "embedded://a:x", "mooncake://a:1/x"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="relay URL"):
        open_relay(url)


def test_an_embedded_relay_with_a_key_refuses_calls_without_it(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_KEY", "secret")
    url = start_relay("embedded").url
    with pytest.raises(RelayError, match="ROSE_KEY"):
        open_relay(url)
    with pytest.raises(RelayError, match="ROSE_KEY"):
        open_relay(url, "wrong")
    relay = open_relay(url, "secret")
    relay.put("a", b"1")
    assert relay.get("a") == b"1"
    relay.close()


@pytest.mark.parametrize("kind", ["embedded", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def test_a_port_in_use_is_one_clear_line_and_status_2(kind: str, shared_relays: SharedRelays) -> None:
    port = shared_relays(kind).port
    command = [sys.executable, "-m", "rose.transfer.relay.server", "--kind", kind, "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert port in done.stderr.splitlines()[-1] and "choose another port" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "flag", "value", "message"),
    [
        ("embedded", "--beside", "mooncake://127.0.0.1:1", "for --kind mooncake"),
        ("mooncake", "--beside", "embedded://127.0.0.1:1", "mooncake://HOST:PORT"),
        ("mooncake", "--beside", "nonsense", "nonsense"),
        ("embedded", "--port", "99999", "'99999' is not a whole number from 0 to 65535"),
        ("embedded", "--port", "-1", "'-1' is not a whole number from 0 to 65535"),
        ("mooncake", "--port", "65535", "choose a lower one"),
        ("embedded", "--capacity-bytes", "-1", "'-1' is not a whole number of at least 1"),
        ("embedded", "--capacity-bytes", "8G", "'8G' is not a whole number of at least 1"),
        ("embedded", "--capacity-bytes", str(1 << 60), "bytes of memory are free here"),
        ("mooncake", "--capacity-bytes", str(1 << 60), "bytes of memory are free here"),
    ],
)
def test_a_bad_option_is_one_clear_line_and_status_2(
    kind: str, flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--kind", kind, flag, value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_host_that_is_no_address_of_this_machine_is_one_clear_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for host in ("203.0.113.1", "no such host"):
        assert run_command("relay", main, ["--host", host, "--insecure"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert host in line


@pytest.mark.mooncake
def test_a_killed_mooncake_relay_takes_its_master_along(start_relay: StartRelay) -> None:
    relay = start_relay("mooncake")
    (master,) = psutil.Process(relay.process.pid).children()
    assert "mooncake_master" in master.name()
    relay.kill()
    assert psutil.wait_procs([master], timeout=300)[0] == [master]


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    stderr = "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory"
    assert explain_import_failure(stderr, 1) == f"system library libibverbs.so.1 missing: {INSTALL_LIBRARIES}"
    assert explain_import_failure("", -6) == "import mooncake.store failed: ended with status -6"


@pytest.mark.mooncake
def test_mooncake_is_available_where_it_is_installed() -> None:
    assert mooncake_available() == (True, "Mooncake Store loads")


def test_a_relay_counts_and_lists_what_it_holds() -> None:
    store = ObjectStore(100)
    for key in ("a", "rose/run/1-0/0", "rose/run/1-0/1", "rose/run/HEAD", "rose/run2/HEAD"):
        store.write(key, b"12345", replace=False)
    store.write("rose/run/HEAD", b"1", replace=True)
    store.remove("rose/run/1-0/0")
    store.remove("rose/run/1-0/0")
    store.check_integrity()
    assert store.names("rose/run") == ["rose/run/1-0/1", "rose/run/HEAD", "rose/run2/HEAD"]
    assert store.names("rose/run/1-0/") == ["rose/run/1-0/1"] and store.names("a") == ["a"]
    for key in store.names(""):
        store.remove(key)
    store.check_integrity()
    assert store.used_bytes == 0


def test_whoever_looks_after_each_wait_misses_nothing(relay_url: str, relay: Relay) -> None:
    waiter, count = open_relay(relay_url), 20

    def read_all() -> int:
        found, seen = 0, None
        while found < count:
            found = len(waiter.keys("rose/run/1-0/"))
            if found < count:
                seen = waiter.wait(["rose/run/1-0/", "rose/run/HEAD"], seen, 60.0).seen
        return found

    with ThreadPoolExecutor(1) as executor:
        reader = executor.submit(read_all)
        for number in range(count):
            relay.put(f"rose/run/1-0/{number}", b"frame")
            relay.upsert("rose/run/ack/worker", b"ack")
        assert reader.result() == count
    waiter.close()


def test_a_wait_ends_only_for_its_own_keys_since_its_own_look() -> None:
    async def go() -> None:
        log = ChangeLog()
        start = log.position
        log.note("rose/run/1-0/0")
        # These return at once: a key was written since, or that is unknown.
        assert await log.wait(["rose/run/1-0/"], start, 1e9) == (log.position, ["rose/run/1-0/0"])
        for seen in (ChangeLog().position, "", "nonsense", log.position + "0"):
            assert await log.wait(["rose/run/1-0/"], seen, 1e9) == (log.position, None)
        # None of these keys was written since, so only the time limit ends the wait.
        for prefixes, seen in ((["rose/run/2"], start), (["rose/run/1-0/"], log.position), ([], start)):
            assert await log.wait(prefixes, seen, 0.0) == (log.position, [])
        waits = [asyncio.create_task(log.wait(["a", "b"], log.position, 1e9)) for _ in range(2)]
        await asyncio.sleep(0)
        log.note("c")
        await asyncio.sleep(0)
        assert not any(task.done() for task in waits)
        log.note("b")
        assert await asyncio.gather(*waits) == [(log.position, ["b"])] * 2
        # There were more writes than the log remembers.
        before = log.position
        for _ in range(5000):
            log.note("other")
        assert await log.wait(["a"], before, 1e9) == (log.position, None)
        last = asyncio.create_task(log.wait(["a"], log.position, 1e9))
        await asyncio.sleep(0)
        log.close()
        assert await last == (log.position, [])

    asyncio.run(go())


@pytest.mark.slow
def test_a_slow_link_is_not_taken_for_a_hung_relay(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each call takes longer than the silence that counts as hung, and that is longer than a machine stalls.
    monkeypatch.setattr(relay_calls, "SILENCE_S", 4.0)
    proxy = SlowProxy(embedded_url, pause_s=0.021)
    try:
        relay = open_relay(proxy.url)
        data = os.urandom(26 << 20)
        relay.put("rose/run/1-0/0", data)
        assert relay.get("rose/run/1-0/0") == data
        relay.close()
    finally:
        proxy.close()
