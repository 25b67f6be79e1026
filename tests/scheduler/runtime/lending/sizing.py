"""Jobs on more rollout nodes than they need, run by `rose sched serve`: their files, and what they did."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from lending.lending_router import Router, lent_worker, served
from served_cluster import ServedCluster, wait_until

from rose.scheduler.runtime.channel.messages import Submit
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

JOB = Path(__file__).with_name("sized_job.py")
ROLLOUT_S = 3.0
"""The scheduler asks the router every 5 s, and looks at three iterations."""
NUM_ASKED = 4
POOLS = {
    "serving_gpus": 1,
    "rollout": {"name": "own", "dollars_per_gpu_hour": 10.0, "gpus_per_node": 1},
    "train": {"name": "training", "dollars_per_gpu_hour": 0.1, "gpus_per_node": 1},
}


class _Routes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, OwnEngine)
        self.server.is_active = self.path == "/rose/v1/activate"
        body = json.dumps({"is_active": self.server.is_active, "took_s": 0.1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None: ...


class OwnEngine(HTTPServer):
    """What a job activates and deactivates."""

    is_active = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def own_engines(num: int) -> Iterator[list[OwnEngine]]:
    """Engines of a job's own, one for each node, that make no tokens."""
    with ExitStack() as stack:
        engines = [stack.enter_context(OwnEngine(("127.0.0.1", 0), _Routes)) for _ in range(num)]
        for engine in engines:
            threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.05}).start()
            stack.callback(engine.shutdown)
        yield engines


@contextmanager
def lending(folder: Path) -> Iterator[tuple[Router, ScriptedWorker]]:
    """A router with one serving GPU, and an engine of job a's own that it does not know yet."""
    own = ScriptedWorker(version="run-a/1", prefill_s=0.2)
    with lent_worker(prefill_s=0.2) as worker, served(own):
        router = Router(folder, worker.url, keeps_state=True)
        try:
            yield router, own
        finally:
            router.process.stop(0.0)


def submit(cluster: ServedCluster, engines: Sequence[OwnEngine] = (), **fields: Any) -> None:
    """Submits job a, which borrows and may do with one node of its four."""
    spec = cluster.spec("a", **{"group": None, "iterations": 1000, "slo": 5.0, **fields})
    spec["phases"] = {"rollout": {"seconds": ROLLOUT_S + 1, "nodes": NUM_ASKED}, "train": {"seconds": 0.5}}
    urls = [engine.url for engine in engines]
    spec["command"] = [sys.executable, str(JOB), str(cluster.folder), str(ROLLOUT_S), *urls]
    spec["borrow"] = {"run_id": "run-a", "model": "scripted", "fewest_nodes": 1}
    answer = cluster.ask(Submit, spec=spec)
    assert answer.error is None, answer.error


def lines(cluster: ServedCluster) -> list[dict[str, Any]]:
    """What the ranks of job a have written, each at the beginning of an iteration."""
    path = cluster.folder / "a.jsonl"
    found = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in found]


def wait_nodes(cluster: ServedCluster, num_nodes: int) -> dict[str, Any]:
    """Waits until job a has begun an iteration on so many nodes; returns what its rank 0 wrote."""

    def is_there() -> bool:
        found = [each for each in lines(cluster) if each["rank"] == 0]
        return bool(found) and found[-1]["nodes"] == num_nodes

    wait_until(is_there, f"{num_nodes} nodes; {cluster.server.log_tail()}")
    return [each for each in lines(cluster) if each["rank"] == 0][-1]
