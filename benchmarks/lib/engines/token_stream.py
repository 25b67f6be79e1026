"""One request's tokens, and when each of them arrived: for benchmarks of what makes a stream wait.

Owns the thread that reads. Never measures an engine by itself.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rose.errors import WorkerError
from rose.http import http_client
from rose.node.control import EngineControl, completion_body

MAX_TOKENS = 900


class TokenStream:
    """One request's tokens, as they arrive; a context that ends it."""

    def __init__(self, engine: EngineControl, prompt: list[int]) -> None:
        self._url = engine.url
        self._body = completion_body(engine.model, prompt, MAX_TOKENS) | {"stream": True}
        self._executor = ThreadPoolExecutor(1)
        self._is_over = threading.Event()
        self.times_s: list[float] = []
        """When the tokens arrived, in seconds of the monotonic clock."""

    def __enter__(self) -> "TokenStream":
        self._reading = self._executor.submit(self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._executor.shutdown()

    def wait_for(self, count: int) -> None:
        """Waits until this many tokens are there. Raises: WorkerError when the request ended before."""
        while len(self.times_s) < count:
            if self._reading.done():
                self._reading.result()
                raise WorkerError(f"the request ended after {len(self.times_s)} tokens, need {count}")
            time.sleep(0.002)

    def _read(self) -> None:
        with (
            http_client(self._url, key=None, timeout=120.0) as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            response.raise_for_status()
            for line in response.iter_lines():
                if self._is_over.is_set():
                    return
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.times_s.append(time.monotonic())
