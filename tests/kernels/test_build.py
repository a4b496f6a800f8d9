"""Building the library: once, whole or not at all, again when it lost its end, and with no compiler where it is built already."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.worker.kernels.cpu.build import FLAGS, SOURCES, BuildError, build_id, ensure_library, find_compiler, variants
from services.worker.ops.native import CpuLibrary


@pytest.fixture
def cache(library: Path, tmp_path: Path) -> Path:
    """A cache of its own with the built library in it."""
    shutil.copytree(library.parent, tmp_path / "kernels" / library.parent.name)
    return tmp_path


def test_building_again_finds_what_was_built(library: Path):
    before = library.stat().st_mtime_ns
    assert ensure_library() == library
    assert library.stat().st_mtime_ns == before
    assert len(build_id(library)) == 8


@pytest.mark.parametrize("left", [0, 40_000, None])
def test_a_library_that_lost_its_end_is_built_again(library: Path, cache: Path, left: int | None):
    """To load one kills the process."""
    broken = ensure_library(cache)
    if left is None:
        broken.unlink()
    else:
        broken.write_bytes(library.read_bytes()[:left])
    again = ensure_library(cache)
    assert again == broken
    assert build_id(again) == build_id(library)
    assert CpuLibrary(again).variant == CpuLibrary(library).variant


def test_what_was_built_serves_where_there_is_no_compiler(library: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert ensure_library(cache) == cache / "kernels" / library.parent.name / library.name
    (cache / "kernels" / library.parent.name).rename(cache / "kernels" / "of-other-sources")
    with pytest.raises(BuildError, match="no C"):
        ensure_library(cache)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        find_compiler()


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "sh -c 'exit 3'")
    assert find_compiler() == [shutil.which("sh"), "-c", "exit 3"]


def test_a_compiler_that_fails_is_no_reason_to_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false --version"):
        ensure_library(tmp_path)


@pytest.mark.parametrize("isa", sorted(variants()))
def test_no_instruction_set_has_vectors_wider_than_its_registers(isa: str, tmp_path: Path):
    """Such vectors live in memory and are computed piece by piece: AVX2's products were once 40 times slower than AVX-512's for it."""
    compiler = find_compiler()
    if "Free Software Foundation" not in subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("only GCC tells")
    done = _compile(compiler, isa, tmp_path / "variant.o", "-Werror=vector-operation-performance")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("isa", sorted(variants()))
def test_an_instruction_set_shares_no_function_with_the_others(isa: str, tmp_path: Path):
    """Of equal weak functions the linker keeps any one: a machine without AVX-512 would get that of AVX-512."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    assert _compile(find_compiler(), isa, tmp_path / "variant.o").returncode == 0
    listed = subprocess.run(["nm", "-C", tmp_path / "variant.o"], capture_output=True, text=True, check=True).stdout
    assert f"tokenloom_variant_{isa}" in listed
    assert not re.findall(r"^[0-9a-f]+ [VvWwu] .*", listed, re.MULTILINE)


def _compile(compiler: list[str], isa: str, to: Path, *more: str) -> subprocess.CompletedProcess[str]:
    flags = [*FLAGS, *variants()[isa], f"-DTOKENLOOM_ISA={isa}", *more]
    command = [*compiler, *flags, "-c", str(SOURCES / "variant.cpp"), "-o", str(to)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
