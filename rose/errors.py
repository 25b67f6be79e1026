"""One tree of errors for what the world does wrong; a caller's mistake is a ValueError.

Every message says what is wrong, with the value, what is allowed, and what to do.
"""


class RoseError(Exception):
    """The root of all errors that ROSE raises about the world."""


class ConfigError(RoseError):
    """Bad user input: the message names file or flag, key and fix, and the command exits with status 2."""


class FolderError(ConfigError):
    """A folder does not exist and can't be made. Code that can do without the folder catches this."""


class PoolError(RoseError):
    """The slab pool can't do what was asked: another daemon owns it, or it is gone or corrupt."""


class VmmError(PoolError, OSError):
    """A call of the system or the driver on slab memory failed.

    The message names the call, its error, the slab or position, and the sizes. ``errno`` and ``strerror`` are
    those of any OSError.
    """

    def __str__(self) -> str:
        return str(self.strerror)  # "[Errno 5]" says nothing about a CUDA error


class BoardError(RoseError):
    """The slack board is missing or was written by another layout version."""


class FrameError(RoseError):
    """A weight frame is truncated, corrupt, or does not match its base version."""


class RelayError(RoseError):
    """The relay refused or lost an object."""


class RelayFull(RelayError):
    """The relay has no room for an object. Code that can wait or remove objects catches this."""


class RelayUnreachable(RelayError):
    """The relay does not answer. Code that has a copy of the relay catches this."""


class WorkerError(RoseError):
    """A rollout worker failed, stalled, or gave an answer that can't be used."""


class NoWorkerError(RoseError):
    """No registered worker may take this turn: none is alive, or none has the weight version."""


class ChannelError(RoseError):
    """The control channel is gone, another scheduler owns it, or it carried something unreadable."""


class JobRefused(ConfigError):
    """A job can't be placed. The message names the constraint and the numbers."""


class ProfileError(RoseError):
    """A job could not be profiled: it crashed, took too long, or its phases differ from its file's."""


class PermitLost(RoseError):
    """A phase lost its permit: its lease ran out, or the job was resubmitted or cancelled."""


class DeviceMemoryHeld(RoseError):
    """A phase has its permit, and another process still fills its devices. The message names it."""


class CacheFull(RoseError):
    """A phase's working set does not fit in the host memory that the job was given."""


class PoolsFull(RoseError):
    """The cluster's pools have no room for a job."""


def install_hint(*extras: str) -> str:
    """Returns the command that adds these extras of ROSE, for an error that says what is missing.

    Nothing is published, so it works in the checkout. docs/start.md says why the CPU's build takes overrides.
    """
    commands = " or ".join(
        f"uv pip install {'--override .ci/overrides.txt ' if extra == 'cpu' else ''}-e '.[{extra}]'"
        for extra in extras
    )
    return f"in ROSE's checkout, run: {commands}"
