"""Garbage collectors of forks of the process that imports this last do not look at what it has loaded.

These are three quarters of a million objects, and vLLM collects several times while an engine starts.
"""

import gc

gc.collect()
gc.freeze()
