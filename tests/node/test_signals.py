"""Signals that end a command come between whole steps."""

import os
import signal

import pytest

from rose.node.signals import signals_wait


def test_a_signal_comes_after_the_steps_that_belong_together() -> None:
    steps = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an event loop may have set its own
    try:
        with pytest.raises(KeyboardInterrupt), signals_wait():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("both")
        assert steps == ["both"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_wait():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
