"""What of the machine this process may use: its memory and CPUs, less where a control group (a container) allows less."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes this process may use: the machine's memory or the tightest cgroup limit above it, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(folder / ("memory.max" if unified else "memory.limit_in_bytes")) for folder, unified in _groups(root, "memory")]
    return min([total, *(limit for limit in limits if limit is not None)])


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may use: those it may run on, or the tightest cgroup quota above it (rounded up), whichever is less.

    A team of twice as many threads as the quota allows uses it up at once and stands still for the rest of each period. Half a CPU too many
    pays: with a quota of 1.5, two threads took 20 to 41 ms for a decode of 8 rows and one took 29, for 32 rows 51 to 74 and 97.
    """
    quotas = [_quota(folder, unified=unified) for folder, unified in _groups(root, "cpu")]
    return min([len(os.sched_getaffinity(0)), *(max(1, math.ceil(quota)) for quota in quotas if quota is not None)])


def own_cores(threads: int) -> list[int]:
    """A CPU for each of `threads` that are to share out all CPUs this process may run on; empty where they are fewer, or more.

    Fewer go where there is room: to keep them to some CPUs would have two workers of a machine fight for the same.
    """
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) == threads else []


def return_freed_memory() -> None:
    """Gives the system back what the C library keeps of freed memory for later. Only glibc offers that; elsewhere nothing happens.

    For the end of a load: its temporaries are hundreds of MB that no step will ask for again.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Whether the CPUs have instructions for products of bfloat16: AVX-512's, AMX's or ARM's, as Linux names them."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.partition(":")[2].split()}
    return not flags.isdisjoint(_BFLOAT16_FLAGS)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's cgroups from its own to the root, and whether each is of version 2 (else version 1's of `controller`)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            yield folder, not controllers


def _quota(folder: Path, *, unified: bool) -> float | None:
    """CPUs that a group's quota amounts to; None: it has none."""
    if not unified:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    else:
        try:
            quota, period = (int(number) for number in (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # the root group has no such file; "max" is no number
            return None
    return quota / period if quota and period and quota > 0 else None


def _number(file: Path) -> int | None:
    """The number in a file; None: there is no such file, or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
