"""The sign that a run's trainer is alive, by which followers of "auto" tell live runs from dead ones.

Owns the thread that renews it in the relay, and says that the run has ended when its process ends, unless a
signal kills that. A relay that does not answer is tried again at the next beat. A thread beside it gives the
relay again what that may have lost, however long this takes.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from rose.errors import RelayError, RelayUnreachable
from rose.transfer.format import leases
from rose.transfer.format.manifest import RunSign, pack_body, run_sign_key
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)


class RunLease:
    """The sign of one run, from start() to stop().

    restore: called once per beat in a thread of its own, to give the relay again what it may have lost.
    """

    def __init__(self, relay: Relay, run_id: str, restore: Callable[[], None]) -> None:
        self._relay = relay
        self._run_id = run_id
        self._restore = restore
        self._key = run_sign_key(run_id)
        self._beat = 0
        self._stopping = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="rose-lease", daemon=True)
        self._restoring = threading.Thread(target=self._restore_losses, name="rose-restore", daemon=True)

    def start(self) -> None:
        """Writes the first sign, and renews it from now on. The second call does nothing."""
        if self._beat == 0:
            self._write(is_ended=False)
            self._renewing.start()
            self._restoring.start()
            atexit.register(self._leave, os.getpid())

    def stop(self) -> None:
        """Says that the run has ended. Waits for restore() if that is running."""
        atexit.unregister(self._leave)
        self._end()
        if self._beat > 0:
            self._restoring.join()

    def _leave(self, pid: int) -> None:
        """Says so at the end of the process: a trainer that fails closes nothing, and its successor wants the
        engines. A fork of the trainer may end as it likes.
        """
        if os.getpid() == pid:
            self._end()

    def _end(self) -> None:
        self._stopping.set()
        if self._beat > 0:
            self._renewing.join()
            self._write(is_ended=True)

    def _renew(self) -> None:
        while not self._stopping.wait(leases.BEAT_S):
            self._write(is_ended=False)

    def _restore_losses(self) -> None:
        while not self._stopping.wait(leases.BEAT_S):
            try:
                with suppress(RelayUnreachable):  # what the relay has is known once it answers
                    self._restore()
            except RelayError as error:
                text = "the relay lost run %s, and could not be given its last version again: %s"
                logger.warning(text, self._run_id, error)

    def _write(self, *, is_ended: bool) -> None:
        self._beat += 1
        with suppress(RelayError):
            self._relay.upsert(self._key, pack_body(RunSign(beat=self._beat, is_ended=is_ended)))
