"""A client's calls over any channel, repeated until answered, through restarts of the scheduler and the
channel.

Owns the connection's reading thread and the calls that wait for an answer. `ask` returns the answer to that
very call, however often the scheduler is restarted meanwhile, and raises ChannelError if none comes in time.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Self

from rose.errors import ChannelError
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Call,
    Granted,
    SchedulerMessage,
    decode_scheduler_message,
    encode,
)
from rose.scheduler.runtime.channel.protocol import ClientSide

logger = logging.getLogger(__name__)

RECONNECT_S = 0.02
"""The time between attempts: a scheduler is back within some hundred milliseconds."""


@dataclass(slots=True)
class _Waiting:
    call: Call
    is_answered: threading.Event = field(default_factory=threading.Event)
    answer: Answer | Granted | None = None


class ControlClient:
    """One process's connection to the scheduler. Any thread may call."""

    def __init__(self, channel: ClientSide, connect_timeout_s: float) -> None:
        """Connects. Raises: ChannelError if there is no scheduler within ``connect_timeout_s``."""
        self.unasked: queue.SimpleQueue[SchedulerMessage | None] = queue.SimpleQueue()
        """Orders from the scheduler. None marks a new connection: orders may have been missed."""
        self._channel = channel
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._is_up = True
        """Whether calls are sent by who makes them. After a lost connection, or a call that could not be
        sent, the reading thread first sends those that wait, so that the scheduler never gets a later call
        before an earlier one."""
        self._last_seq = 0
        self._closed = threading.Event()
        self._connect(connect_timeout_s)
        self._thread = threading.Thread(target=self._read, name="rose-control", daemon=True)
        self._thread.start()

    def next_seq(self) -> int:
        """Returns a number for a new call."""
        with self._lock:
            self._last_seq += 1
            return self._last_seq

    def ask(self, call: Call, timeout_s: float | None = None) -> Answer | Granted:
        """Waits for the answer. Raises: ChannelError after ``timeout_s``, or when the client is closed."""
        waiting = _Waiting(call)
        with self._lock:
            self._waiting[call.seq] = waiting
        self._send(waiting)
        if not waiting.is_answered.wait(timeout_s):
            with self._lock:
                self._waiting.pop(call.seq, None)
            what = type(call).__name__.lower()
            raise ChannelError(f"{what}: no answer from the scheduler in {timeout_s:g} s; see its log")
        if waiting.answer is None:
            raise ChannelError(f"{type(call).__name__.lower()}: the connection was closed")
        return waiting.answer

    def tell(self, call: Call) -> None:
        """Sends a call like `ask`, without waiting for the answer."""
        waiting = _Waiting(call)
        with self._lock:
            self._waiting[call.seq] = waiting
        self._send(waiting)

    def close(self) -> None:
        """Ends the connection. Calls that wait raise ChannelError."""
        self._closed.set()
        self._channel.close()
        self._thread.join()
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for each in waiting:
            each.is_answered.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, waiting: _Waiting) -> None:
        with self._sending:
            if self._is_up:
                self._try_send(waiting)

    def _try_send(self, waiting: _Waiting) -> None:
        try:
            self._channel.send(encode(waiting.call))
        except ConnectionError:  # the reading thread notices too, connects again and sends all that waits
            self._is_up = False
            logger.debug("not sent yet call=%s", type(waiting.call).__name__)

    def _connect(self, timeout_s: float | None) -> None:
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while not self._closed.is_set():
            try:
                self._channel.connect()
                return
            except ConnectionError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise ChannelError(f"{error}; start one with: rose sched serve") from error
            time.sleep(RECONNECT_S)

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                self._dispatch(decode_scheduler_message(self._channel.receive()))
            except ConnectionError as error:
                if self._closed.is_set():
                    return
                logger.info("connecting again reason=%s", error)
                with self._sending:
                    self._is_up = False
                self._connect(None)
                if self._closed.is_set():
                    return
                self._resend()

    def _dispatch(self, answer: SchedulerMessage) -> None:
        if isinstance(answer, Answer | Granted) and answer.seq:
            with self._lock:
                waiting = self._waiting.pop(answer.seq, None)
            if waiting is not None:  # else a second answer, to a call that was sent again
                waiting.answer = answer
                waiting.is_answered.set()
            return
        self.unasked.put(answer)

    def _resend(self) -> None:
        with self._sending:
            with self._lock:
                waiting = [self._waiting[seq] for seq in sorted(self._waiting)]
            self._is_up = True
            for each in waiting:
                if self._is_up:
                    self._try_send(each)
        self.unasked.put(None)
