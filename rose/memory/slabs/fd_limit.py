"""The process's limit on open descriptors, which is raised where a pool needs more.

A CUDA pool needs one descriptor per slab while it is handed over, and the usual soft limit of 1,024 is less
than a GPU has slabs. The limit is never lowered.
"""

import logging
import os
import resource

from rose.errors import ConfigError

logger = logging.getLogger(__name__)

_SPARE_FDS = 128
"""Descriptors kept for sockets, files and libraries that are opened later."""


def ensure_fd_limit(num_fds: int, what: str) -> None:
    """Makes room for ``num_fds`` more descriptors by raising the soft limit, up to the hard one.

    ``what`` says what they are for. Raises: ConfigError if the hard limit is too low.
    """
    num_open = len(os.listdir("/proc/self/fd"))
    needed = num_open + num_fds + _SPARE_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ConfigError(
            f"{what}: needs {num_fds} more open files, {num_open} are open and {_SPARE_FDS} are to spare; "
            f"the limit is {soft}, at most {hard}: run `ulimit -n {needed}` as root before starting, or use "
            f"fewer, larger slabs"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    logger.info("open files limit raised from=%d to=%d hard=%d", soft, needed, hard)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
