"""Builds the C++ extensions; everything else is declared in pyproject.toml.

No CUDA toolkit is needed: the host twin of the memory backend is plain POSIX.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("NPY_NUM_BUILD_JOBS", default=2).install()


def extension(name: str) -> Pybind11Extension:
    """``rose._<name>`` from every C++ file under ``csrc/<name>``; an edited header rebuilds it too."""
    return Pybind11Extension(
        f"rose._{name}",
        sorted(glob(f"csrc/{name}/*.cpp")),
        depends=sorted(glob("csrc/*/*.hpp")),
        cxx_std=20,
        extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


setup(ext_modules=[extension(name) for name in ("shm", "vmm", "delta")])
