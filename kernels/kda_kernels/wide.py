"""KDA decode, spec and record steps, one CTA of 256 threads per item, two per SM, any convolution layout.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec), read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

Form chunked (record): the state lies in shared memory in cells that only the thread that copied them reads, so no
barrier stands between its arrival, in four pieces, and the tensor cores. All else is done meanwhile:
  load      slot; weights, window, projection (cp.async), gate weights (registers), state (cp.async)
  gate      gate projection on tensor cores, its decays multiplied up over the tokens across lanes; raw gates stored
  convolve  q, k, v of all tokens; keys stored, window rolled
  build     norms, and the 2q vectors as fragments
  solve     A and B, a part per warp; one warp turns them into the triangles T and C
  multiply  the state, piece by piece
  finish    corrections and outputs by one more small product, in registers; RMSNorm over the CTA
Kind decode: the same staging and gate, three CTAs per SM. A half-warp holds a row; rows are updated and stored four
pieces at a time, each as soon as it has arrived. Convolution weights wait in registers.
Form recurrence of windows: the phases of KdaSplit, whose rows all wait until the last one is there.
Source: docs/operation.md, "The mathematics, per item" and "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from kda_kernels import blocks, chunked, cubin, split
from kda_kernels.gpu import Gpu
from kda_kernels.operands import StepOperands
from kdabench.problem import CONV_WIDTH, HEAD_DIM, Problem, ceil_div

KERNELS = ("kda_wide",)
SOURCES = ("wide.py", "chunked.py", "split.py", "blocks.py", "cubin.py")

_UNIT = 8  # bf16 elements of a 16-byte copy
_THREADS = 32 * chunked.WARPS
_SOLVER = chunked.WARPS - 1
"""The warp that solves: one of those that convolve nothing."""
_CONVOLVING_WARPS = 3 * HEAD_DIM // 2 // 32
"""A thread of these convolves two channels."""
_PARTIALS_DONE, _SOLUTION_DONE = 1, 2
"""Named barriers."""
_LANES = 16
"""Lanes that share a row of a decode."""
_COLUMNS = HEAD_DIM // _LANES

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and `pdl` of the launch.

    form               of a window: recurrence = token by token; chunked = kind record only
    threads            per CTA: 256; windows in form recurrence 256 or 512
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order;
                       2: FP32 dot products, for windows in form recurrence
    staging            the state waits in shared memory (cp.async), or in registers, for windows in form recurrence
    evict              evict-first in L2 for a staged state
    stream_hints       stored states are streaming; states loaded to registers pass L1 by
    terms              chunked, BF16 state: terms of the vectors in its products. 2: FP32 precision; 1: 4e-4
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable"); False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the problem
    pdl                programmatic dependent launch
    """

    form: Literal["recurrence", "chunked"] = "recurrence"
    threads: int = 256
    gate_mode: int = 0
    staging: Literal["registers", "shared"] = "shared"
    evict: bool = False
    stream_hints: bool = False
    terms: int = 2
    streamable: bool = True
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Plan(chunked.Shape):
    """What decides the code of kind decode and form chunked. Its repr is the cache key."""

    kind: str
    evict: bool
    hints: bool
    gate_mode: int

    @property
    def chains(self) -> int:
        return 1 if self.gate_mode == 0 else 4

    @property
    def state_bytes(self) -> int:
        return HEAD_DIM * HEAD_DIM * self.item_bytes

    @property
    def operand_bytes(self) -> tuple[int, ...]:
        """Convolution weight and bias, inputs of the convolution, f_a: of no use when the fragments are built."""
        rows = HEAD_DIM * self.weight_bytes
        return 12 * rows, 3 * rows, 6 * HEAD_DIM * (self.history + self.tokens), 2 * HEAD_DIM * self.tokens

    @property
    def smem_bytes(self) -> int:
        tokens, window = self.tokens, 6 * HEAD_DIM * self.window
        shared = [
            4 * HEAD_DIM, 4 * HEAD_DIM, 4, 2 * HEAD_DIM * tokens, 4 * tokens, window, self.state_bytes,
        ]  # fmt: skip
        if self.kind == "decode":
            sizes = [*shared, *self.operand_bytes[2:], 16 * HEAD_DIM, 4 * chunked.WARPS]
        else:
            sizes = [
                *shared, self.operand_region, self.gamma_region, self.qkv_bytes, 4 * self.pair_floats,
                8 * self.slots**2, 128 * self.solution_words, 4 * self.slots * chunked.WARPS,
            ]  # fmt: skip
        return sum(ceil_div(n, 16) * 16 for n in sizes)

    @property
    def operand_region(self) -> int:
        """Bytes of `operand_bytes`, and then of the fragments."""
        return ceil_div(max(sum(self.operand_bytes), self.fragment_bytes), 16) * 16

    @property
    def gamma_region(self) -> int:
        """Bytes of Gamma, and then of the parts of A and B."""
        return max(self.gamma_bytes, self.partial_bytes)

    @property
    def ctas_per_sm(self) -> int:
        """By shared memory, and by the registers that the code takes: 80, or 64 for a decode of BF16 states."""
        most = 4 if self.kind == "decode" and self.state_dtype == "bf16" else 3
        return min(most, 233_472 // (self.smem_bytes + 1024))


@dataclass(frozen=True)
class Compiled:
    binary: cubin.Binary
    plan: Plan | split.Plan
    pdl: bool

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


def plan(problem: Problem, spec: Spec) -> Plan | split.Plan:
    layout: Literal["rows", "taps", "any"] = "any"
    if spec.streamable:
        layout = "rows" if problem.conv_layout == "dim-first" else "taps"
    window = spec.window if spec.window is not None else problem.window
    if problem.kind != "decode" and spec.form == "recurrence":
        return split.plan(problem, _split_spec(spec))
    return Plan(
        tokens=problem.tokens,
        state_dtype=problem.state_dtype,
        threads=spec.threads,
        layout=layout,
        window=window if layout == "rows" else 0,
        streamable=spec.streamable,
        weight_dtype=spec.conv_weight_dtype,
        terms=2 if problem.state_dtype == "fp32" or problem.kind == "decode" else spec.terms,
        kind=problem.kind,
        evict=spec.evict,
        hints=spec.stream_hints and problem.kind == "decode",
        gate_mode=spec.gate_mode,
    )


def _split_spec(spec: Spec) -> split.Spec:
    return split.Spec(
        split=1,
        threads=spec.threads,
        staging=spec.staging,
        evict=spec.evict,
        gate_mode=spec.gate_mode,
        stream_hints=spec.stream_hints,
        streamable=spec.streamable,
        conv_weight_dtype=spec.conv_weight_dtype,
        window=spec.window,
        pdl=spec.pdl,
    )


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    if spec.form not in ("recurrence", "chunked"):
        return f"form={spec.form!r} is not one of recurrence, chunked"
    if spec.form == "chunked" and problem.kind != "record":
        return f"kind={problem.kind}: form=chunked does not write the state, as only kind record wants"
    if spec.terms not in (1, 2):
        return f"terms={spec.terms} is not one of 1, 2"
    if problem.kind != "decode" and spec.form == "recurrence":
        return split.unsupported(problem, _split_spec(spec), gpu)
    for name, value, allowed in (
        ("threads", spec.threads, (_THREADS,)),
        ("gate_mode", spec.gate_mode, (0, 1)),
        ("staging", spec.staging, ("shared",)),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
    ):
        if value not in allowed:
            return f"{name}={value!r}: kind={problem.kind} form={spec.form} takes {', '.join(map(str, allowed))}"
    if spec.window is not None and not problem.tokens + 2 <= spec.window <= 16:
        return f"window={spec.window} must lie in {problem.tokens + 2}..16"
    if problem.requests > 65_535:
        return f"requests={problem.requests}: the grid takes at most 65535"
    needed = plan(problem, spec).smem_bytes
    if needed > gpu.smem_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.smem_per_block}"
    return None


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    reason = unsupported(problem, spec, gpu)
    if reason is not None:
        raise ValueError(f"KdaWide: {reason}")
    p = plan(problem, spec)
    host = _host_decode if p.kind == "decode" else _host_chunked if isinstance(p, Plan) else _host_recurrence
    binary = cubin.build(
        host, lambda: _arguments(p), arch=gpu.arch, threads=p.threads, cluster=1, sources=SOURCES, choices=p
    )
    return Compiled(binary, p, spec.pdl)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    o, p = operands, compiled.plan
    _check(p, o)
    heads, requests = o.A_log.shape[0], o.slots.shape[0]
    tensors = (
        o.projected,
        o.conv_weight,
        o.conv_bias,
        o.conv_state,
        o.f_b,
        o.A_log,
        o.dt_bias,
        o.norm_weight,
        o.state,
        o.slots,
        o.accepted,
        o.corrections,
        o.key_gates,
        o.record_rows,
        o.out,
    )
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    record_tokens, corrections_stride, key_gates_stride = 0, 0, 0
    if o.corrections is not None and o.key_gates is not None:
        record_tokens = o.corrections.shape[2]
        corrections_stride, key_gates_stride = o.corrections.stride(0), o.key_gates.stride(0)
    assert o.lower_bound is not None
    values = (
        *addresses,
        o.projected.stride(0),
        *o.conv_state.stride(),
        o.state.stride(0),
        o.slots.stride(0),
        corrections_stride,
        key_gates_stride,
        record_tokens,
        heads,
        o.lower_bound,
        o.scale,
        o.eps,
    )
    cubin.launcher(compiled.binary).launch((heads, requests, 1), values, stream, compiled.pdl)


def _check(p: Plan | split.Plan, o: StepOperands) -> None:
    if o.lower_bound is None:
        raise ValueError("lower_bound is None: KdaWide needs a bounded gate")
    if isinstance(p, Plan) and p.kind == "record" and not o.lower_bound * p.tokens >= chunked.MIN_LOG_GAMMA:
        raise ValueError(f"lower_bound={o.lower_bound} is too low for {p.tokens} tokens in form=chunked")
    rules: Any = p
    split._check(rules, o)


def _arguments(p: Plan | split.Plan) -> tuple[Any, ...]:
    strides = (Int64(0), Int64(0), Int32(0), Int32(0), Int64(0), Int32(0), Int64(0), Int64(0))
    return (*(Int64(0),) * 15, *strides, Int32(0), Int32(1), Float32(-5), Float32(1), Float32(1e-5), p)


@cute.jit
def _host_decode(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    # fmt: off
    kda_wide_decode(
        projected, conv_weight, conv_bias, conv_state, f_b, A_log, dt_bias, norm_weight, state, slots, accepted,
        corrections, key_gates, record_rows, out, pitch, conv_stride, channel_stride, tap_stride, state_stride,
        slots_stride, corrections_stride, key_gates_stride, record_tokens, heads, lower_bound, scale, eps, P,
    ).launch(grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=P.ctas_per_sm, preferred_smem_carveout=100)
    # fmt: on


@cute.jit
def _host_chunked(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    # fmt: off
    kda_wide_chunked(
        projected, conv_weight, conv_bias, conv_state, f_b, A_log, dt_bias, norm_weight, state, slots, accepted,
        corrections, key_gates, record_rows, out, pitch, conv_stride, channel_stride, tap_stride, state_stride,
        slots_stride, corrections_stride, key_gates_stride, record_tokens, heads, lower_bound, scale, eps, P,
    ).launch(grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=P.ctas_per_sm, preferred_smem_carveout=100)
    # fmt: on


@cute.jit
def _host_recurrence(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    # fmt: off
    kda_wide_recurrence(
        projected, conv_weight, conv_bias, conv_state, f_b, A_log, dt_bias, norm_weight, state, slots, accepted,
        corrections, key_gates, record_rows, out, pitch, conv_stride, channel_stride, tap_stride, state_stride,
        slots_stride, corrections_stride, key_gates_stride, record_tokens, heads, lower_bound, scale, eps, P,
    ).launch(grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=P.ctas_per_sm, preferred_smem_carveout=100)
    # fmt: on


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory in form chunked; the first fields as `split.Shared`."""

    taps: Any
    bias: Any
    x: Any
    f_a: Any
    fragments: Any  # `chunked.Shape.fragment_layout`, in the place of all the above
    gamma: Any  # [tokens, GAMMA_PITCH]
    partials: Any  # A and B, a part per step, in the place of gamma
    qkv: Any  # [tokens, QKV_PITCH] bf16
    dt_bias: Any
    norm_weight: Any
    A_log: Any
    out_gate: Any
    beta: Any
    pairs: Any  # A and B
    matrix: Any  # T and C
    solution: Any  # T and C as fragments
    sums: Any  # [slots, warps] sums of squares of o
    window: Any
    vectors: Any  # decode: [4, 128] q, k, decay, v
    state: Any  # cells of 16 bytes, [cell][thread]


def allocate(P: Plan) -> Shared:
    """`Plan.smem_bytes` counts the same pieces."""
    smem = SmemAllocator()

    def array(dtype: Any, layout: Any) -> Any:
        return smem.allocate_tensor(dtype, cute.make_layout(layout), byte_alignment=16)

    def view(dtype: Any, address: Any, layout: Any) -> Any:
        return cute.make_tensor(cute.make_ptr(dtype, address, SMEM, assumed_align=16), cute.make_layout(layout))

    if P.kind == "decode":
        x = array(BFloat16, (HEAD_DIM, 3, P.history + 1))
        none = dict.fromkeys(
            ("taps", "bias", "fragments", "gamma", "partials", "qkv", "pairs", "matrix", "solution"), None
        )
        return Shared(
            **none,
            x=x,
            f_a=array(BFloat16, HEAD_DIM),
            **_common(P, array),
            sums=array(Float32, chunked.WARPS),
            window=array(BFloat16, 3 * HEAD_DIM * P.window) if P.layout == "rows" else x,
            vectors=array(Float32, 4 * HEAD_DIM),
        )
    operands = array(Uint8, P.operand_region)
    gamma = array(Float32, P.gamma_region // 4)
    at = [operands.iterator.toint()]
    for size in P.operand_bytes[:-1]:
        at.append(at[-1] + size)
    x = view(BFloat16, at[2], (HEAD_DIM, 3, P.history + P.tokens))
    return Shared(
        taps=view(P.conv_dtype, at[0], (HEAD_DIM, CONV_WIDTH, 3)),
        bias=view(P.conv_dtype, at[1], (HEAD_DIM, 3)),
        x=x,
        f_a=view(BFloat16, at[3], P.tokens * HEAD_DIM),
        fragments=operands,
        gamma=gamma,
        partials=gamma,
        qkv=array(BFloat16, P.qkv_bytes // 2),
        **_common(P, array),
        pairs=array(Float32, P.pair_floats),
        matrix=array(Float32, 2 * P.slots**2),
        solution=array(Uint32, 32 * P.solution_words),
        sums=array(Float32, P.slots * chunked.WARPS),
        window=array(BFloat16, 3 * HEAD_DIM * P.window) if P.layout == "rows" else x,
        vectors=None,
    )


def _common(P: Plan, array: Any) -> dict[str, Any]:
    return {
        "dt_bias": array(Float32, HEAD_DIM),
        "norm_weight": array(Float32, HEAD_DIM),
        "A_log": array(Float32, 1),
        "out_gate": array(BFloat16, (HEAD_DIM, P.tokens)),
        "beta": array(BFloat16, (2, P.tokens)),
        "state": array(Uint8, P.state_bytes),
    }


@cute.kernel
def kda_wide_chunked(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    tid, _, _ = arch.thread_idx()
    head, request, _ = arch.block_idx()
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, slots + Int64(request) * slots_stride * 4, Int32(0))
    row = blocks.at(Int32, record_rows, request)

    M = allocate(P)
    at = split.Place(tid, warp, lane, Int32(0), head, head * HEAD_DIM, heads * HEAD_DIM)
    load_weights(M, conv_weight, conv_bias, A_log, dt_bias, norm_weight, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    split.load_projection(M, projected + Int64(request * P.tokens) * pitch * 2, pitch, at, P)
    results = out + (Int64(request * P.tokens) * at.D + at.channel) * 2
    if page > 0:
        window = split.Window(conv_state + Int64(page) * conv_stride * 2, channel_stride, tap_stride, Int32(0))
        split.load_window(M, window, at, P)
        arch.cp_async_commit_group()
        # So that nothing later waits for the gate weights on its behalf.
        row = blocks.pinned(row)
        gate_weights = cute.make_rmem_tensor((2, 2, chunked.STEPS), Uint32)
        chunked.load_gate_weights(gate_weights, f_b + Int64(at.channel) * (2 * HEAD_DIM), warp, lane)
        # Keeps these loads in front of the state's copies: behind them, they would come late.
        arch.sync_warp()
        cells = M.state.iterator.toint() + tid * 16
        item = state + (Int64(page) * state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes
        policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
        for group in range_constexpr(chunked.GROUPS):
            chunked.copy_state(cells, item, group, warp, lane, policy, P.evict, P)
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(chunked.GROUPS)
        arch.sync_threads()

        first = Int64(head * record_tokens) * HEAD_DIM
        record = split.Record(
            row,
            key_gates + (Int64(row) * key_gates_stride + first * 2) * 2,
            corrections + (Int64(row) * corrections_stride + first) * 4,
        )
        raw = chunked.raw_gates(gate_weights, M.f_a, lane, P.chains, P)
        exp_A = blocks.exp(M.A_log[0])
        chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, lower_bound, record, warp, lane, P)
        if warp < _CONVOLVING_WARPS:
            chunked.convolve(M, M.qkv, window, record, tid, P)
        if const_expr(P.layout != "rows"):
            split.store_window(M, window, at, P)
        arch.sync_threads()

        chunked.build_fragments(M.fragments, M.qkv, M.gamma, scale, warp, chunked.WARPS, lane, P)
        if const_expr(P.layout == "rows"):
            split.store_window(M, window, at, P)
        arch.sync_threads()

        chunked.token_products(M.fragments, M.partials, warp, lane, P)
        if warp == _SOLVER:
            arch.barrier(barrier_id=_PARTIALS_DONE, number_of_threads=_THREADS)
            beta = blocks.sigmoid(M.beta[head % 2, min(lane % P.slots, P.tokens - 1)].to(Float32))
            chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)
            arch.barrier_arrive(barrier_id=_SOLUTION_DONE, number_of_threads=_THREADS)
        else:
            arch.barrier_arrive(barrier_id=_PARTIALS_DONE, number_of_threads=_THREADS)

        factors = chunked.output_factors(M.out_gate, M.norm_weight, warp, lane, P)
        v = chunked.values(M.qkv, warp, lane, P)
        sums = chunked.accumulators(P)
        for group in range_constexpr(chunked.GROUPS):
            arch.cp_async_wait_group(chunked.GROUPS - 1 - group)
            chunked.multiply_staged(sums, cells, M.fragments, group, lane, P)
        if warp == _SOLVER:
            arch.sync_warp()
        else:
            arch.barrier(barrier_id=_SOLUTION_DONE, number_of_threads=_THREADS)
        u, attended = chunked.finish(sums, v, M.solution, lane, P)
        o = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            o[i] = attended[i].to(BFloat16).to(Float32)
        chunked.store_squares(o, M.sums, warp, lane, P)
        if row >= 0:
            chunked.store_corrections(u, record.corrections, warp, lane, P)
        arch.sync_threads()
        chunked.store_outputs(o, factors, M.sums, eps, results, at.D, warp, lane, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        split.store_zeros(results, at, P)


@cute.jit
def load_weights(
    M: cutlass.Constexpr,
    conv_weight: Int64,
    conv_bias: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    at: split.Place,
    P: cutlass.Constexpr,
) -> None:
    """All weights of the head but the gate's, and for a decode but the convolution's, by cp.async."""
    none, quads = Int64(0), HEAD_DIM // 4
    rows = split.Rows(1, 1, quads)
    split.copy_rows(M.dt_bias.iterator, dt_bias + Int64(at.channel) * 4, none, none, rows, at, P)
    rows = split.Rows(1, 1, quads, first=quads)
    split.copy_rows(M.norm_weight.iterator, norm_weight, none, none, rows, at, P)
    if at.tid == P.threads - 1:
        blocks.copy_async(M.A_log.iterator.toint(), A_log + Int64(at.head) * 4, 4)
    if const_expr(P.kind == "record"):
        size, taps = P.weight_bytes, 3 * CONV_WIDTH
        units, part_bytes = HEAD_DIM * size // 16, Int64(at.D) * size
        rows = split.Rows(1, taps, units, first=2 * quads)
        split.copy_rows(M.taps.iterator, conv_weight + Int64(at.channel) * size, none, part_bytes, rows, at, P)
        if conv_bias != none:
            rows = split.Rows(1, 3, units, first=2 * quads + taps * units)
            split.copy_rows(M.bias.iterator, conv_bias + Int64(at.channel) * size, none, part_bytes, rows, at, P)
        else:
            if at.tid < HEAD_DIM:
                for part in range_constexpr(3):
                    M.bias[at.tid, part] = P.conv_dtype(0)


@cute.kernel
def kda_wide_decode(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    tid, _, _ = arch.thread_idx()
    head, request, _ = arch.block_idx()
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, slots + Int64(request) * slots_stride * 4, Int32(0))

    M = allocate(P)
    at = split.Place(tid, warp, lane, Int32(0), head, head * HEAD_DIM, heads * HEAD_DIM)
    load_weights(M, conv_weight, conv_bias, A_log, dt_bias, norm_weight, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    split.load_projection(M, projected + Int64(request) * pitch * 2, pitch, at, P)
    results = out + (Int64(request) * at.D + at.channel) * 2
    if page > 0:
        window = split.Window(conv_state + Int64(page) * conv_stride * 2, channel_stride, tap_stride, Int32(0))
        split.load_window(M, window, at, P)
        arch.cp_async_commit_group()
        gate_weights = cute.make_rmem_tensor((2, 2, chunked.STEPS), Uint32)
        chunked.load_gate_weights(gate_weights, f_b + Int64(at.channel) * (2 * HEAD_DIM), warp, lane)
        taps = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
        bias = cute.make_rmem_tensor(2, P.conv_dtype)
        load_taps(taps, bias, conv_weight, conv_bias, at, P)
        # Keeps these loads in front of the state's copies: behind them, they would come late.
        arch.sync_warp()
        item = state + (Int64(page) * state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes
        item = item + _row_piece(warp, lane, P)
        cells = M.state.iterator.toint() + tid * 16
        policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
        for group in range_constexpr(chunked.GROUPS):
            stage_rows(cells, item, group, policy, P)
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(chunked.GROUPS)
        arch.sync_threads()

        raw = chunked.raw_gates(gate_weights, M.f_a, lane, P.chains, P)
        store_decays(raw, M, lower_bound, at, P)
        if warp < _CONVOLVING_WARPS:
            convolve_token(M, taps, bias, window, at, P)
        if const_expr(P.layout != "rows"):
            split.store_window(M, window, at, P)
        arch.sync_threads()

        # This lane's columns, in the order of its cells of a row.
        k = take_vector(M, 1, lane, P)
        q = take_vector(M, 0, lane, P)
        d = take_vector(M, 2, lane, P)
        rk, rq, kq = split.normalizers(q, k, scale, _LANES)
        dk = cute.make_rmem_tensor(_COLUMNS, Float32)
        dq = cute.make_rmem_tensor(_COLUMNS, Float32)
        for i in range_constexpr(_COLUMNS):
            k[i] = k[i] * rk
            dk[i] = k[i] * d[i]
            dq[i] = q[i] * rq * d[i]
        beta = blocks.sigmoid(M.beta[head % 2, 0].to(Float32))
        if const_expr(P.layout == "rows"):
            split.store_window(M, window, at, P)

        # Lanes 8.. of a half-warp get o of rows 4 group + 2 (lane / 4 % 2) + half.
        o = cute.make_rmem_tensor(chunked.GROUPS, Float32)
        for group in range_constexpr(chunked.GROUPS):
            arch.cp_async_wait_group(chunked.GROUPS - 1 - group)
            o[group] = advance_rows(cells, item, M, dk, dq, d, k, beta, kq, group, warp, lane, P)
        square = Float32(0)
        for group in range_constexpr(chunked.GROUPS):
            o[group] = o[group].to(BFloat16).to(Float32)
            square += o[group] * o[group]
        square += arch.shuffle_sync_bfly(square, offset=4)
        square += arch.shuffle_sync_bfly(square, offset=16)
        if lane == 8:
            M.sums[warp] = square
        arch.sync_threads()
        normalize_rows(o, M, eps, results, warp, lane)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        split.store_zeros(results, at, P)


@cute.jit
def _row_piece(warp: Int32, lane: Int32, P: cutlass.Constexpr) -> Int32:
    """Byte of a state where this thread's first cell lies: a half-warp holds a row, a warp rows 16 warp .. +15."""
    return ((16 * warp + lane // _LANES) * HEAD_DIM) * P.item_bytes + lane % _LANES * 16


@cute.jit
def stage_rows(cells: Int32, item: Int64, group: cutlass.Constexpr, policy: Int64, P: cutlass.Constexpr) -> None:
    """Ask for this thread's cells of rows 4 group + 2j + half, j < 2, by cp.async."""
    count = P.item_bytes // 2  # cells of a row
    for j in range_constexpr(2):
        for c in range_constexpr(count):
            target = cells + ((2 * group + j) * count + c) * (_THREADS * 16)
            source = item + ((4 * group + 2 * j) * HEAD_DIM * P.item_bytes + c * (16 * _LANES))
            if const_expr(P.evict):
                blocks.copy_async_hinted(target, source, 16, policy)
            else:
                blocks.copy_async(target, source, 16)


@cute.jit
def load_taps(
    taps: cute.Tensor, bias: cute.Tensor, conv_weight: Int64, conv_bias: Int64, at: split.Place, P: cutlass.Constexpr
) -> None:
    """Convolution weight and bias of this thread's two channels."""
    bias.fill(P.conv_dtype(0))
    if at.warp < _CONVOLVING_WARPS:
        part, pair = at.tid // (HEAD_DIM // 2), at.tid % (HEAD_DIM // 2)
        size = P.weight_bytes
        for tap in range_constexpr(CONV_WIDTH):
            element = Int64(part * CONV_WIDTH + tap) * at.D + (at.channel + 2 * pair)
            source = cute.make_ptr(P.conv_dtype, conv_weight + element * size, GMEM, assumed_align=2 * size)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), taps[None, tap])
        if conv_bias != Int64(0):
            element = Int64(part) * at.D + (at.channel + 2 * pair)
            source = cute.make_ptr(P.conv_dtype, conv_bias + element * size, GMEM, assumed_align=2 * size)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), bias)


@cute.jit
def store_decays(
    raw: tuple[Float32, ...], M: cutlass.Constexpr, lower_bound: Float32, at: split.Place, P: cutlass.Constexpr
) -> None:
    """Decays of 16 features from `chunked.raw_gates`: all four lanes of a pair hold it, two take one each."""
    side = at.lane % 4
    feature = 16 * at.warp + at.lane // 4 * 2 + side % 2
    rounded = (raw[0] if side % 2 == 0 else raw[2]).to(BFloat16).to(Float32)
    d = blocks.exp(blocks.log_decay(rounded, M.dt_bias[feature], blocks.exp(M.A_log[0]), lower_bound))
    if side < 2:
        M.vectors[2 * HEAD_DIM + feature] = d


@cute.jit
def convolve_token(
    M: cutlass.Constexpr,
    taps: cute.Tensor,
    bias: cute.Tensor,
    window: split.Window,
    at: split.Place,
    P: cutlass.Constexpr,
) -> None:
    """Two channels of one of q, k, v; a window of layout rows is rolled."""
    pairs = HEAD_DIM // 2
    part, pair = at.tid // pairs, at.tid % pairs
    x = cute.make_tensor(
        M.x.iterator, cute.make_layout((2, pairs, 3, P.history + 1), stride=(1, 2, HEAD_DIM, 3 * HEAD_DIM))
    )
    past = cute.make_rmem_tensor((2, CONV_WIDTH - 1), BFloat16)
    new = cute.make_rmem_tensor(2, BFloat16)
    if const_expr(P.layout == "rows"):
        split.take_history(past, M, window, pair, part, P)
    else:
        for e in range_constexpr(CONV_WIDTH - 1):
            cute.autovec_copy(x[None, pair, part, e], past[None, e])
    cute.autovec_copy(x[None, pair, part, P.history], new)
    values = cute.make_rmem_tensor(2, Float32)
    for i in range_constexpr(2):
        y = bias[i].to(Float32)
        for tap in range_constexpr(CONV_WIDTH - 1):
            y += taps[i, tap].to(Float32) * past[i, tap].to(Float32)
        y += taps[i, CONV_WIDTH - 1].to(Float32) * new[i].to(Float32)
        values[i] = (y * blocks.sigmoid(y)).to(BFloat16).to(Float32)
    place = (3 if part == 2 else part) * pairs + pair
    vectors = cute.make_tensor(M.vectors.iterator, cute.make_layout((2, 4 * pairs), stride=(1, 2)))
    cute.autovec_copy(values, vectors[None, place])
    if const_expr(P.layout == "rows"):
        split.roll_window(past, x, M, window, pair, part, P)


@cute.jit
def take_vector(M: cutlass.Constexpr, part: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """q, k or the decay in this lane's columns: 64 c + 4 l .. +3 (fp32) or 8 l .. +7 (bf16), l of its half-warp."""
    stride = (1, 4, 64, HEAD_DIM) if const_expr(P.state_dtype == "fp32") else (1, 8, 4, HEAD_DIM)
    vectors = cute.make_tensor(M.vectors.iterator, cute.make_layout((4, _LANES, 2, 4), stride=stride))
    x = cute.make_rmem_tensor((4, 2), Float32)
    for c in range_constexpr(2):
        cute.autovec_copy(vectors[None, lane % _LANES, c, part], x[None, c])
    return cute.make_tensor(x.iterator, cute.make_layout(_COLUMNS))


@cute.jit
def advance_rows(
    cells: Int32,
    item: Int64,
    M: cutlass.Constexpr,
    dk: cute.Tensor,
    dq: cute.Tensor,
    d: cute.Tensor,
    k: cute.Tensor,
    beta: Float32,
    kq: Float32,
    group: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> Float32:
    """Rows 4 group + 2j + half, j < 2, by one token, from their cells back to their page.

    Returns o of row j = lane / 4 % 2 in lanes 8.. of each half-warp.
    """
    count = P.item_bytes // 2
    S = cute.make_rmem_tensor((_COLUMNS, 2), Float32)
    sums = cute.make_rmem_tensor(4, Float32)  # S dk of both rows, S dq of both
    for j in range_constexpr(2):
        raw = cute.make_rmem_tensor(_COLUMNS, P.dtype)
        width = 16 // P.item_bytes
        pieces = cute.make_tensor(raw.iterator, cute.make_layout((width, count), stride=(1, width)))
        for c in range_constexpr(count):
            cell = cells + ((2 * group + j) * count + c) * (_THREADS * 16)
            source = cute.make_tensor(cute.make_ptr(P.dtype, cell, SMEM, assumed_align=16), cute.make_layout(width))
            cute.autovec_copy(source, pieces[None, c])
        w, y = Float32(0), Float32(0)
        for i in range_constexpr(_COLUMNS):
            S[i, j] = raw[i].to(Float32)
            w += S[i, j] * dk[i]
            y += S[i, j] * dq[i]
        sums[j] = w
        sums[2 + j] = y
    # Lanes 0..3 of a half-warp get w of the first row, then of the second, then y of both.
    total = blocks.row_sums(sums, 4, _LANES, lane)
    row = 16 * warp + 4 * group + lane // 4 % 2 * 2 + lane // _LANES
    u = beta * (M.vectors[3 * HEAD_DIM + row] - total)
    o = total + kq * arch.shuffle_sync_bfly(u, offset=8)
    half = (32 - _LANES) << 8 | 31
    for j in range_constexpr(2):
        u_row = arch.shuffle_sync(u, 4 * j, mask_and_clamp=half)
        raw = cute.make_rmem_tensor(_COLUMNS, P.dtype)
        for i in range_constexpr(_COLUMNS):
            raw[i] = (S[i, j] * d[i] + u_row * k[i]).to(P.dtype)
        store_row(raw, item + (4 * group + 2 * j) * HEAD_DIM * P.item_bytes, P)
    return o


@cute.jit
def store_row(raw: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    """This lane's cells of a row to global memory."""
    count, width = P.item_bytes // 2, 16 // P.item_bytes
    mode = cute.nvgpu.StoreCacheMode.NONE
    if const_expr(P.hints):
        mode = cute.nvgpu.StoreCacheMode.STREAMING
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), P.dtype, num_bits_per_copy=128, store_cache_mode=mode)
    pieces = cute.make_tensor(raw.iterator, cute.make_layout((width, count), stride=(1, width)))
    target = cute.make_tensor(
        cute.make_ptr(P.dtype, address, GMEM, assumed_align=16),
        cute.make_layout((width, count), stride=(1, _LANES * width)),
    )
    for c in range_constexpr(count):
        cute.copy(atom, pieces[None, c], target[None, c])


@cute.jit
def normalize_rows(
    o: cute.Tensor, M: cutlass.Constexpr, eps: Float32, results: Int64, warp: Int32, lane: Int32
) -> None:
    """RMSNorm and output gate; lane 8 + 4j + group of a half-warp stores that group's row."""
    group = lane % 4
    mine = o[0]
    for g in range_constexpr(1, chunked.GROUPS):
        mine = o[g] if group == g else mine
    row = 16 * warp + 4 * group + lane // 4 % 2 * 2 + lane // _LANES
    gated = M.norm_weight[row] * blocks.sigmoid(M.out_gate[row, 0].to(Float32))
    quads = cute.make_tensor(M.sums.iterator, cute.make_layout((4, 2), stride=(1, 4)))
    part = cute.make_rmem_tensor((4, 2), Float32)
    for i in range_constexpr(2):
        cute.autovec_copy(quads[None, i], part[None, i])
    total = ((part[0, 0] + part[1, 0]) + (part[2, 0] + part[3, 0])) + (
        (part[0, 1] + part[1, 1]) + (part[2, 1] + part[3, 1])
    )
    rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + eps)
    if lane % _LANES >= 8:
        blocks.put(BFloat16, results + Int64(row) * 2, (mine * rms * gated).to(BFloat16))


@cute.kernel
def kda_wide_recurrence(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    norm_weight: Int64,
    state: Int64,
    slots: Int64,
    accepted: Int64,
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    channel_stride: Int32,
    tap_stride: Int32,
    state_stride: Int64,
    slots_stride: Int32,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    """A window token by token: `split.kda_split` for one CTA."""
    tid, _, _ = arch.thread_idx()
    head, request, _ = arch.block_idx()
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    table = slots + Int64(request) * slots_stride * 4
    mine = blocks.at(Int32, table, min(lane, P.tokens - 1) if const_expr(P.kind == "spec") else Int32(0))
    page, read, start, row = mine, mine, Int32(0), Int32(-1)
    if const_expr(P.kind == "spec"):
        count = blocks.at(Int32, accepted, request)
        start = min(max(count - 1, Int32(0)), Int32(P.tokens - 1))
        page = arch.shuffle_sync(mine, 0)
        read = arch.shuffle_sync(mine, start)
    else:
        row = blocks.pinned(blocks.at(Int32, record_rows, request))

    M = split.allocate(P)
    at = split.Place(tid, warp, lane, Int32(0), head, head * HEAD_DIM, heads * HEAD_DIM)
    split.load_weights(M, conv_weight, conv_bias, f_b, A_log, dt_bias, norm_weight, at, P)
    results = out + (Int64(request * P.tokens) * at.D + at.channel) * 2
    if page > 0 and read > 0:
        window = split.Window(conv_state + Int64(page) * conv_stride * 2, channel_stride, tap_stride, start)
        split.load_window(M, window, at, P)
        pages = state + Int64(head * (HEAD_DIM * HEAD_DIM) + split.thread_offset(at, P)) * P.item_bytes
        page_bytes = state_stride * P.item_bytes
        raw = cute.make_rmem_tensor((P.vector, P.chunks, P.thread_rows), P.dtype)
        if const_expr(P.staging == "registers"):
            split.load_state(raw, pages + Int64(read) * page_bytes, P)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        split.load_projection(M, projected + Int64(request * P.tokens) * pitch * 2, pitch, at, P)
        arch.cp_async_commit_group()
        if const_expr(P.staging == "shared"):
            split.stage_state(M, pages + Int64(read) * page_bytes, at, P)
            arch.cp_async_commit_group()
            arch.cp_async_wait_group(1)
        else:
            arch.cp_async_wait_group(0)
        arch.sync_threads()

        first = Int64(head * record_tokens) * HEAD_DIM
        record = split.Record(
            row,
            key_gates + (Int64(row) * key_gates_stride + first * 2) * 2,
            corrections + (Int64(row) * corrections_stride + first) * 4,
        )
        split.gate(M, lower_bound, record, at, P)
        split.convolve(M, window, record, at, P)
        arch.sync_threads()
        if const_expr(P.staging == "shared"):
            arch.cp_async_wait_group(0)
            split.unstage_state(raw, M, at, P)
        split.factors(M, scale, at, P)
        arch.sync_threads()
        split.store_window(M, window, at, P)
        S = cute.make_rmem_tensor((P.vector, P.chunks, P.thread_rows), Float32)
        S.store(raw.load().to(Float32))
        own = warp * P.warp_rows + P.step * (lane % P.lanes // P.copies) + lane // P.lanes  # row of this lane's sums
        split.recurrence(S, M, mine, pages, page_bytes, own, at, P)
        arch.sync_threads()
        split.normalize(M, eps, results, record, at, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        split.store_zeros(results, at, P)
