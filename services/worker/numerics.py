"""What this worker's numbers are: device dtype, executor, threads, and the readable identity that PROTOCOL.md rule 15 asks for."""

from __future__ import annotations

import torch

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.logs import get_logger
from services.worker import host
from services.worker.config import WorkerConfig
from services.worker.kernels.cpu.build import BuildError, build_id, ensure_library
from services.worker.ops.base import HeadShape, Ops
from services.worker.ops.cpu import CpuOps, supports
from services.worker.ops.native import CpuLibrary, Team
from services.worker.ops.reference import ReferenceOps
from services.worker.quantizing import REVISION

_log = get_logger(__name__)
_DTYPES = {"auto": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_dtype(name: str) -> torch.dtype:
    """The dtype of a --dtype. On CPUs the 16-bit types halve the memory and cost speed; the log says so.

    Raises TokenloomError(UNSUPPORTED) for bfloat16 on CPUs without instructions for it.
    """
    dtype = _DTYPES[name]
    if dtype is torch.bfloat16 and not host.multiplies_bfloat16():
        text = "--dtype bfloat16: these CPUs have no instructions for it (AVX512_BF16, AMX or ARM's BF16); leave --dtype at auto"
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"{text}, which is float32, or take --quantization int8 for less memory")
    if dtype is not torch.float32:
        _log.warning("16-bit types run in the reference executor, several times slower than float32 in the C++ kernels", dtype=name)
    return dtype


def use_threads(wanted: int | None) -> int:
    """Sets torch's team while loading: `wanted`, else the CPUs that the process or its container may use. Returns its size."""
    threads, cpus = wanted or host.usable_cpus(), host.usable_cpus()
    if threads > cpus:
        _log.warning("more threads than CPUs: a step waits for the last of them", threads=threads, cpus=cpus)
    torch.set_num_threads(threads)
    return threads


def leave_cores_to_the_team(ops: Ops) -> None:
    """Once loaded: where the forward pass has a team of its own, torch keeps one thread for the little that is left to it.

    That is masks, edits of logits, log-probabilities and the operator's logits processors: a second team would have to be woken for each of
    their small operations, and would meet the first on its cores.
    """
    if isinstance(ops, CpuOps):
        torch.set_num_threads(1)


def choose_ops(config: WorkerConfig, heads: HeadShape, dtype: torch.dtype) -> tuple[Ops, str]:
    """The executor and its name in the numerics identity ("cpu-avx512-0c1d2e3f", "reference").

    Raises TokenloomError(UNSUPPORTED) when C++ kernels are insisted on and cannot be had.
    """
    if config.kernels == "reference":
        return _reference(config), "reference"
    try:
        if dtype is not torch.float32 or not supports(heads):
            raise BuildError(f"they take float32 and heads of at most 256 dimensions in sixteens, not {dtype} and {heads}")
        path = ensure_library()
        library = CpuLibrary(path)
    except (BuildError, OSError) as error:
        if config.kernels == "cpu":
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"the C++ kernels cannot be used: {error}") from error
        _log.error("the C++ kernels cannot be used: falling back to the slower reference", reason=str(error))
        return _reference(config), "reference"
    threads = config.threads or host.usable_cpus()
    team = Team(library, threads, host.own_cores(threads) if config.pin_threads else ())
    return CpuOps(library, team), f"cpu-{library.variant}-{build_id(path)}"


def _reference(config: WorkerConfig) -> Ops:
    if config.quantization is not None:
        text = "--quantization brings neither speed nor memory in the reference executor, which computes with the floats of the integers"
        _log.warning(text, quantization=config.quantization)
    return ReferenceOps(batch_invariant=config.batch_invariant)


def identity(executor: str, dtype: torch.dtype, quantization: str | None = None, *, batch_invariant: bool) -> str:
    """The numerics fingerprint: equal between workers whose arithmetic is the same.

    The C++ kernels' arithmetic follows from the instruction set and the sources, which say where a product is fused with a sum. The digits
    behind the executor's name are those of sources, flags and compiler: the last are in them because a flag of the user's own could change
    more. The reference's products are MKL's or oneDNN's, which differ between CPUs and torch versions. The thread count does not appear,
    because no sum is split among threads. Weights that were quantised while loading are named with the revision of how ("int8.2"), for the
    model's fingerprint is that of its files.
    """
    name = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]
    if quantization is not None:
        name += f"/{quantization}.{REVISION}"
    if executor != "reference":
        return f"{executor}/{name}/tp1"
    policy = "invariant" if batch_invariant else "by-batch"
    return f"{executor}/{name}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability().lower()}/{policy}/tp1"
