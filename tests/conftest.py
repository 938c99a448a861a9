"""Triton kernels run under its interpreter where there is no GPU; it reads this when it is
imported."""

import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Test processes side by side, and a sweep that may be measuring on this machine, must not wait for
# each other's GPU.
os.environ["KDABENCH_LOCKS"] = tempfile.mkdtemp(prefix="kdabench-locks-")

# The same examples in every run: a red test is red again. `pytest --hypothesis-profile=search`
# looks for new ones. How long a busy machine takes to make them is no finding.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("search", max_examples=1000)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Binaries are compiled here, not taken from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_KERNELS_CACHE", str(tmp_path_factory.mktemp("cubin")))
        yield
