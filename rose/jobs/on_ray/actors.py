"""The actors of a job on Ray: one keeps a node's devices for its group, one runs an attempt's part of a node.

A group's jobs share the devices of its nodes, which Ray gives to one actor alone: the keeper, which takes the
whole bundle. The parts of the jobs' attempts are beside it in the bundle, and take nothing.
"""

import io
import os
import sys
import zipfile
from pathlib import Path

import msgspec
import ray

from rose.config import Settings, forget_variables, parse_config, search_path
from rose.jobs.on_ray.leftovers import VARIABLE, end_leftovers, identity
from rose.jobs.ranks import Ended, HostPart, LocalAttempt, argv_of, remove, start_here, write_job_file
from rose.ports import free_port
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.spec import RunSpec

MAX_OUTPUT_BYTES = 1 << 20


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray node of a bundle, and its devices there."""

    ray_node: str
    address: str
    devices: tuple[str, ...]


class Keeper:
    """Holds the resources of a bundle as long as its group uses them."""

    def where(self) -> Where:
        context = ray.get_runtime_context()
        return Where(
            ray_node=context.get_node_id(),
            address=str(ray.util.get_node_ip_address()),
            devices=tuple(context.get_accelerator_ids().get("GPU", ())),
        )


class Owner:
    """Holds the name by which one scheduler owns a Ray cluster."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        return self._who


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is ready to start its processes."""

    identity: str
    """Of the actor, for `end_leftovers`."""
    free_port: int


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """What a part has to tell."""

    ended: Ended | None
    output: bytes
    """What its processes have written since the last poll."""


def folders(root: str, name: str = "") -> tuple[Path, Path]:
    """Returns this host's folders of a job's files and of its host memory; without a name, of all jobs."""
    settings = Settings.from_environment()
    files = settings.make_runtime_dir() / "ray-jobs" / root / name
    return files, settings.staging_root / "jobs" / root / name


def sweep(dead: tuple[str, ...], root: str, name: str = "") -> list[int]:
    """Ends what dead actors have left here, then frees the folders. Returns the pids that still run."""
    if not (left := end_leftovers(dead)):
        remove(*folders(root, name))
    return left


class Part:
    """The processes of one attempt on one node. They end with this actor."""

    def __init__(self, name: str, node: str, root: str) -> None:
        """name: the job's. node: its node, such as rollout-0. root: names the scheduler's channel."""
        folder, self._cache = folders(root, name)
        self._folder = folder / node
        self._log = self._folder / "output.log"
        self._offset = 0
        self._attempt: LocalAttempt | None = None

    def prepare(self, code: bytes | None) -> Prepared:
        """Ends what earlier attempts have left on this host, and unpacks the job's code."""
        if left := end_leftovers():
            raise RuntimeError(f"processes {left} of an earlier attempt do not end")
        # What an earlier attempt left may be ahead of the last completed iteration: this one starts cold.
        remove(self._cache, self._folder)
        self._folder.mkdir(mode=0o700, parents=True)
        if code is not None:
            with zipfile.ZipFile(io.BytesIO(code)) as archive:
                archive.extractall(self._folder / "code")
        return Prepared(identity=identity(os.getpid()), free_port=free_port())

    def start(self, order: Start, part: HostPart, channel: str) -> None:
        """Starts the processes. Raises: ConfigError."""
        spec = parse_config(order.spec, RunSpec, f"job {order.job}")
        if spec.runtime_env.get("working_dir") is not None:
            sent = self._folder / "code"
            spec = spec.model_copy(update={"folder": str(sent if sent.exists() else Path.cwd())})
        file = write_job_file(
            self._folder / "job.json", spec, order, channel=channel, cache=self._cache, nodes=part.nodes
        )
        # Ray's own Python may be that of a `pip` environment; `python` in the command is the same.
        path = search_path(Path(sys.executable).parent)
        forget_variables("RAY_")  # a program that starts a Ray of its own must not find this one
        variables = {"PATH": path, VARIABLE: identity(os.getpid())}
        self._attempt = start_here(spec, argv_of(spec), part, file, self._log, variables)

    def poll(self) -> Polled:
        """How the processes have ended, if they have, and what they have written since."""
        ended = self._attempt.ended() if self._attempt is not None else None
        output = b""
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(self._offset)
                output = log.read(MAX_OUTPUT_BYTES)
            self._offset += len(output)
        is_all = len(output) < MAX_OUTPUT_BYTES
        return Polled(ended=ended if is_all else None, output=output)

    def end(self, grace_s: float) -> None:
        """Tells the processes to end."""
        if self._attempt is not None:
            self._attempt.end(grace_s)

    def kill(self) -> None:
        """Returns when none of the processes runs any more, and their host memory and files are gone."""
        if self._attempt is not None:
            self._attempt.kill()
        remove(self._cache, self._folder)
