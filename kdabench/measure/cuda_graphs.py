"""CUDA graphs as things to time: capture, proof of what was captured, event timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kdabench.data.measurements import Candidate
from kdabench.measure.clock import ExhaustedError, Reading
from kdabench.measure.ranges import span
from kdabench.measure.telemetry import Telemetry

_SUBMIT_CYCLES = (
    300_000  # 150 us at 2 GHz; submitting a graph of some hundred nodes takes 20 to 100 us
)

_TRIES = 3
_PAUSE_S = 0.1
"""After a throttled round. A power cap is lifted within some tens of milliseconds of an idle
GPU."""


class CaptureFailedError(Exception):
    """A candidate could not be captured into a CUDA graph."""


class WrongKernelError(Exception):
    """A graph holds other kernels than the candidate claims."""


@dataclass(frozen=True)
class Timed:
    """A captured graph of `launches` launches. `holds` owns memory that the graph refers to."""

    graph: torch.cuda.CUDAGraph
    launches: int
    holds: object = None


def capture(enqueue: Callable[[int], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture what `enqueue(stream handle)` enqueues on `stream`, which first waits for all earlier
    work.

    Raises CaptureFailedError with the reason.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    try:
        with (
            span("capture"),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            enqueue(stream.cuda_stream)
        graph.instantiate()
    except (RuntimeError, torch.AcceleratorError) as reason:
        raise CaptureFailedError(str(reason).splitlines()[0]) from reason
    return graph


def kernel_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Names of the kernels that a captured graph launches. Raises RuntimeError with the driver's
    error name."""
    from cuda.bindings import driver

    def checked(result: tuple[object, ...]) -> object:
        if int(result[0]) != 0:  # type: ignore[call-overload]
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1:] if len(result) > 2 else result[1]

    handle = driver.CUgraph(graph.raw_cuda_graph())
    count = checked(driver.cuGraphGetNodes(handle, 0))[1]  # type: ignore[index]
    nodes = checked(driver.cuGraphGetNodes(handle, count))[0]  # type: ignore[index]
    names = []
    for node in nodes:
        if (
            checked(driver.cuGraphNodeGetType(node))
            != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        ):
            continue
        params = checked(driver.cuGraphKernelNodeGetParams(node))
        if int(params.func) != 0:  # type: ignore[attr-defined]
            name = checked(driver.cuFuncGetName(params.func))  # type: ignore[attr-defined]
        else:
            name = checked(driver.cuKernelGetName(params.kern))  # type: ignore[attr-defined]
        names.append(name.decode() if isinstance(name, bytes) else str(name))
    return names


def require_kernels(graph: torch.cuda.CUDAGraph, expected: tuple[str, ...], launches: int) -> None:
    """Raise WrongKernelError unless each expected kernel name occurs at least once per launch.

    A candidate that silently ran another variant is found here.
    """
    names = kernel_names(graph)
    found = sum(any(e in name for e in expected) for name in names)
    if found < launches:
        seen = ", ".join(sorted({n[:60] for n in names})[:4]) or "nothing"
        raise WrongKernelError(
            f"expected {launches} launches of {' or '.join(expected)}, the graph has {found} of "
            f"them; it launches {seen}"
        )


class GraphClock:
    """Times graph replays by CUDA events. With a baseline, each sample is what a graph replay takes
    between two of it.

    The three follow each other on the GPU without a gap: what the host does between samples lets
    the clocks drift, by more than a step takes where the baseline is long.
    announce     is told of each candidate before its graph replay: who is to blame if that never ends
    slowed_mhz   after a throttled sample below this SM clock the GPU rests before the next round
    """

    def __init__(
        self,
        graphs: Mapping[Candidate, Timed],
        baseline: Timed | None,
        telemetry: Telemetry,
        stream: torch.cuda.Stream,
        announce: Callable[[Candidate], None] = lambda candidate: None,
        slowed_mhz: float = 0.0,
    ) -> None:
        self._graphs = graphs
        self._baseline = baseline
        self._telemetry = telemetry
        self._stream = stream
        self._announce = announce
        self._slowed_mhz = slowed_mhz
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        self._slowed = False
        self.round_state: dict[str, Any] = {}

    def begin_round(self, index: int) -> None:
        """Rest if the last round was slowed, then read the GPU's state."""
        if self._slowed:
            time.sleep(_PAUSE_S)
        self._slowed = False
        self.round_state = self._telemetry.round_state()

    def read(self, candidate: Candidate) -> Reading:
        self._announce(candidate)
        timed = self._graphs[candidate]
        for _ in range(_TRIES):
            time_us = self._graph_us(timed) / timed.launches
            if time_us > 0:
                state = self._telemetry.state()
                self._slowed |= bool(
                    state.throttled and (state.sm_clock_mhz or 0) < self._slowed_mhz
                )
                return Reading(time_us, state.sm_clock_mhz, state.throttled)
        raise ExhaustedError(f"the baseline's noise exceeds the step: {time_us:.3f} us")

    def _graph_us(self, timed: Timed) -> float:
        around = [] if self._baseline is None else [self._baseline]
        with torch.cuda.stream(self._stream):
            # Keeps the GPU busy while the host submits the first graph, so that submission is not
            # timed.
            torch.cuda._sleep(_SUBMIT_CYCLES)  # type: ignore[no-untyped-call]
            self._events[0].record()
            for event, each in zip(self._events[1:], [*around, timed, *around], strict=False):
                each.graph.replay()
                event.record()
            event.synchronize()
        between = [
            float(a.elapsed_time(b)) * 1e3 for a, b in pairwise(self._events[: 2 * len(around) + 2])
        ]
        return between[0] if not around else between[1] - (between[0] + between[2]) / 2
