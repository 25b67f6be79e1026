"""One tree of errors: what the world did wrong, as opposed to the caller (ValueError).

Every message says what, where and the numbers, e.g. "need 12 slabs, 7 free".
"""


class RoseError(Exception):
    """Root of all errors that ROSE raises about the world."""


class ConfigError(RoseError):
    """Bad user input: names the file or flag, the key and the fix. The CLI exits with status 2."""


class PoolError(RoseError):
    """The slab pool can't do what was asked (owned by another daemon, gone, corrupt)."""


class PoolExhausted(PoolError):
    """Not enough free slabs; caught by whoever owns the shortage."""


class VmmError(PoolError, OSError):
    """A system or driver call on slab memory failed; ``errno`` and ``strerror`` as of any OSError.

    The message names the call, its error, the slab or position, and the sizes.
    """

    def __str__(self) -> str:
        return str(self.strerror)  # "[Errno 5]" says nothing of a CUDA error


class BoardError(RoseError):
    """The slack board is missing or was written by another layout version."""


class FrameError(RoseError):
    """A weight frame is truncated, corrupt, or does not match its base version."""


class RelayError(RoseError):
    """The relay refused or lost an object."""


class RelayFull(RelayError):
    """The relay has no room for an object; caught by whoever can wait or remove."""


class RelayUnreachable(RelayError):
    """The relay does not answer; caught by whoever has another copy of it."""


class WorkerError(RoseError):
    """A rollout worker failed, stalled, or answered something that can't be used."""


class NoWorkerError(RoseError):
    """No registered worker may take this turn (none alive, or none with the weight version)."""


class ChannelError(RoseError):
    """The control channel is gone, owned by another scheduler, or carried what can't be read."""


class JobRefused(ConfigError):
    """A job that can't be placed: names the constraint and the numbers."""


class ProfileError(RoseError):
    """A job could not be profiled: it crashed, took too long, or its phases are not those of its file."""


class PermitLost(RoseError):
    """A phase's permit was taken back: its lease ran out, or the job was resubmitted or cancelled."""


class CacheFull(RoseError):
    """A phase's working set does not fit in the host memory that the job was given."""


class PoolsFull(RoseError):
    """The cluster's pools have no room for a job."""
