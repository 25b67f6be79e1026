"""Garbage collectors of forks of the process that imports this last do not look at what it has loaded.

These are three quarters of a million objects, and vLLM collects several times while an engine starts.
"""

import gc
import sys

from preloaded import MODULES

MISSING = sorted({*MODULES} - {*sys.modules})
assert not MISSING, f"{MISSING} can't be loaded"  # Python skips a module that it can't import
gc.collect()
gc.freeze()
