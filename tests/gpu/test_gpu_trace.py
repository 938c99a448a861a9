"""64 steps of a serving trace on a GPU: stock and the fused cores, eager and deferred, against
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_kernels.check.trace import Engine, Shape, Trace, VariantKernels, run
from kda_kernels.device.gpu import current_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

COMMIT = {"source": "ring", "heads_per_cta": 1}
RECORD: dict[str, dict[str, Any]] = {
    "KdaSplit": {"split": 4, "threads": 128},
    "KdaWide": {"form": "chunked"},
    "KdaStream": {},
    "KdaWS": {},
}
REPLAY: dict[str, tuple[str, dict[str, Any]]] = {
    "split 1": ("KdaFused", {}),
    "split 4": ("KdaFused", {"split": 4, "threads": 128}),
    "lines": ("KdaFused", {"source": "shared", "fold": "late", "state_first": False}),
    "persistent": ("KdaFusedWS", {}),
}


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize(("heads", "requests"), [(12, 8), (96, 3)])
def test_no_error_grows_over_64_steps(heads: int, requests: int, tokens: int) -> None:
    served, gpu = Trace(Shape(heads, tokens, requests), 64, seed=heads + tokens), current_gpu()
    engines = [Engine("stock", served, VariantKernels({"record": ("stock", {})}, None, gpu))]
    for name, options in RECORD.items():
        engines.append(
            Engine(name, served, VariantKernels({"record": (name, options)}, COMMIT, gpu))
        )
    for name, variant in REPLAY.items():
        steps = {"record": ("KdaSplit", RECORD["KdaSplit"]), "replay": variant}
        threshold = heads * (requests + 1) // 2
        engines.append(Engine(name, served, VariantKernels(steps, COMMIT, gpu), threshold.__le__))
    outcome = run(served, engines)
    assert outcome.failed == []
    for engine in engines:
        for measure in ("out", "state", "corrections"):
            assert outcome.growth(engine.name, measure) < 0.03, (engine.name, measure)
        assert engine.replays is None or set(engine.kinds) == {"record", "replay"}
