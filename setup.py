"""Builds the C++ extensions; everything else is declared in pyproject.toml.

No CUDA toolkit is needed: the host backend of slab memory is plain POSIX, and the CUDA backend loads the
driver at run time.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("NPY_NUM_BUILD_JOBS", default=2).install()

KERNELS = "transfer/format/device/cuda"
"""What the delta codec shares with its CUDA kernels, which are compiled where they run."""


def extension(name: str) -> Pybind11Extension:
    """``rose._<name>`` from every C++ file under ``csrc/<name>``; an edited header rebuilds it too."""
    return Pybind11Extension(
        f"rose._{name}",
        sorted(glob(f"csrc/{name}/*.cpp")),
        include_dirs=[KERNELS],
        depends=sorted(glob("csrc/*/*.hpp") + glob(f"{KERNELS}/*.hpp")),
        cxx_std=20,
        extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
        libraries=["dl"],  # part of libc since glibc 2.34; we support older
    )


setup(ext_modules=[extension(name) for name in ("shm", "vmm", "delta")])
