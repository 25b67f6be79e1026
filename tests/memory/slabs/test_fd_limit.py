"""The descriptor limit: raised as far as needed and allowed, refused with the numbers beyond that."""

import subprocess
import sys

CODE = """
import logging, resource, sys
from rose.errors import ConfigError
from rose.memory.slabs.fd_limit import ensure_fd_limit
soft, hard, num_fds = (int(each) for each in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    ensure_fd_limit(num_fds, "pool p")
except ConfigError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int, num_fds: int) -> list[str]:
    """In a process of its own: a hard limit can't be raised again."""
    arguments = [str(each) for each in (soft, hard, num_fds)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], check=True, text=True, capture_output=True
    )
    return done.stdout.splitlines()


def test_a_limit_that_suffices_is_left_alone() -> None:
    assert limits_after(400, 1000, 100) == ["400 1000"]


def test_the_soft_limit_is_raised_to_what_is_needed() -> None:
    soft, hard = limits_after(300, 1000, 600)[0].split()
    assert hard == "1000" and 728 < int(soft) < 760  # 600, 128 to spare, and those open


def test_beyond_the_hard_limit_the_numbers_and_the_fix_are_named() -> None:
    message, limits = limits_after(300, 400, 5000)
    assert message.startswith("pool p: needs 5000 more open files, ")
    assert "the limit is 300, at most 400: run `ulimit -n 51" in message
    assert limits == "300 400"
