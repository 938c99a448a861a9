"""What a measurement depends on beside the code: device, driver, libraries. Fields as in
docs/formats.md."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from kdabench.measure.telemetry import Telemetry


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe(device_name: str, uuid: str, telemetry: Telemetry) -> dict[str, Any]:
    """The environment of the current CUDA device, as stored once per set of records.

    `$KDABENCH_REVISION` names the git revision where the sources were copied without their
    repository.
    """
    import torch

    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "gpu": device_name,
        "uuid": uuid,
        "capability": f"{p.major}.{p.minor}",
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "memory_bytes": p.total_memory,
        **telemetry.describe(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "kdabench": _version("kdabench"),
        "git_revision": _git("rev-parse", "HEAD") or os.environ.get("KDABENCH_REVISION"),
        "git_dirty": None if status is None else bool(status),
    }
