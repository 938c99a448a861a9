"""Cross-compile the standard grid of the variants and say what each kernel takes. Needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from kda_kernels.case import Case
from kda_kernels.cases import compile_cases
from kda_kernels.variants import declared

SMS = 132
"""Nothing that is compiled depends on the SM count: any will do."""


@dataclass(frozen=True)
class Row:
    """One case and what became of it: resources, or why it has none.

    reason       None if it compiled; "unsupported: ..." or the compiler's first line otherwise
    stack_bytes  above zero if the kernel spills
    compile_s    when it was compiled: later runs take it from the cache
    digest       of the machine code, as `cubin.Binary.digest`
    refused      the variant doesn't support the case: there is nothing to compile
    """

    case: Case
    arch: str
    reason: str | None
    registers: int = 0
    stack_bytes: int = 0
    smem_bytes: int = 0
    threads: int = 0
    cluster: int = 0
    ctas_per_sm: int = 0
    compile_s: float = 0.0
    digest: str = ""
    refused: bool = False

    @property
    def broken(self) -> bool:
        """Whether it should have compiled and didn't: an unsupported case has no binary and needs
        none."""
        return self.reason is not None and not self.refused

    @property
    def failed(self) -> bool:
        return self.stack_bytes > 0 or self.broken


def compile_grid(
    variants: Sequence[str], archs: Sequence[str], jobs: int, listener: Callable[[Row, int], None]
) -> list[Row]:
    """Compile every case of `compile_cases` in `jobs` processes; rows in the order of variants,
    archs and grid.

    listener   gets each row as it is finished, and how many there will be
    Raises KeyboardInterrupt with all processes ended.
    """
    cases = [
        (case, arch) for variant in variants for arch in archs for case in compile_cases(variant)
    ]
    return compile_all(cases, jobs, listener)


def fill_cache(cases: Iterable[Case], arch: str) -> None:
    """Compile what the kernels' cache lacks of `cases`, once per binary. Failures are left to
    whoever launches."""
    binaries = {
        replace(
            case,
            options=tuple((key, value) for key, value in case.options if key != "pdl"),
            problem=replace(case.problem, requests=1, heads=1, layers=1),
        )
        for case in cases
        if declared(case.variant).binaries
    }
    distinct = {(c.variant, c.options, c.problem): c for c in binaries}
    compile_all([(distinct[key], arch) for key in sorted(distinct, key=str)], os.cpu_count() or 1)


def compile_all(
    cases: Sequence[tuple[Case, str]],
    jobs: int,
    listener: Callable[[Row, int], None] = lambda row, total: None,
) -> list[Row]:
    """Compile (case, arch) pairs in `jobs` processes; rows in the same order. Interrupts as
    compile_grid does."""
    rows: dict[int, Row] = {}
    if not cases:
        return []
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(jobs, len(cases)), mp_context=context, initializer=_leave_interrupts_to_parent
    )
    try:
        futures = {pool.submit(compile_case, case, arch): i for i, (case, arch) in enumerate(cases)}
        for future in as_completed(futures):
            row = rows[futures[future]] = future.result()
            listener(row, len(cases))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
        raise
    pool.shutdown()
    return [rows[i] for i in range(len(cases))]


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the compiler says while it works is not for the terminal; its errors come back as
    # exceptions.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def compile_case(case: Case, arch: str) -> Row:
    from kda_kernels import variants
    from kda_kernels.device.gpu import Gpu

    module = variants.load(case.variant)
    gpu = Gpu(arch, SMS)
    options = variants.make_options(case.variant, dict(case.options))
    why = module.unsupported(case.problem, options, gpu)
    if why is not None:
        return Row(case, arch, f"unsupported: {why}", refused=True)
    try:
        binary = module.compile(case.problem, options, gpu).binary
    except Exception as error:  # the DSL raises whatever its passes raise
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
        return Row(case, arch, f"{type(error).__name__}: {lines[0] if lines else ''}")
    taken = binary.resources
    return Row(
        case,
        arch,
        None,
        taken.registers,
        taken.stack_bytes,
        taken.smem_bytes,
        taken.threads,
        taken.cluster,
        taken.ctas_per_sm,
        binary.compile_s,
        binary.digest,
    )
