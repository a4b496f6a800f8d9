from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import pytest

from services.worker.host import machine_memory, multiplies_bfloat16, own_cores, return_freed_memory, usable_cpus


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))


def test_the_tightest_limit_of_the_groups_above_counts(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path) == machine_memory(Path("/nowhere"))
    (group.parent / "memory.max").write_text("1000000\n")
    assert machine_memory(tmp_path) == 1_000_000
    (group / "memory.max").write_text("999\n")
    assert machine_memory(tmp_path) == 999


def test_limits_of_the_first_version_of_cgroups_count_too(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/job\n4:cpu:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("4096")
    assert machine_memory(tmp_path) == 4096


@pytest.mark.usefixtures("many_cpus")
def test_a_containers_quota_bounds_the_cpus(tmp_path: Path):
    assert usable_cpus(tmp_path) == 64
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(tmp_path) == 64
    for quota, cpus in (("10000", 1), ("200000", 2), ("250000", 3), ("9000000", 64)):
        (group.parent / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cpus(tmp_path) == cpus


@pytest.mark.usefixtures("many_cpus")
def test_a_quota_of_the_first_version_of_cgroups_counts_too(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    group = tmp_path / "sys/fs/cgroup/cpu/job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000")
    for quota, cpus in (("-1", 64), ("400000", 4)):
        (group / "cpu.cfs_quota_us").write_text(quota)
        assert usable_cpus(tmp_path) == cpus


@pytest.mark.usefixtures("many_cpus")
def test_threads_have_cpus_of_their_own_only_where_they_share_out_all():
    assert own_cores(64) == list(range(64))
    assert own_cores(63) == own_cores(65) == []


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sha_ni", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: bf16", False),
    ],
)
def test_instructions_for_bfloat16_are_known_by_the_names_that_linux_gives_them(tmp_path: Path, line: str, has: bool):
    (tmp_path / "proc").mkdir()
    assert not multiplies_bfloat16(tmp_path)
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert multiplies_bfloat16(tmp_path) is has


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no malloc_trim")
def test_freed_memory_goes_back_to_the_system():
    pieces = [b"x" * (100_000 + number % 2) for number in range(1000)]
    last = pieces.pop()  # above all others in the heap, which cannot shrink by itself then
    pieces.clear()
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 50 << 20
    assert last
