"""Measuring of engines under load, for `rose demo` and the benchmarks: engines, loads, windows, records."""

if not __name__.startswith("rose."):
    raise ImportError("import rose.measure, not measure: benchmarks/measure is linked into the rose package")
