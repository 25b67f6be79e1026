"""The codec's C++ on an emulated 64-bit ARM processor, with NEON and without, writes what it writes here."""

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from random_bits import WIDTHS, Width, changed_bits

from rose import _delta
from rose.transfer.format.codec import Bits

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCE = Path(__file__).parents[1] / "delta_on_arm.cpp"
KERNELS = Path(__file__).parents[3] / "transfer" / "format" / "device" / "cuda"
MANTISSA_BITS = {1: 3, 2: 7, 4: 23}
FIRST_INDEX, CUT = 12_345, 66_001

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed} here: apt-get install {package}")
    built = tmp_path_factory.mktemp("arm") / "delta"
    flags = ["-std=c++20", "-O2", "-static", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}"]
    subprocess.run([COMPILER, *flags, "-o", str(built), str(SOURCE)], check=True)
    return built


def written_here(old: Bits, new: Bits, width: int) -> bytes:
    delta, change = _delta.Delta.between(old, [new], FIRST_INDEX)
    streams = [*delta.g8s(), delta.coo(), *delta.exponents(old, MANTISSA_BITS[width])]
    hashes = struct.pack("<4Q", *change, *_delta.state_hash(new, FIRST_INDEX))
    return hashes + b"".join(struct.pack("<Q", len(stream)) + stream for stream in streams)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.0, 0.002, 0.01, 0.2, 1.0])
def test_an_arm_processor_writes_the_same_bytes_and_reads_them(
    program: Path, width: Width, density: float
) -> None:
    old, new = changed_bits(np.random.default_rng(17), width, 150_001, density)
    num_bytes = old.itemsize
    arguments = [str(each) for each in (num_bytes, MANTISSA_BITS[num_bytes], FIRST_INDEX, CUT)]
    command = [EMULATOR, str(program), *arguments]
    ran = subprocess.run(command, input=old.tobytes() + new.tobytes(), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout == 2 * written_here(old, new, num_bytes)  # portable, and with NEON
