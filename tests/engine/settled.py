"""Garbage collectors of forks of the process that imports this last do not look at what it has loaded.

A full collection of vLLM's objects would take half a second, and each engine makes several.
"""

import gc

gc.collect()
gc.freeze()
