"""The subscriber: one process beside each rollout engine that keeps its weights up to date.

`python -m rose.transfer.follow.subscriber --relay URL --run RUN|auto --worker http://host:port --staging DIR
 [--base CHECKPOINT_DIR] [--name NAME]`

Owns the mirror, the staged checkpoint files, the calls to its worker, and the worker's acknowledgement in the
relay. Fetching and decoding happen outside the engine, which only loads a complete, verified file. After any
failure the worker keeps its old version, and the subscriber tries again with growing pauses. Never keeps more
than two staged files: the one in use and the next.
"""

import argparse
import logging
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from rose.arguments import CommandParser
from rose.config import Settings
from rose.errors import RelayError, RoseError, WorkerError
from rose.http import http_client
from rose.transfer.follow.follower import AUTO_RUN, Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.checkpoint import write_checkpoint
from rose.transfer.format.leases import ACK_EVERY_S
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.format.shard_plan import read_plan
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 2.0
FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WORKER_TIMEOUT_S = 600.0
"""A worker answers only when it runs the weights: it may first finish a step and load gigabytes."""


class WeightUpdate(BaseModel):
    """The body of POST /rose/v1/weights."""

    version: str
    path: str
    state_hash: str


class WeightUpdateAnswer(BaseModel):
    """The worker's answer once the weights are in use."""

    version: str
    state_hash: str


class WorkerWeights(BaseModel):
    """The part of GET /rose/v1/status that this process reads."""

    weight_version: str | None


class Worker:
    """The worker that this subscriber feeds, over HTTP."""

    def __init__(self, url: str, key: str | None) -> None:
        self._http = http_client(url, key=key, timeout=httpx.Timeout(WORKER_TIMEOUT_S, connect=5.0))

    def load(self, update: WeightUpdate) -> None:
        """Returns when the worker runs the update. Raises: WorkerError."""
        try:
            response = self._http.post("/rose/v1/weights", json=update.model_dump())
            response.raise_for_status()
            answer = WeightUpdateAnswer.model_validate_json(response.content)
        except httpx.HTTPStatusError as error:
            status, text = error.response.status_code, error.response.text[:500]
            raise WorkerError(f"worker refused weights {update.version}: {status} {text}") from error
        except (httpx.HTTPError, ValidationError) as error:
            raise WorkerError(f"worker did not take weights {update.version}: {error!r}") from error
        if (answer.version, answer.state_hash) != (update.version, update.state_hash):
            raise WorkerError(f"worker answered {answer} to {update}")

    def weight_version(self) -> str | None:
        """Returns the version that the worker says it runs. Raises: WorkerError."""
        try:
            response = self._http.get("/rose/v1/status")
            response.raise_for_status()
            return WorkerWeights.model_validate_json(response.content).weight_version
        except (httpx.HTTPError, ValidationError) as error:
            raise WorkerError(f"worker has no status: {error!r}") from error

    def close(self) -> None:
        self._http.close()


class Subscriber:
    """Follows the relay and delivers to the worker, in one thread."""

    def __init__(self, relay: Relay, follower: Follower, worker: Worker, staging: Path, name: str) -> None:
        self._relay = relay
        self._follower = follower
        self._worker = worker
        self._staging = staging
        self._name = name
        self._staged: WeightUpdate | None = None
        self._delivered: WeightUpdate | None = None
        self._acknowledged: WeightUpdate | None = None
        self._num_acks = 0
        self._renew_at_s = 0.0
        self._status_at_s = 0.0
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S

    def step(self, now_s: float) -> bool:
        """Looks once; returns True when the worker moved to a new version. A failure is logged and delays the
        next look.
        """
        if now_s < self._retry_at_s:
            return False
        try:
            self._follower.advance()
            self._check_worker(now_s)
            moved = self._deliver()
            self._acknowledge(now_s)
        except (RoseError, OSError) as error:
            logger.warning("weights not delivered, next try in %.1f s: %s", self._retry_s, error)
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            return False
        self._retry_s = FIRST_RETRY_S
        return moved

    def wait(self, now_s: float) -> None:
        """Returns when step() may have something to do."""
        if now_s < self._retry_at_s:
            time.sleep(self._retry_at_s - now_s)
            return
        try:
            self._follower.wait(STATUS_EVERY_S)
        except RelayError as error:
            logger.warning("can't wait for weights, next look in %.1f s: %s", FIRST_RETRY_S, error)
            time.sleep(FIRST_RETRY_S)

    def close(self) -> None:
        """Removes the staged files."""
        for path in self._staging.glob("weights-*.safetensors"):
            path.unlink(missing_ok=True)

    def _check_worker(self, now_s: float) -> None:
        """Notices that a worker was restarted and lost its weights: they are delivered again."""
        if self._delivered is None or now_s < self._status_at_s:
            return
        self._status_at_s = now_s + STATUS_EVERY_S
        version = self._worker.weight_version()
        if version != self._delivered.version:
            logger.warning("worker runs %s instead of %s: delivering again", version, self._delivered.version)
            self._delivered = None

    def _deliver(self) -> bool:
        """Stages and delivers what the mirror holds, unless the worker has it already."""
        mirror = self._follower.mirror
        if mirror.version is None or mirror.planes is None:
            return False
        version, state_hash = mirror.version, str(mirror.state_hash)
        path = self._staging / f"weights-{version.run_id}-{version.number}.safetensors"
        update = WeightUpdate(version=str(version), path=str(path), state_hash=state_hash)
        if update == self._delivered:
            return False
        if update != self._staged:
            self._staged = None
            self._remove_staged_except(self._delivered)
            mirror.take_back_ahead()
            write_checkpoint(path, mirror.planes, {"version": update.version, "state_hash": state_hash})
            self._staged = update
        self._worker.load(update)
        self._delivered = update
        self._remove_staged_except(update)
        logger.info("worker moved: version=%s", version)
        return True

    def _acknowledge(self, now_s: float) -> None:
        """Says which version the worker runs, and again now and then, or the trainer takes it for gone."""
        update = self._delivered
        if update is None or (update == self._acknowledged and now_s < self._renew_at_s):
            return
        self._num_acks += 1
        run_id, _, number = update.version.rpartition("/")
        ack = Ack(worker=self._name, version=int(number), state_hash=update.state_hash, beat=self._num_acks)
        self._relay.upsert(keys.ack_prefix(run_id) + self._name, pack_body(ack))
        self._acknowledged = update
        self._renew_at_s = now_s + ACK_EVERY_S

    def _remove_staged_except(self, update: WeightUpdate | None) -> None:
        for path in self._staging.glob("weights-*.safetensors"):
            if update is None or path != Path(update.path):
                path.unlink(missing_ok=True)


def follow(args: argparse.Namespace, key: str | None) -> None:
    """Follows until the process is told to stop.

    Raises: RelayError when the relay does not answer at the start, ValueError on bad input.
    """
    name = keys.check_name(
        args.name if args.name is not None else keys.worker_name(args.worker), "worker name"
    )
    mirror = WeightMirror([read_plan(path) for path in args.plan])
    with closing(open_relay(args.relay, key)) as relay, closing(Worker(args.worker, key)) as worker:
        follower = Follower(relay, args.run, mirror, args.base)
        with closing(Subscriber(relay, follower, worker, args.staging, name)) as subscriber:
            while True:
                subscriber.step(time.monotonic())
                subscriber.wait(time.monotonic())


def _stop(number: int, frame: FrameType | None) -> None:
    """Exits even from a call that a hung worker never answers; the clean-up on the way out runs once."""
    for each in _STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(0)


def _worker_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form http://HOST:PORT")
    return text


def _existing_path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def _parser() -> CommandParser:
    program = "python -m rose.transfer.follow.subscriber"
    parser = CommandParser(
        program,
        "Keeps one rollout engine's weights up to date: follows a run in the relay, delivers its versions.",
        f"{program} --relay embedded://relay:8400 --worker http://127.0.0.1:8001 --staging /dev/shm/rose",
    )
    parser.add_argument("--relay", required=True, help="embedded://HOST:PORT or mooncake://HOST:PORT")
    parser.add_argument(
        "--run", default=AUTO_RUN, help="run id, or auto: the only live run (default %(default)s)"
    )
    parser.add_argument(
        "--worker", type=_worker_url, required=True, help="http://HOST:PORT of the engine's server"
    )
    parser.add_argument(
        "--staging", type=Path, required=True, help="folder for checkpoints, preferably under /dev/shm"
    )
    parser.add_argument(
        "--base",
        type=_existing_path,
        help="checkpoint that the trainer starts from: the first snapshot then need not be fetched",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="plans that `rose plan` wrote for this host's ranks: only their shards are fetched",
    )
    parser.add_argument(
        "--name", help="name under which this worker acknowledges versions (default: its host and port)"
    )
    return parser


def main() -> None:
    """Runs the command; bad input is one line on stderr and exit status 2."""
    parser = _parser()
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in _STOP_SIGNALS:
        signal.signal(number, _stop)
    try:
        args.staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--staging {args.staging}: {error.strerror}")
    try:
        follow(args, Settings.from_environment().key)
    except (RoseError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
