"""The native kernels by themselves, without Python or torch: random calls of each target against the definition.

tests/native/selfcheck.cpp draws them and says what is wrong. Here it is built, for this machine and for AArch64 under
qemu, and run at length; scripts/sanitize runs it with sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headscope._attend.backends import native
from support.paths import ROOT

TARGETS = ("avx512_bf16", "avx512", "avx2", "generic", "neon")
LACKING = 77  # the exit code where a CPU lacks the target
EMULATOR, CROSS_COMPILER = "qemu-aarch64", "aarch64-linux-gnu-g++"


def build(place: Path, *options: str) -> Path:
    """The program, built without much optimization: that takes a fraction of the time."""
    cmake, source = shutil.which("cmake"), ROOT / "CMakeLists.txt"
    if cmake is None or not source.exists():
        pytest.skip("no cmake, or not in a checkout")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    said = [
        "-DHEADSCOPE_EXTENSION=OFF",
        "-DHEADSCOPE_SELFCHECK=ON",
        "-DHEADSCOPE_EMULATE_BF16=ON",
        "-DCMAKE_CXX_FLAGS_RELEASE=-Og",
        *options,
    ]
    for command in (
        [cmake, *generator, "-S", str(ROOT), "-B", str(place), *said],
        [cmake, "--build", str(place), "--parallel", str(min(4, os.cpu_count() or 1))],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "selfcheck"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command for this machine."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        pytest.skip("no C++ compiler")
    return [str(build(tmp_path_factory.mktemp("selfcheck")))]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command for AArch64 on a machine of another kind."""
    if not shutil.which(EMULATOR) or not shutil.which(CROSS_COMPILER):
        pytest.skip(f"no {EMULATOR} or no {CROSS_COMPILER}")
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}")
    program = build(tmp_path_factory.mktemp("aarch64"), *system, "-DCMAKE_EXE_LINKER_FLAGS=-static")
    return [EMULATOR, str(program)]


def agree(command: list[str], target: str, calls: int, seed: int, timeout: int = 280) -> None:
    """Run so many random calls; skip where the target cannot run."""
    done = subprocess.run([*command, target, str(calls), str(seed)], capture_output=True, text=True, timeout=timeout)
    if done.returncode == LACKING:
        pytest.skip(done.stderr.strip())
    print(done.stdout)  # how close it came; shown with pytest -rP
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 wrong\n")


def test_every_target_is_checked() -> None:
    names = native.extension.targets() if native.extension is not None else ["generic"]
    assert set(names) <= set(TARGETS)


@pytest.mark.long
@pytest.mark.parametrize("target", ["neon", "generic"])
def test_some_random_calls_on_aarch64(emulated: list[str], target: str) -> None:
    """The slice of what follows that CI runs; of this machine's targets scripts/sanitize runs one."""
    agree(emulated, target, calls=50, seed=2)


@pytest.mark.long
def test_phases_are_measured(tmp_path: Path) -> None:
    """benchmarks/phases.cpp names what is inside the kernels: it is built with them."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not {"avx2", "avx512"} & set(
        native.extension.targets() if native.extension is not None else ()
    ):
        pytest.skip("no C++ compiler, or a CPU without AVX2")
    program = str(tmp_path / "phases")
    flags = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=fast"]
    subprocess.run([compiler, *flags, str(ROOT / "benchmarks" / "phases.cpp"), "-o", program], check=True, timeout=200)
    said = subprocess.run([program, "256", "16"], capture_output=True, text=True, check=True, timeout=60).stdout
    shares = re.findall(r"a pass over all.* (\d+) % of the peak", said)
    assert len(shares) in (2, 4), said  # forward and backward; of bf16 too, where the CPU multiplies it
    assert all(int(share) > 0 for share in shares), said
    wrong = subprocess.run([program, "100"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_random_calls_at_length(here: list[str], target: str) -> None:
    agree(here, target, calls=20_000, seed=3, timeout=3500)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["neon", "generic"])
def test_random_calls_at_length_on_aarch64(emulated: list[str], target: str) -> None:
    agree(emulated, target, calls=2_000, seed=4, timeout=3500)
