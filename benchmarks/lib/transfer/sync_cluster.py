"""The processes on both ends of a slow link, and one weight sync through all of them.

For bench_sync.py and bench_modelsync.py.
Owns: relays, trainer ranks and followers, each a process in its cluster's namespace. Promises: every sync
ends with all followers at the trainer's state hash, or the benchmark fails; all processes end with the
context, or with this one.
"""

import ctypes
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lib.transfer.slow_link import SERVING, TRAINER, LinkBytes, SlowLink
from rose.errors import RoseError
from rose.transfer.format.layout import BUCKET_BYTES
from rose.transfer.model_sync import receiver_name

WORKER = Path(__file__).with_name("sync_worker.py")
RELAY_BYTES = 6 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who takes part in a run, and how."""

    codec: str | None
    """One for every bucket; None: the product chooses."""
    trainer_ranks: int
    followers: int
    """Each holds all of the model."""
    is_pipelined: bool
    """Whether followers follow while the trainer publishes, or start when all of it is in the relay."""
    relays: int = 1
    """Each rank talks to its peer among them, and holds the others in reserve."""
    relay_side: str = SERVING
    relay_kind: str = "embedded"
    """Or mooncake: stores, of which each copies frames from the first."""
    bucket_bytes: int = BUCKET_BYTES
    is_acknowledged: bool = False
    """Whether the trainer waits until all followers have said that they hold a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """One version's way from publish() to the last follower that holds it."""

    taken_s: float
    encoded_bytes: int
    """Frames and manifest: one copy."""
    link_bytes: LinkBytes
    num_changed: int
    encode_s: float
    """The seconds of the trainer rank that took longest."""
    cores_busy: float


class Process:
    """A sync_worker or a relay; ended by the cluster."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
            preexec_fn=_die_with_parent,
        )

    def tell(self, do: str, **request: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Raises: RoseError when the process ended instead; what went wrong is on stderr."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RoseError(f"{' '.join(self._argv)} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.tell(do, **request)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class SyncCluster:
    """A context in which runs are opened one after another."""

    def __init__(self, num_layers: int, seed: int) -> None:
        self.num_layers = num_layers
        self._seed = seed
        self._stack = ExitStack()
        self._processes: dict[tuple[str, str], list[Process]] = {}
        self._relay_urls: dict[tuple[str, str], list[str]] = {}
        self._run_ids = (f"run{number}" for number in itertools.count())

    def __enter__(self) -> "SyncCluster":
        self.link = self._stack.enter_context(SlowLink())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, setup: Setup) -> "SyncRun":
        """A run at version 0 in all followers; the link has no limit meanwhile."""
        self.link.unlimit()
        trainers = self._workers("trainer", TRAINER, setup.trainer_ranks)
        followers = self._workers("follower", SERVING, setup.followers)
        common = {
            "relays": self._relays(setup),
            "run": next(self._run_ids),
            "num_layers": self.num_layers,
        }
        run = SyncRun(self.link, setup, trainers, followers, common)
        names = [receiver_name(rank) for rank in range(setup.followers if setup.is_acknowledged else 0)]
        options = {"codec": setup.codec, "gbps": 1.0, "bucket_bytes": setup.bucket_bytes, "receivers": names}
        for rank, trainer in enumerate(trainers):
            trainer.tell(
                "open", rank=rank, num_ranks=setup.trainer_ranks, seed=self._seed, **options, **common
            )
        for rank, follower in enumerate(followers):
            follower.tell("open", rank=rank, num_ranks=setup.followers, **common)
        for trainer in trainers:
            trainer.answer()
        for follower in followers:
            follower.answer()
        return run

    def join(self, run: "SyncRun") -> None:
        """One follower starts now, takes the newest version, hashes all its bits anew, and leaves."""
        follower = self._start(SERVING, [sys.executable, str(WORKER), "follower"])
        follower.ask("open", rank=0, num_ranks=1, **run.opened)
        follower.ask("close")
        follower.end()

    def stream(self, num_bytes: int) -> tuple[float, LinkBytes]:
        """(seconds, bytes over the link) of as many plain bytes over one TCP connection, under a limit."""
        (trainer,), (follower,) = (
            self._workers("trainer", TRAINER, 1),
            self._workers("follower", SERVING, 1),
        )
        host = self.link.address(SERVING)
        port = follower.ask("listen", host=host)["port"]
        before = self.link.count()
        follower.tell("sink")
        taken_s = trainer.ask("stream", host=host, port=port, num_bytes=num_bytes)["taken_s"]
        if follower.answer()["num_bytes"] != num_bytes:
            raise RoseError("a plain stream lost bytes")
        return taken_s, self.link.count() - before

    def _workers(self, role: str, side: str, count: int) -> list[Process]:
        processes = self._processes.setdefault((role, side), [])
        while len(processes) < count:
            processes.append(self._start(side, [sys.executable, str(WORKER), role]))
        return processes[:count]

    def _relays(self, setup: Setup) -> list[str]:
        side, kind = setup.relay_side, setup.relay_kind
        argv = [sys.executable, "-m", "rose.transfer.relay.server", "--host", self.link.address(side)]
        argv += ["--kind", kind, "--capacity-bytes", str(RELAY_BYTES), "--insecure"]
        urls = self._relay_urls.setdefault((side, kind), [])
        while len(urls) < setup.relays:
            beside = ["--beside", urls[0]] if kind == "mooncake" and urls else []
            process = self._start(side, [*argv, *beside])
            urls.append(process.answer()["url"])
        return urls[: setup.relays]

    def _start(self, side: str, argv: Sequence[str]) -> Process:
        process = Process(self.link.command(side, argv))
        self._stack.callback(process.end)
        return process


class SyncRun:
    """One run's trainer ranks and followers, at the same version."""

    def __init__(
        self,
        link: SlowLink,
        setup: Setup,
        trainers: list[Process],
        followers: list[Process],
        opened: dict[str, Any],
    ) -> None:
        self.opened = opened
        """What every follower is told of the run."""
        self._link = link
        self._setup = setup
        self._trainers = trainers
        self._followers = followers
        self._version = 0

    def sync(self) -> Sync:
        """One optimizer step, then its way over the link, which is limited. Raises: RoseError."""
        for trainer in self._trainers:
            trainer.tell("step")
        for trainer in self._trainers:
            trainer.answer()
        self._version += 1
        before, busy_before_s, at_s = self._link.count(), _busy_s(), time.monotonic()
        if self._setup.is_pipelined:
            self._tell_followers()
        for trainer in self._trainers:
            trainer.tell("publish")
        published = [trainer.answer() for trainer in self._trainers]
        if not self._setup.is_pipelined:
            self._tell_followers()
        held = [follower.answer() for follower in self._followers]
        cores_busy = (_busy_s() - busy_before_s) / (time.monotonic() - at_s)
        hashes = {each["state_hash"] for each in (*published, *held)}
        if len(hashes) != 1:
            raise RoseError(f"version {self._version} has state hashes {', '.join(sorted(hashes))}")
        return Sync(
            taken_s=max(each["held_s"] for each in held) - min(each["started_s"] for each in published),
            encoded_bytes=sum(each["wire_bytes"] for each in published),
            link_bytes=self._link.count() - before,
            num_changed=sum(each["num_changed"] for each in published),
            encode_s=max(each["encode_s"] for each in published),
            cores_busy=cores_busy,
        )

    def copy_s(self) -> float:
        """Returns the seconds in which all trainer ranks, at the same time, copy their weights once."""
        for trainer in self._trainers:
            trainer.tell("copy")
        copied = [trainer.answer() for trainer in self._trainers]
        ended_s = max(float(each["ended_s"]) for each in copied)
        return ended_s - min(float(each["started_s"]) for each in copied)

    def close(self) -> None:
        """Ends the run; every follower's bits are hashed anew."""
        self._link.unlimit()
        for process in (*self._followers, *self._trainers):
            process.ask("close")

    def _tell_followers(self) -> None:
        for follower in self._followers:
            follower.tell("reach", version=self._version)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _busy_s() -> float:
    """CPU seconds of the whole machine."""
    times = psutil.cpu_times()
    idle_s: float = times.idle + times.iowait + times.guest + times.guest_nice
    return float(sum(times)) - idle_s
