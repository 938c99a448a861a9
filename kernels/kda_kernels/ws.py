"""KDA record step for many items: persistent, one CTA per SM, its warps specialized.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16, only read
corrections [rows, heads, Q, 128]          f32, written
key_gates   [rows, heads, Q, 256]          bf16, written
out         [requests * tokens, D]         bf16

A CTA walks a run of consecutive items, in the chunked form of docs/operation.md. In its steady state three groups of
warps work on three items:
  prologue  4 or 8 warps, item i+1: convolution, gate on tensor cores, decays, norms; leaves the window, the recorded
            keys and gates, and as MMA fragments the 2q vectors Gamma_t k_t, Gamma_t q_t and the q vectors
            k_t / Gamma_t. The inputs of item i+2 are on their way
  product   8 warps, item i: 16 state rows each. w = S (Gamma k), y = S (Gamma q) on tensor cores, state and vectors
            split in two BF16 terms; the state of items i and i+1 (BF16: up to i+3) lies in cells of shared memory that
            are private to the threads, and refilled piece by piece with the item after those. The products of vectors
            with vectors, A and B, come from the same fragments: k_s / Gamma_s are further state rows
  epilogue  4 warps, item i-1: thread = row; substitution, corrections; RMSNorm and output gate, thread = 8 channels
Norms are deferred: all vectors stay unnormalized, and with u'_s = rk_s u_s
  u_t = beta_t (v_t - rk_t (w_t + sum_{s<t} A_ts u'_s)),  o_t = rq_t (y_t + sum_{s<=t} B_ts u'_s)

Handed on by mbarriers, a full and an empty one per stage: fragments (prologue to product), results (product to
epilogue); values and factors go from the prologue to the epilogue behind them and have an empty one alone.

Order of items: blocks of as many requests as a CTA has items; in a block, head by head. A CTA so keeps one head (its
gate weights stay in registers), and neighbouring CTAs work on neighbouring heads of one request at a time.
Source: docs/operation.md, "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from kda_kernels import blocks, cubin
from kda_kernels.gpu import Gpu
from kda_kernels.operands import StepOperands
from kdabench.problem import CONV_WIDTH, HEAD_DIM, Problem, StateDtype, ceil_div

KERNELS = ("kda_ws",)
SOURCES = ("ws.py", "blocks.py", "cubin.py")

PRODUCT = 8  # warps
REGISTERS = {4: (168, 120, 104), 8: (104, 96, 80)}
"""Record: of a thread of each group, by setmaxnreg, by warps of the prologue: it keeps a head's gate weights in 64 or
32 of them. Multiples of 8; together what the CTA is launched with, 128 per thread or 96.
"""
FRAGMENT_STAGES = 2
VALUE_STAGES = 3
MIN_LOG_DECAY = -64.0
"""lower_bound * tokens must not lie below: 1 / Gamma and its split must stay far inside FP32."""

_PRODUCT_THREADS = 32 * PRODUCT
_PROLOGUE_BARRIER, _EPILOGUE_BARRIER = 1, 2
_HISTORY = CONV_WIDTH - 1
_UNIT = 8  # bf16 elements of a 16-byte copy
_STEPS = HEAD_DIM // 16  # MMA steps along K
_RESULT_PITCH = HEAD_DIM + 4  # pitches that spread an MMA's rows over the banks
_DECAY_PITCH = HEAD_DIM + 4
_GATE_PITCH = HEAD_DIM + 8
_KEY_EPS = 1e-6
_LOG2E = 1.4426950408889634

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and `pdl` of the launch.

    prologue           warps of the prologue: 4, or for record 8; None: 8 for record
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order
    terms              BF16 terms that the vectors are split in; 1 only with a BF16 state
    conv_weight_dtype  of convolution weight and bias
    window             entries W of a dim-first window; None: those of the problem
    pdl                programmatic dependent launch
    """

    prologue: Literal[4, 8] | None = None
    gate_mode: int = 0
    terms: int = 2
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Compiled:
    binary: cubin.Binary
    plan: Plan
    sms: int
    pdl: bool

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


@dataclass(frozen=True)
class Plan:
    """What decides the code: the problem's compile-time part and the Spec's. Its repr is the cache key.

    layout   of the window: rows = dim-first, taps = window-major
    window   entries of a `rows` window
    """

    kind: str
    tokens: int
    state_dtype: StateDtype
    layout: Literal["rows", "taps"]
    window: int
    prologue: int
    gate_mode: int
    terms: int
    weight_dtype: str
    state_stages: int
    result_stages: int

    @property
    def item_bytes(self) -> int:
        return 4 if self.state_dtype == "fp32" else 2

    @property
    def conv_dtype(self) -> Any:
        return Float32 if self.weight_dtype == "fp32" else BFloat16

    @property
    def weight_bytes(self) -> int:
        return 4 if self.weight_dtype == "fp32" else 2

    @property
    def epilogue(self) -> int:
        """Warps of the epilogue."""
        return 1 if self.kind == "decode" else 4

    @property
    def threads(self) -> int:
        return 32 * (self.prologue + PRODUCT + self.epilogue)

    @property
    def epilogue_threads(self) -> int:
        return 32 * self.epilogue

    @property
    def prologue_threads(self) -> int:
        return 32 * self.prologue

    @property
    def gate_tiles(self) -> int:
        """MMA tiles of 16 features per warp of the prologue."""
        return HEAD_DIM // 16 // self.prologue

    @property
    def warp_tokens(self) -> int:
        """Tokens that a warp of the prologue convolves."""
        return ceil_div(self.tokens, self.prologue)

    @property
    def padded(self) -> int:
        """Tokens that have room: whole warps of `warp_tokens`."""
        return self.warp_tokens * ceil_div(self.tokens, self.warp_tokens)

    @property
    def tiles(self) -> int:
        """MMA tiles of 8 vectors: keys and queries share one up to four tokens."""
        return 1 if self.tokens <= 4 else 2

    @property
    def vectors(self) -> int:
        """Columns of the products; vector t is Gamma_t k_t, vector `vectors / 2 + t` Gamma_t q_t."""
        return 8 * self.tiles

    @property
    def partials(self) -> int:
        """Warps that share a tile of A and B, each `tiles` steps along K."""
        return PRODUCT // self.tiles

    @property
    def dtype(self) -> Any:
        return Float32 if self.state_dtype == "fp32" else BFloat16

    @property
    def vector(self) -> int:
        """State elements of a 16-byte cell."""
        return 16 // self.item_bytes

    @property
    def units(self) -> int:
        """Cells of a page per thread of the product."""
        return HEAD_DIM * HEAD_DIM // (self.vector * _PRODUCT_THREADS)

    @property
    def groups(self) -> int:
        """Groups of copies of a page: two MMA steps each, or for decode all."""
        return 1 if self.kind == "decode" else _STEPS // 2

    @property
    def rows(self) -> int:
        """Rows of inputs in shared memory: the window's last three, then the step's."""
        return _HISTORY + self.padded

    @property
    def result_words(self) -> int:
        """A stage of results: w and y, then the partial sums of A and B; for decode o."""
        if self.kind == "decode":
            return HEAD_DIM
        return self.vectors * _RESULT_PITCH + self.partials * 8 * self.vectors

    @property
    def fragment_words(self) -> int:
        """A stage of fragments: (word, lane, tile, step); the last tile holds k / Gamma. For decode vectors in FP32:
        d k, d q, d, k, v; then k.k, q.q and k.q, a part per warp; then beta.
        """
        if self.kind == "decode":
            return 5 * HEAD_DIM + 4 * self.prologue + 4
        return _STEPS * (self.tiles + 1) * 128

    @property
    def barriers(self) -> int:
        return 2 * FRAGMENT_STAGES + 2 * self.result_stages + VALUE_STAGES

    @property
    def areas(self) -> dict[str, int]:
        """Bytes of shared memory by use, multiples of 16."""
        areas = {
            "state": self.state_stages * HEAD_DIM * HEAD_DIM * self.item_bytes,
            "inputs": 2 * self.rows * 3 * HEAD_DIM * 2,
            "f_a": 2 * self.tokens * HEAD_DIM * 2,
            "beta": 2 * 16 * ceil_div(self.padded * 4, 16),
            "window": 2 * 3 * HEAD_DIM * self.window * 2,
            "taps": 3 * CONV_WIDTH * HEAD_DIM * self.weight_bytes,
            "bias": 3 * HEAD_DIM * self.weight_bytes,
            "decays": self.padded * _DECAY_PITCH * 4,
            "fragments": FRAGMENT_STAGES * self.fragment_words * 4,
            "results": self.result_stages * self.result_words * 4,
            "barriers": 16 * ceil_div(self.barriers * 8, 16),
        }
        if self.kind == "record":
            areas |= {
                "gates": self.padded * _GATE_PITCH * 2,
                "values": VALUE_STAGES * self.padded * HEAD_DIM * 2,
                "factors": VALUE_STAGES * self.padded * 16,
                "coefficients": 8 * self.vectors * 4,
                "outputs": self.tokens * HEAD_DIM * 2,
            }
        return areas

    @property
    def smem_bytes(self) -> int:
        return sum(self.areas.values())


def plan(problem: Problem, spec: Spec, gpu: Gpu) -> Plan:
    """As many stages of state as fit (at least 2), up to 192 KiB for decode, 128 KiB else; of results 2 if they fit."""
    layout: Literal["rows", "taps"] = "rows" if problem.conv_layout == "dim-first" else "taps"
    window = spec.window if spec.window is not None else problem.window

    def with_stages(state: int, results: int) -> Plan:
        return Plan(
            kind=problem.kind,
            tokens=problem.tokens,
            state_dtype=problem.state_dtype,
            layout=layout,
            window=window if layout == "rows" else 0,
            prologue=spec.prologue or (8 if problem.kind == "record" else 4),
            gate_mode=spec.gate_mode,
            terms=spec.terms,
            weight_dtype=spec.conv_weight_dtype,
            state_stages=state,
            result_stages=results,
        )

    most = (3 if problem.kind == "decode" else 2) * (1 if problem.state_dtype == "fp32" else 2)
    plans = [*(with_stages(stages, 2) for stages in range(most, 1, -1)), with_stages(2, 1)]
    return next((p for p in plans if p.smem_bytes <= gpu.smem_per_block), plans[-1])


def schedule(items: int, sms: int) -> tuple[int, int]:
    """Items per CTA, at least two, and CTAs, one per SM.

    Raises ValueError if a count is below one.
    """
    if min(items, sms) < 1:
        raise ValueError(f"counts must be >= 1: {items=} {sms=}")
    per = max(2, ceil_div(items, sms))
    return per, ceil_div(items, per)


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind == "spec":
        return "kind=spec: every token's state is written, which hides a serial window; KdaSplit does it as fast"
    if problem.kind not in ("decode", "record"):
        return f"kind={problem.kind}: only decode and record"
    for name, value, allowed in (
        ("prologue", spec.prologue, (None, 4, 8)),
        ("gate_mode", spec.gate_mode, (0, 1)),
        ("terms", spec.terms, (1, 2)),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
    ):
        if value not in allowed:
            return f"{name}={value!r} is not one of {', '.join(map(str, allowed))}"
    if spec.prologue == 8 and problem.kind == "decode":
        return "prologue=8: only record"
    if spec.terms == 1 and problem.state_dtype == "fp32":
        return "terms=1: too coarse for an FP32 state"
    if spec.window is not None and not problem.tokens + 2 <= spec.window <= 16:
        return f"window={spec.window} must lie in {problem.tokens + 2}..16"
    p = plan(problem, spec, gpu)
    if p.smem_bytes > gpu.smem_per_block:
        return f"{p.smem_bytes} bytes of shared memory exceed {gpu.smem_per_block}"
    return None


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    reason = unsupported(problem, spec, gpu)
    if reason is not None:
        raise ValueError(f"KdaWS: {reason}")
    p = plan(problem, spec, gpu)
    binary = cubin.build(
        _host, lambda: _arguments(p), arch=gpu.arch, threads=p.threads, cluster=1, sources=SOURCES, choices=p
    )
    return Compiled(binary, p, gpu.sms, spec.pdl)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    o, p = operands, compiled.plan
    _check(p, o)
    assert o.corrections is not None
    assert o.key_gates is not None
    heads, requests = o.A_log.shape[0], o.slots.shape[0]
    per, ctas = schedule(heads * requests, compiled.sms)
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
        o.corrections,
        o.key_gates,
        o.record_rows,
        o.out,
    )
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    strides = (
        o.projected.stride(0),
        o.conv_state.stride(0),
        o.conv_state.stride(2),
        o.state.stride(0),
        o.slots.stride(0),
        o.corrections.stride(0),
        o.key_gates.stride(0),
    )
    values = (*addresses, *strides, o.corrections.shape[2], heads, requests, per, o.lower_bound, o.scale, o.eps)
    cubin.launcher(compiled.binary).launch((ctas, 1, 1), values, stream, compiled.pdl)  # type: ignore[arg-type]


def _check(p: Plan, o: StepOperands) -> None:
    def refuse(name: str, rule: str) -> None:
        tensor = getattr(o, name)
        about = "" if tensor is None else f" ({tensor.dtype}, {tuple(tensor.shape)}, strides {tensor.stride()})"
        raise ValueError(f"{name}{about} {rule}")

    if o.lower_bound is None:
        raise ValueError("lower_bound is None: KdaWS needs a bounded gate")
    if o.lower_bound * p.tokens < MIN_LOG_DECAY:
        raise ValueError(f"lower_bound={o.lower_bound} times {p.tokens} tokens is below {MIN_LOG_DECAY}")
    bf16, f32, int32 = "torch.bfloat16", "torch.float32", "torch.int32"
    weight = f32 if p.weight_dtype == "fp32" else bf16
    dtypes = {
        "projected": bf16,
        "conv_weight": weight,
        "conv_state": bf16,
        "f_b": bf16,
        "A_log": f32,
        "dt_bias": f32,
        "norm_weight": f32,
        "state": f32 if p.state_dtype == "fp32" else bf16,
        "slots": int32,
        "corrections": f32,
        "key_gates": bf16,
        "record_rows": int32,
        "out": bf16,
    }
    if o.conv_bias is not None:
        dtypes["conv_bias"] = weight
    for name, dtype in dtypes.items():
        tensor = getattr(o, name)
        if tensor is None or str(tensor.dtype) != dtype:
            refuse(name, f"must be {dtype} for the compiled kernel")
    heads, requests = o.A_log.shape[0], o.slots.shape[0]
    D = heads * HEAD_DIM
    for name in ("conv_weight", "conv_bias", "f_b", "A_log", "dt_bias", "norm_weight", "record_rows", "out"):
        if name in dtypes and not getattr(o, name).is_contiguous():
            refuse(name, "must be contiguous")
    for name in ("projected", "conv_weight", "conv_bias", "conv_state", "norm_weight", "state", "out"):
        if name in dtypes and getattr(o, name).data_ptr() % 16:
            refuse(name, "must start at a multiple of 16 bytes")
    for name in ("state", "corrections", "key_gates"):
        if not getattr(o, name)[0].is_contiguous():
            refuse(name, "must be dense but for its leading stride")
    if o.state.stride(0) * p.item_bytes % 16:
        refuse("state", "must have 16-byte aligned pages")
    if o.f_b.data_ptr() % 4:
        refuse("f_b", "must start at a multiple of 4 bytes")
    if o.dt_bias.shape[0] != D:
        refuse("dt_bias", f"must have {D} elements")
    if o.projected.stride(1) != 1 or o.projected.stride(0) % _UNIT:
        refuse("projected", "must have contiguous, 16-byte aligned rows: the step must be streamable")
    if o.slots.ndim == 2 and o.slots.shape[1] != 1:
        refuse("slots", "must hold one slot per request")
    if o.projected.shape[0] != requests * p.tokens:
        refuse("projected", f"must have {p.tokens} rows per request")
    if o.projected.shape[1] < 4 * D + HEAD_DIM + heads:
        refuse("projected", f"must have {4 * D + HEAD_DIM + heads} columns")
    if o.corrections is not None and o.key_gates is not None:
        if o.corrections.shape[2] < p.tokens:
            refuse("corrections", f"must hold {p.tokens} tokens")
        if o.key_gates.shape[2] != o.corrections.shape[2]:
            refuse("key_gates", "must hold as many tokens as corrections")
        if o.key_gates.data_ptr() % 8 or o.key_gates.stride(0) % 4:
            refuse("key_gates", "must have 8-byte aligned rows")
    slot, channel, tap = o.conv_state.stride()
    entries = o.conv_state.shape[2]
    if entries < p.tokens + 2:
        refuse("conv_state", f"must have at least {p.tokens + 2} entries")
    if slot % _UNIT:
        refuse("conv_state", "must have 16-byte aligned slots: the step must be streamable")
    if p.layout == "rows" and not (tap == 1 and channel == entries == p.window):
        refuse("conv_state", f"must be dim-first with {p.window} entries for the compiled kernel")
    if p.layout == "taps" and not (channel == 1 and tap % _UNIT == 0):
        refuse("conv_state", "must be window-major with 16-byte aligned entries for the compiled kernel")


def _arguments(p: Plan) -> tuple[Any, ...]:
    strides = (Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0))
    counts = (Int32(0), Int32(1), Int32(1), Int32(2))
    return (*(Int64(0),) * 14, *strides, *counts, Float32(-5), Float32(1), Float32(1e-5), p)


@cute.jit
def _host(
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
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    tap_stride: Int64,
    state_stride: Int64,
    slots_stride: Int64,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    requests: Int32,
    per: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    kda_ws(
        projected,
        conv_weight,
        conv_bias,
        conv_state,
        f_b,
        A_log,
        dt_bias,
        norm_weight,
        state,
        slots,
        corrections,
        key_gates,
        record_rows,
        out,
        pitch,
        conv_stride,
        tap_stride,
        state_stride,
        slots_stride,
        corrections_stride,
        key_gates_stride,
        record_tokens,
        heads,
        requests,
        per,
        lower_bound,
        scale,
        eps,
        P,
    ).launch(grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=1)


@cute.kernel
def kda_ws(
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
    corrections: Int64,
    key_gates: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    conv_stride: Int64,
    tap_stride: Int64,
    state_stride: Int64,
    slots_stride: Int64,
    corrections_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    requests: Int32,
    per: Int32,
    lower_bound: Float32,
    scale: Float32,
    eps: Float32,
    P: cutlass.Constexpr,
) -> None:
    thread, _, _ = arch.thread_idx()
    cta, _, _ = arch.block_idx()
    lane = thread % 32
    warp = arch.make_warp_uniform(thread // 32)

    smem = SmemAllocator()
    s_state = _take(smem, Uint32, "state", P)
    s_inputs = _take(smem, BFloat16, "inputs", P)
    s_f_a = _take(smem, BFloat16, "f_a", P)
    s_beta = _take(smem, BFloat16, "beta", P)
    s_window = s_inputs
    if const_expr(P.layout == "rows"):
        s_window = _take(smem, BFloat16, "window", P)
    s_taps = _take(smem, P.conv_dtype, "taps", P)
    s_bias = _take(smem, P.conv_dtype, "bias", P)
    s_decays = _take(smem, Float32, "decays", P)
    s_gates = _take(smem, BFloat16, "gates", P)
    s_fragments = _take(smem, Uint32, "fragments", P)
    s_results = _take(smem, Float32, "results", P)
    s_values = _take(smem, BFloat16, "values", P)
    s_factors = _take(smem, Float32, "factors", P)
    s_coefficients = _take(smem, Float32, "coefficients", P)
    s_outputs = _take(smem, BFloat16, "outputs", P)
    barriers = _take(smem, Int64, "barriers", P).iterator
    fragments_full = barriers
    fragments_empty = barriers + FRAGMENT_STAGES
    results_full = barriers + 2 * FRAGMENT_STAGES
    results_empty = results_full + P.result_stages
    values_empty = results_empty + P.result_stages

    if thread == 0:
        for s in range_constexpr(FRAGMENT_STAGES):
            arch.mbarrier_init(fragments_full + s, P.prologue)
            arch.mbarrier_init(fragments_empty + s, PRODUCT)
        for s in range_constexpr(P.result_stages):
            arch.mbarrier_init(results_full + s, PRODUCT)
            arch.mbarrier_init(results_empty + s, EPILOGUE)
        for s in range_constexpr(VALUE_STAGES):
            arch.mbarrier_init(values_empty + s, EPILOGUE)
        arch.mbarrier_init_fence()
    arch.sync_threads()

    count = min(per, heads * requests - cta * per)
    registers = REGISTERS[P.prologue]
    if warp < P.prologue:
        arch.setmaxregister_increase(registers[0])
        prologue(
            projected,
            conv_weight,
            conv_bias,
            conv_state,
            f_b,
            A_log,
            dt_bias,
            slots,
            key_gates,
            record_rows,
            pitch,
            conv_stride,
            tap_stride,
            slots_stride,
            key_gates_stride,
            record_tokens,
            heads,
            requests,
            per,
            lower_bound,
            scale,
            s_inputs,
            s_f_a,
            s_beta,
            s_window,
            s_taps,
            s_bias,
            s_decays,
            s_gates,
            s_fragments,
            s_values,
            s_factors,
            fragments_full,
            fragments_empty,
            values_empty,
            count,
            cta,
            warp,
            lane,
            P,
        )
    elif warp < P.prologue + PRODUCT:
        if const_expr(P.prologue == 4):
            arch.setmaxregister_decrease(registers[1])
        product(
            state,
            slots,
            state_stride,
            slots_stride,
            heads,
            requests,
            per,
            s_state,
            s_fragments,
            s_results,
            fragments_full,
            fragments_empty,
            results_full,
            results_empty,
            count,
            cta,
            warp - P.prologue,
            lane,
            P,
        )
    else:
        arch.setmaxregister_decrease(registers[2])
        epilogue(
            projected,
            norm_weight,
            slots,
            corrections,
            record_rows,
            out,
            pitch,
            slots_stride,
            corrections_stride,
            record_tokens,
            heads,
            requests,
            per,
            eps,
            s_results,
            s_values,
            s_factors,
            s_coefficients,
            s_outputs,
            results_full,
            results_empty,
            values_empty,
            count,
            cta,
            thread - 32 * (P.prologue + PRODUCT),
            P,
        )


@cute.jit
def _take(smem: SmemAllocator, dtype: Any, name: cutlass.Constexpr, P: cutlass.Constexpr) -> cute.Tensor:
    """A flat area of shared memory."""
    count = P.areas[name] // (dtype.width // 8)
    return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)


@cute.jit
def first_item(cta: Int32, per: Int32, heads: Int32, requests: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """A CTA's first item: head, request; and its block of requests: first, number."""
    size = min(per, requests)
    blocks_ = requests // size
    index = cta * per
    block = min(index // (size * heads), blocks_)
    index = index - block * size * heads
    first = block * size
    if block == blocks_:
        size = requests - first
    head = index // size
    return head, first + index - head * size, first, size


@cute.jit
def next_item(
    head: Int32, request: Int32, first: Int32, size: Int32, heads: Int32, requests: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """The item after it; past the last one, request = requests."""
    request = request + 1
    if request == first + size:
        head = head + 1
        if head == heads:
            head = Int32(0)
            first = first + size
            size = min(size, requests - first)
        request = first
    return head, request, first, size


@cute.jit
def of_request(table: Int64, stride: Int64, request: Int32, zero: Int32) -> Int32:
    """An int32 of a request, from a table of any stride. `zero` is 0, which the compiler must not know: what it takes
    for the same in all lanes it moves to a uniform register, and so waits for it at once.
    """
    return blocks.at(Int32, table + Int64(request) * stride * 4, zero)


@cute.jit
def arrive(barrier: cute.Pointer, lane: Int32) -> None:
    """One arrival for the warp, behind all that its lanes have done."""
    arch.sync_warp()
    if lane == 0:
        arch.mbarrier_arrive(barrier)


@cute.jit
def number(word: Uint32) -> Float32:
    """The same bits as FP32."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


@cute.jit
def pair(low: Float32, high: Float32) -> Uint32:
    """Two numbers rounded to BF16 in one word."""
    return arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


@cute.jit
def upper_halves(low: Uint32, high: Uint32) -> Uint32:
    """Two FP32 truncated to BF16 in one word."""
    return arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", write_only_types=[Uint32], read_only_args=[low, high]
    )


@cute.jit
def rest(low: Uint32, high: Uint32) -> Uint32:
    """What `upper_halves` leaves of two FP32, rounded to BF16, in one word."""
    mask = Uint32(0xFFFF0000)
    return pair(number(low) - number(low & mask), number(high) - number(high & mask))


@cute.jit
def put_fragment(x: cute.Tensor, fragments: cute.Tensor, place: Int32, tile: cutlass.Constexpr, step: Int32) -> None:
    """Four neighbouring columns of a vector as a lane's fragment: two words of first terms, two of second ones."""
    words = cute.make_rmem_tensor(4, Uint32)
    for i in range_constexpr(2):
        low, high = x[2 * i], x[2 * i + 1]
        first = pair(low, high)
        words[i] = first
        words[2 + i] = pair(low - number(first << 16), high - number(first & Uint32(0xFFFF0000)))
    cute.autovec_copy(words, fragments[None, place, tile, step])


@cute.jit
def prologue(
    projected: Int64,
    conv_weight: Int64,
    conv_bias: Int64,
    conv_state: Int64,
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    slots: Int64,
    key_gates: Int64,
    record_rows: Int64,
    pitch: Int64,
    conv_stride: Int64,
    tap_stride: Int64,
    slots_stride: Int64,
    key_gates_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    requests: Int32,
    per: Int32,
    lower_bound: Float32,
    scale: Float32,
    s_inputs: cute.Tensor,
    s_f_a: cute.Tensor,
    s_beta: cute.Tensor,
    s_window: cute.Tensor,
    s_taps: cute.Tensor,
    s_bias: cute.Tensor,
    s_decays: cute.Tensor,
    s_gates: cute.Tensor,
    s_fragments: cute.Tensor,
    s_values: cute.Tensor,
    s_factors: cute.Tensor,
    fragments_full: cute.Pointer,
    fragments_empty: cute.Pointer,
    values_empty: cute.Pointer,
    count: Int32,
    cta: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Round n asks for the inputs of item n and works on item n-1; an item's inputs have two stages."""
    tid = warp * 32 + lane
    zero = Int32(lane >= 32 * heads)
    D = heads * HEAD_DIM
    head, request, first, size = first_item(cta, per, heads, requests)
    slot = of_request(slots, slots_stride, request, zero)
    record = of_request(record_rows, Int64(1), request, zero)
    # The item before: the one that is worked on.
    own_head, own_slot, own_record = head, Int32(0), Int32(-1)

    loaded = Int32(-1)  # head whose weights are there
    weights = cute.make_rmem_tensor((2, 2, _STEPS, P.gate_tiles), Uint32)
    biases = cute.make_rmem_tensor((2, P.gate_tiles), Float32)
    a_log = Float32(0)

    value_stage, value_phase = Int32(0), Int32(1)
    for n in cutlass.range(count + 1, unroll=1):
        stage = n & 1
        arch.cp_async_wait_group(0)
        # The inputs of item n-1 are there, and nobody needs those of item n-2.
        arch.barrier(barrier_id=_PROLOGUE_BARRIER, number_of_threads=P.prologue_threads)

        later = next_item(head, request, first, size, heads, requests)
        later_slot, later_record = Int32(0), Int32(-1)
        if n + 1 < count:
            later_slot = of_request(slots, slots_stride, later[1], zero)
            later_record = of_request(record_rows, Int64(1), later[1], zero)

        if own_head != loaded:
            loaded = own_head
            load_taps(conv_weight, conv_bias, s_taps, s_bias, own_head, D, tid, P)
            a_log = load_gate(f_b, A_log, dt_bias, weights, biases, own_head, zero, warp, lane, P)
        arch.cp_async_commit_group()
        if n < count and slot > 0:
            window = conv_state + Int64(slot) * conv_stride * 2
            load_window(window, s_window, s_inputs, tap_stride, stage, head, D, tid, P)
        if n == 0:
            arch.griddepcontrol_wait()
            arch.griddepcontrol_launch_dependents()
        if n < count and slot > 0:
            row = projected + Int64(request * P.tokens) * pitch * 2
            load_projection(row, pitch, s_inputs, s_f_a, s_beta, stage, head, D, tid, P)
        arch.cp_async_commit_group()

        if n > 0:
            before = stage ^ 1
            x = stage_of(s_inputs, before, 2)
            if own_slot > 0:
                if const_expr(P.layout == "rows"):
                    roll_window(stage_of(s_window, before, 2), x, tid, P)
                gate(weights, biases, a_log, lower_bound, stage_of(s_f_a, before, 2), s_decays, s_gates, warp, lane, P)
            arch.cp_async_wait_group(1)  # the taps
            arch.barrier(barrier_id=_PROLOGUE_BARRIER, number_of_threads=P.prologue_threads)

            # Item n-1 takes the stage (n-1) % 2 for the (n-1) / 2-th time.
            arch.mbarrier_wait(fragments_empty + before, (((n - 1) >> 1) & 1) ^ 1)
            arch.mbarrier_wait(values_empty + value_stage, value_phase)
            if own_slot > 0:
                records = (
                    key_gates
                    + (Int64(own_record) * key_gates_stride + Int64(own_head * record_tokens) * (2 * HEAD_DIM)) * 2
                )
                vectors(
                    x,
                    s_taps,
                    s_bias,
                    s_decays,
                    s_gates,
                    stage_of(s_beta, before, 2),
                    stage_of(s_fragments, before, FRAGMENT_STAGES),
                    stage_of(s_values, value_stage, VALUE_STAGES),
                    stage_of(s_factors, value_stage, VALUE_STAGES),
                    scale,
                    own_head,
                    own_record,
                    records,
                    warp,
                    lane,
                    P,
                )
            arrive(fragments_full + before, lane)
            if own_slot > 0:
                window = conv_state + Int64(own_slot) * conv_stride * 2
                store_window(window, s_window, x, tap_stride, before, own_head, D, tid, P)
            value_stage += 1
            if value_stage == VALUE_STAGES:
                value_stage, value_phase = Int32(0), value_phase ^ 1

        own_head, own_slot, own_record = head, slot, record
        head, request, first, size = later
        slot, record = later_slot, later_record


@cute.jit
def stage_of(area: cute.Tensor, stage: Int32, stages: cutlass.Constexpr) -> cute.Tensor:
    """One of the equal stages of an area, flat; a multiple of 16 bytes."""
    size = cute.size(area) // stages
    return cute.make_tensor(area.iterator, cute.make_layout((size, stages), stride=(1, size)))[None, stage]


@cute.jit
def load_taps(
    conv_weight: Int64,
    conv_bias: Int64,
    s_taps: cute.Tensor,
    s_bias: cute.Tensor,
    head: Int32,
    D: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Convolution weights [3, 4, 128] and biases [3, 128] of a head."""
    units = HEAD_DIM * P.weight_bytes // 16  # of a row
    step = P.prologue_threads // units  # rows at a time
    row, unit = tid // units, tid % units
    size = Int64(D) * P.weight_bytes
    source = conv_weight + Int64(head) * (HEAD_DIM * P.weight_bytes) + Int64(row) * size + unit * 16
    target = s_taps.iterator.toint() + tid * 16
    for i in range_constexpr(ceil_div(3 * CONV_WIDTH, step)):
        if row + i * step < 3 * CONV_WIDTH:
            blocks.copy_async(target + i * (16 * P.prologue_threads), source + size * (i * step), 16)
    if conv_bias != Int64(0):
        if row < 3:
            source = conv_bias + Int64(head) * (HEAD_DIM * P.weight_bytes) + Int64(row) * size + unit * 16
            blocks.copy_async(s_bias.iterator.toint() + tid * 16, source, 16)
    else:
        for i in range_constexpr(ceil_div(3 * HEAD_DIM, P.prologue_threads)):
            if tid + i * P.prologue_threads < 3 * HEAD_DIM:
                s_bias[tid + i * P.prologue_threads] = P.conv_dtype(0)


@cute.jit
def load_gate(
    f_b: Int64,
    A_log: Int64,
    dt_bias: Int64,
    weights: cute.Tensor,
    biases: cute.Tensor,
    head: Int32,
    zero: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> Float32:
    """A lane's fragments of f_b, (half of k, upper or lower row, step, tile), and the biases of its features, (upper or
    lower row, tile). Returns A_log.
    """
    feature = head * HEAD_DIM + warp * (16 * P.gate_tiles) + lane // 4
    words = cute.make_ptr(Uint32, f_b + Int64(feature) * (2 * HEAD_DIM) + lane % 4 * 4, GMEM, assumed_align=4)
    row = HEAD_DIM // 2
    part = cute.make_tensor(words, cute.make_layout((2, 2, _STEPS, P.gate_tiles), stride=(4, 8 * row, 8, 16 * row)))
    for tile in range_constexpr(P.gate_tiles):
        for step in range_constexpr(_STEPS):
            for half in range_constexpr(2):
                for k in range_constexpr(2):
                    weights[k, half, step, tile] = part[k, half, step, tile]
    for tile in range_constexpr(P.gate_tiles):
        for half in range_constexpr(2):
            biases[half, tile] = blocks.at(Float32, dt_bias, feature + 16 * tile + 8 * half)
    return blocks.at(Float32, A_log, head + zero)


@cute.jit
def load_window(
    window: Int64,
    s_window: cute.Tensor,
    s_inputs: cute.Tensor,
    tap_stride: Int64,
    stage: Int32,
    head: Int32,
    D: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """rows: all entries, `[3, 128, W]`; taps: the first three, to the rows before the inputs."""
    if const_expr(P.layout == "rows"):
        target = stage_of(s_window, stage, 2).iterator.toint() + tid * 16
        part_bytes = HEAD_DIM * P.window * 2
        source = window + Int64(head) * part_bytes + tid * 16
        for part in range_constexpr(3):
            for i in range_constexpr(ceil_div(part_bytes, 16 * P.prologue_threads)):
                offset = i * 16 * P.prologue_threads
                if tid * 16 + offset < part_bytes:
                    blocks.copy_async(target + (part * part_bytes + offset), source + offset, 16)
            source = source + Int64(D) * (P.window * 2)
    else:
        row, unit = tid // 16, tid % 16
        target = stage_of(s_inputs, stage, 2).iterator.toint() + tid * 16
        source = window + Int64(head * HEAD_DIM + unit * _UNIT) * 2
        step = P.prologue_threads // 16
        for i in range_constexpr(ceil_div(3 * _HISTORY, step)):
            r = row + step * i  # [entry, part]
            if r < 3 * _HISTORY:
                entry = r // 3
                part = r - 3 * entry
                offset = (Int64(entry) * tap_stride + Int64(part) * D) * 2
                blocks.copy_async(target + i * (16 * P.prologue_threads), source + offset, 16)


@cute.jit
def load_projection(
    source: Int64,
    pitch: Int64,
    s_inputs: cute.Tensor,
    s_f_a: cute.Tensor,
    s_beta: cute.Tensor,
    stage: Int32,
    head: Int32,
    D: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """q, k, v of a head, f_a, swizzled, and beta: a thread takes a 16-byte unit of one token, of each or of two."""
    t, unit = tid // 16 % 8, tid % 16
    if t < P.tokens:
        row = source + Int64(t) * pitch * 2 + unit * 16
        inputs = stage_of(s_inputs, stage, 2).iterator.toint() + (_HISTORY + t) * (6 * HEAD_DIM) + unit * 16
        place = stage_of(s_f_a, stage, 2).iterator.toint() + t * (2 * HEAD_DIM) + (unit ^ t) * 16
        part_bytes = Int64(D) * 2
        part = row + Int64(head) * (2 * HEAD_DIM)
        f_a = row + part_bytes * 4
        if const_expr(P.prologue == 4):
            for i in range_constexpr(3):
                blocks.copy_async(inputs + i * (2 * HEAD_DIM), part + part_bytes * i, 16)
            blocks.copy_async(place, f_a, 16)
        elif tid < 128:
            for i in range_constexpr(2):
                blocks.copy_async(inputs + i * (2 * HEAD_DIM), part + part_bytes * i, 16)
        else:
            blocks.copy_async(inputs + 2 * (2 * HEAD_DIM), part + part_bytes * 2, 16)
            blocks.copy_async(place, f_a, 16)
        # The word's other half is beta of a neighbouring head, or padding of the row.
        if unit == 0 and tid < 128:
            word = f_a + 2 * HEAD_DIM + (head >> 1) * 4
            blocks.copy_async(stage_of(s_beta, stage, 2).iterator.toint() + t * 4, word, 4)


@cute.jit
def roll_window(window: cute.Tensor, x: cute.Tensor, tid: Int32, P: cutlass.Constexpr) -> None:
    """Thread = channel of a part: its first three entries go in front of the inputs; then the last two of them and the
    inputs become its first entries.
    """
    for i in range_constexpr(ceil_div(3 * HEAD_DIM, P.prologue_threads)):
        channel = tid + i * P.prologue_threads
        if channel < 3 * HEAD_DIM:
            roll_channel(window, x, channel, P)


@cute.jit
def roll_channel(window: cute.Tensor, x: cute.Tensor, channel: Int32, P: cutlass.Constexpr) -> None:
    inputs = cute.make_tensor(x.iterator, cute.make_layout((3 * HEAD_DIM, P.rows), stride=(1, 3 * HEAD_DIM)))
    if const_expr(P.window % 2 == 0 and P.tokens % 2 == 0):
        # Two entries at a time.
        words = cute.make_tensor(
            cute.recast_ptr(window.iterator, dtype=Uint32),
            cute.make_layout((P.window // 2, 3 * HEAD_DIM), stride=(1, P.window // 2)),
        )
        old = cute.make_rmem_tensor(2, Uint32)
        for i in range_constexpr(2):
            old[i] = words[i, channel]
        history = cute.recast_tensor(old, BFloat16)
        for e in range_constexpr(_HISTORY):
            inputs[channel, e] = history[e]
        new = cute.make_rmem_tensor(2 + P.tokens, BFloat16)
        new[0] = history[1]
        new[1] = history[2]
        for t in range_constexpr(P.tokens):
            new[2 + t] = inputs[channel, _HISTORY + t]
        packed = cute.recast_tensor(new, Uint32)
        for i in range_constexpr(1 + P.tokens // 2):
            words[i, channel] = packed[i]
    else:
        entries = cute.make_tensor(window.iterator, cute.make_layout((P.window, 3 * HEAD_DIM), stride=(1, P.window)))
        history = cute.make_rmem_tensor(_HISTORY, BFloat16)
        for e in range_constexpr(_HISTORY):
            history[e] = entries[e, channel]
        for e in range_constexpr(_HISTORY):
            inputs[channel, e] = history[e]
        entries[0, channel] = history[1]
        entries[1, channel] = history[2]
        for t in range_constexpr(P.tokens):
            entries[2 + t, channel] = inputs[channel, _HISTORY + t]


@cute.jit
def store_window(
    window: Int64,
    s_window: cute.Tensor,
    x: cute.Tensor,
    tap_stride: Int64,
    stage: Int32,
    head: Int32,
    D: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The two inputs before this step's, then these, as the first tokens + 2 entries."""
    if const_expr(P.layout == "rows"):
        rolled = stage_of(s_window, stage, 2)
        part_units = HEAD_DIM * P.window // _UNIT
        units = cute.make_tensor(
            rolled.iterator, cute.make_layout((_UNIT, part_units, 3), stride=(1, _UNIT, HEAD_DIM * P.window))
        )
        target = window + Int64(head) * (HEAD_DIM * P.window * 2) + tid * 16
        for part in range_constexpr(3):
            for i in range_constexpr(ceil_div(part_units, P.prologue_threads)):
                unit = tid + i * P.prologue_threads
                if unit < part_units:
                    store_unit(units[None, unit, part], target + i * (16 * P.prologue_threads))
            target = target + Int64(D) * (P.window * 2)
    else:
        # [entry, part] from the second row on
        units = cute.make_tensor(
            x.iterator + 3 * HEAD_DIM, cute.make_layout((_UNIT, (P.tokens + 2) * 48), stride=(1, _UNIT))
        )
        row, unit = tid // 16, tid % 16
        target = window + Int64(head * HEAD_DIM + unit * _UNIT) * 2
        step = P.prologue_threads // 16
        for i in range_constexpr(ceil_div(3 * (P.tokens + 2), step)):
            r = row + step * i
            if r < 3 * (P.tokens + 2):
                entry = r // 3
                part = r - 3 * entry
                offset = (Int64(entry) * tap_stride + Int64(part) * D) * 2
                store_unit(units[None, tid + i * P.prologue_threads], target + offset)


@cute.jit
def store_unit(unit: cute.Tensor, address: Int64) -> None:
    """16 bytes from shared to global memory."""
    values = cute.make_rmem_tensor(_UNIT, BFloat16)
    cute.autovec_copy(unit, values)
    target = cute.make_ptr(BFloat16, address, GMEM, assumed_align=16)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(_UNIT)))


@cute.jit
def gate(
    weights: cute.Tensor,
    biases: cute.Tensor,
    a_log: Float32,
    lower_bound: Float32,
    f_a: cute.Tensor,
    s_decays: cute.Tensor,
    s_gates: cute.Tensor,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """16 or 32 features of all tokens per warp: raw gates, and the base-2 logarithms of Gamma."""
    g, q = lane // 4, lane % 4
    # Pairs of columns: (pair of a unit, unit, token); units are swizzled by token % 8.
    inputs = cute.make_tensor(
        cute.recast_ptr(f_a.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.tokens), stride=(1, 4, HEAD_DIM // 2)),
    )
    gates = cute.make_tensor(s_gates.iterator, cute.make_layout((HEAD_DIM, P.padded), stride=(1, _GATE_PITCH)))
    decays = cute.make_tensor(s_decays.iterator, cute.make_layout((HEAD_DIM, P.padded), stride=(1, _DECAY_PITCH)))
    exp_A = blocks.exp(a_log)
    token = min(g, P.tokens - 1)
    chains = 1 if const_expr(P.gate_mode == 0) else 4
    zero = (Float32(0), Float32(0), Float32(0), Float32(0))
    sums = [[zero for _ in range(chains)] for _ in range(P.gate_tiles)]
    for i in range_constexpr(_STEPS):
        chain = i * chains // _STEPS
        b = (inputs[q, 2 * i ^ (token & 7), token], inputs[q, (2 * i + 1) ^ (token & 7), token])
        for tile in range_constexpr(P.gate_tiles):
            a = (weights[0, 0, i, tile], weights[0, 1, i, tile], weights[1, 0, i, tile], weights[1, 1, i, tile])
            sums[tile][chain] = blocks.mma_16816(sums[tile][chain], a, b)
    for tile in range_constexpr(P.gate_tiles):
        for half in range_constexpr(2):
            feature = warp * (16 * P.gate_tiles) + 16 * tile + 8 * half + g
            logs = cute.make_rmem_tensor(2, Float32)
            for side in range_constexpr(2):
                raw = sums[tile][0][2 * half + side]
                for chain in range_constexpr(1, chains):
                    raw = raw + sums[tile][chain][2 * half + side]
                rounded = raw.to(BFloat16)
                logs[side] = blocks.log_decay(
                    rounded.to(Float32), biases[half, tile], exp_A, lower_bound * Float32(_LOG2E)
                )
                if 2 * q + side < P.tokens:
                    gates[feature, 2 * q + side] = rounded
            before = earlier(logs[0] + logs[1], q, P)
            for side in range_constexpr(2):
                before = before + logs[side]
                if 2 * q + side < P.tokens:
                    decays[feature, 2 * q + side] = before


@cute.jit
def earlier(x: Float32, q: Int32, P: cutlass.Constexpr) -> Float32:
    """Sum of x over the lower lanes of a group of four, of which lane q is number q."""
    group = (32 - 4) << 8
    total = Float32(0)
    if const_expr(P.tokens > 2):
        one = arch.shuffle_sync_up(x, 1, mask_and_clamp=group)
        one = one if q >= 1 else Float32(0)
        total = one
        if const_expr(P.tokens > 4):
            two = arch.shuffle_sync_up(one, 1, mask_and_clamp=group)
            total = total + (two if q >= 2 else Float32(0))
        if const_expr(P.tokens > 6):
            three = arch.shuffle_sync_up(one, 2, mask_and_clamp=group)
            total = total + (three if q >= 3 else Float32(0))
    return total


@cute.jit
def vectors(
    x: cute.Tensor,
    s_taps: cute.Tensor,
    s_bias: cute.Tensor,
    s_decays: cute.Tensor,
    s_gates: cute.Tensor,
    beta: cute.Tensor,
    fragments: cute.Tensor,
    values: cute.Tensor,
    factors: cute.Tensor,
    scale: Float32,
    head: Int32,
    record: Int32,
    records: Int64,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Convolution and what follows of `warp_tokens` tokens per warp, lane = four channels.

    Leaves the fragments, v, and per token the factors rk, rq, beta; keys and raw gates go to the record. What is
    computed of tokens past the last stays in columns that nobody reads.
    """
    begin = warp * P.warp_tokens
    if begin < P.tokens:
        inputs = cute.make_tensor(
            x.iterator, cute.make_layout((4, 32, 3, P.rows), stride=(1, 4, HEAD_DIM, 3 * HEAD_DIM))
        )
        taps = cute.make_tensor(
            s_taps.iterator, cute.make_layout((4, 32, CONV_WIDTH, 3), stride=(1, 4, HEAD_DIM, CONV_WIDTH * HEAD_DIM))
        )
        biases = cute.make_tensor(s_bias.iterator, cute.make_layout((4, 32, 3), stride=(1, 4, HEAD_DIM)))
        decays = cute.make_tensor(s_decays.iterator, cute.make_layout((4, 32, P.padded), stride=(1, 4, _DECAY_PITCH)))
        gates = cute.make_tensor(s_gates.iterator, cute.make_layout((4, 32, P.padded), stride=(1, 4, _GATE_PITCH)))
        v = cute.make_tensor(values.iterator, cute.make_layout((4, 32, P.padded), stride=(1, 4, HEAD_DIM)))
        cells = cute.make_tensor(
            fragments.iterator,
            cute.make_layout((4, 32, P.tiles + 1, _STEPS), stride=(1, 4, 128, 128 * (P.tiles + 1))),
        )
        step, column = fragment_of(lane, P)
        squares = cute.make_rmem_tensor(2 * P.warp_tokens, Float32)  # k.k and q.q of every token
        for order in range_constexpr(3):
            part = (2, 0, 1)[order]
            weight = cute.make_rmem_tensor((4, CONV_WIDTH), P.conv_dtype)
            bias = cute.make_rmem_tensor(4, P.conv_dtype)
            cute.autovec_copy(biases[None, lane, part], bias)
            for tap in range_constexpr(CONV_WIDTH):
                cute.autovec_copy(taps[None, lane, tap, part], weight[None, tap])
            seen = cute.make_rmem_tensor((4, _HISTORY + P.warp_tokens), BFloat16)
            for e in range_constexpr(_HISTORY + P.warp_tokens):
                cute.autovec_copy(inputs[None, lane, part, begin + e], seen[None, e])
            for i in range_constexpr(P.warp_tokens):
                t = begin + i
                rounded = cute.make_rmem_tensor(4, BFloat16)
                convolved = cute.make_rmem_tensor(4, Float32)
                for c in range_constexpr(4):
                    y = bias[c].to(Float32)
                    for tap in range_constexpr(CONV_WIDTH):
                        y += weight[c, tap].to(Float32) * seen[c, tap + i].to(Float32)
                    rounded[c] = (y * blocks.sigmoid(y)).to(BFloat16)
                    convolved[c] = rounded[c].to(Float32)
                if const_expr(part == 2):
                    cute.autovec_copy(rounded, v[None, lane, t])
                else:
                    log_gamma = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(decays[None, lane, t], log_gamma)
                    square = Float32(0)
                    for c in range_constexpr(4):
                        square += convolved[c] * convolved[c]
                    squares[2 * i + 1 - part] = square
                    if const_expr(part == 1):
                        aged = cute.make_rmem_tensor(4, Float32)
                        for c in range_constexpr(4):
                            aged[c] = convolved[c] * exp2(-log_gamma[c])
                        put_fragment(aged, cells, t * 4 + column, P.tiles, step)
                        if record >= 0 and t < P.tokens:
                            store_quad(rounded, records + Int64(t * (2 * HEAD_DIM) + 4 * lane) * 2)
                            raw = cute.make_rmem_tensor(4, BFloat16)
                            cute.autovec_copy(gates[None, lane, t], raw)
                            store_quad(raw, records + Int64(t * (2 * HEAD_DIM) + HEAD_DIM + 4 * lane) * 2)
                    for c in range_constexpr(4):
                        convolved[c] = convolved[c] * exp2(log_gamma[c])
                    vector = t
                    if const_expr(part == 0 and P.tiles == 1):
                        vector = 4 + t
                    tile = 1 if const_expr(part == 0 and P.tiles == 2) else 0
                    put_fragment(convolved, cells, vector * 4 + column, tile, step)

        copies = 16 // P.warp_tokens
        total = blocks.row_sums(squares, 2 * P.warp_tokens, 32, lane)
        inverse = blocks.rsqrt(total + Float32(_KEY_EPS))
        which = lane // copies  # of the squares
        if which % 2 == 1:
            inverse = inverse * scale
        if lane % copies == 0:
            factors[(begin + which // 2) * 4 + which % 2] = inverse
        if lane < P.warp_tokens:
            factors[(begin + lane) * 4 + 2] = blocks.sigmoid(beta[(begin + lane) * 2 + (head & 1)].to(Float32))


@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, approx=True, ftz=True)


@cute.jit
def fragment_of(quad: Int32, P: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """MMA step along K, and lane of a group of four, that hold the columns 4*quad .. +3.

    A lane takes 16 neighbouring bytes of a state row: four columns of one step (FP32), or eight of two (BF16).
    """
    if const_expr(P.state_dtype == "fp32"):
        return quad // 4, quad % 4
    return quad // 8 * 2 + quad % 2, quad % 8 // 2


@cute.jit
def store_quad(values: cute.Tensor, address: Int64) -> None:
    target = cute.make_ptr(BFloat16, address, GMEM, assumed_align=8)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def product(
    state: Int64,
    slots: Int64,
    state_stride: Int64,
    slots_stride: Int64,
    heads: Int32,
    requests: Int32,
    per: Int32,
    s_state: cute.Tensor,
    s_fragments: cute.Tensor,
    s_results: cute.Tensor,
    fragments_full: cute.Pointer,
    fragments_empty: cute.Pointer,
    results_full: cute.Pointer,
    results_empty: cute.Pointer,
    count: Int32,
    cta: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, lane (g, q) = columns of rows g and g + 8. Its cells are refilled with item n + stages."""
    tid = warp * 32 + lane
    zero = Int32(lane >= 32 * heads)
    row = warp * 16 + lane // 4
    base = state + Int64(row * (HEAD_DIM * P.item_bytes) + lane % 4 * 16)
    cells = cute.make_tensor(
        s_state.iterator,
        cute.make_layout(
            (4, _PRODUCT_THREADS, P.units, P.state_stages),
            stride=(1, 4, 4 * _PRODUCT_THREADS, 4 * _PRODUCT_THREADS * P.units),
        ),
    )
    head, request, first, size = first_item(cta, per, heads, requests)
    for n in cutlass.range(P.state_stages, unroll=1):
        live = Int32(0)
        if n < count:
            live = of_request(slots, slots_stride, request, zero)
        page = page_of(base, live, head, state_stride, P)
        for group in range_constexpr(P.groups):
            if live > 0:
                load_group(cells, page, group, n, tid, P)
            arch.cp_async_commit_group()
        head, request, first, size = next_item(head, request, first, size, heads, requests)
    slot = Int32(0)  # of the item that item n's cells are refilled with
    if count > P.state_stages:
        slot = of_request(slots, slots_stride, request, zero)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    state_stage, result_stage, result_phase = Int32(0), Int32(0), Int32(1)
    for n in cutlass.range(count, unroll=1):
        stage = n & 1
        page = page_of(base, slot, head, state_stride, P)
        refill = slot
        head, request, first, size = next_item(head, request, first, size, heads, requests)
        slot = Int32(0)
        if n + 1 + P.state_stages < count:
            slot = of_request(slots, slots_stride, request, zero)

        arch.mbarrier_wait(fragments_full + stage, (n >> 1) & 1)
        fragments = cute.make_tensor(
            stage_of(s_fragments, stage, FRAGMENT_STAGES).iterator,
            cute.make_layout((4, 32, P.tiles + 1, _STEPS), stride=(1, 4, 128, 128 * (P.tiles + 1))),
        )
        coefficients = vector_products(fragments, warp, lane, P)
        none = (Float32(0), Float32(0), Float32(0), Float32(0))
        sums = [none for _ in range(P.tiles)]
        corrections = [none for _ in range(P.tiles)]  # products with a second term
        for group in range_constexpr(P.groups):
            # All stages are asked for, each group again as soon as it is read: this one is the oldest.
            arch.cp_async_wait_group(P.state_stages * P.groups - 1)
            words = cute.make_rmem_tensor((4, P.units // P.groups), Uint32)
            for i in range_constexpr(P.units // P.groups):
                unit = group * (P.units // P.groups) + i
                cute.autovec_copy(cells[None, tid, unit, state_stage], words[None, i])
            for j in range_constexpr(_STEPS // P.groups):
                step = group * (_STEPS // P.groups) + j
                a, a_rest = operand(words, j, P)
                for tile in range_constexpr(P.tiles):
                    b = cute.make_rmem_tensor(4, Uint32)
                    cute.autovec_copy(fragments[None, lane, tile, step], b)
                    sums[tile] = blocks.mma_16816(sums[tile], a, (b[0], b[1]))
                    if const_expr(P.terms == 2):
                        corrections[tile] = blocks.mma_16816(corrections[tile], a, (b[2], b[3]))
                    if const_expr(P.state_dtype == "fp32"):
                        corrections[tile] = blocks.mma_16816(corrections[tile], a_rest, (b[0], b[1]))
            if refill > 0:
                load_group(cells, page, group, state_stage, tid, P)
            arch.cp_async_commit_group()
        arrive(fragments_empty + stage, lane)

        arch.mbarrier_wait(results_empty + result_stage, result_phase)
        put_results(stage_of(s_results, result_stage, P.result_stages), sums, corrections, coefficients, warp, lane, P)
        arrive(results_full + result_stage, lane)
        state_stage += 1
        if state_stage == P.state_stages:
            state_stage = Int32(0)
        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1


@cute.jit
def page_of(base: Int64, slot: Int32, head: Int32, state_stride: Int64, P: cutlass.Constexpr) -> Int64:
    return base + (Int64(slot) * state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes


@cute.jit
def load_group(
    cells: cute.Tensor, page: Int64, group: cutlass.Constexpr, stage: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """Ask for a group of a thread's cells: 64 bytes of eight rows at a time, upper rows first."""
    for i in range_constexpr(P.units // P.groups):
        unit = group * (P.units // P.groups) + i
        source = page + (unit // 2 * 64 + unit % 2 * (8 * HEAD_DIM * P.item_bytes))
        blocks.copy_async(cells[None, tid, unit, stage].iterator.toint(), source, 16)


@cute.jit
def operand(
    words: cute.Tensor, j: cutlass.Constexpr, P: cutlass.Constexpr
) -> tuple[tuple[Uint32, ...], tuple[Uint32, ...]]:
    """First and second terms of step j of a group, from the cells of rows g (even) and g + 8 (odd)."""
    if const_expr(P.state_dtype == "bf16"):
        a = (words[2 * j, 0], words[2 * j, 1], words[2 * j + 1, 0], words[2 * j + 1, 1])
        return a, a
    upper, lower = 2 * j, 2 * j + 1
    a = (
        upper_halves(words[0, upper], words[1, upper]),
        upper_halves(words[0, lower], words[1, lower]),
        upper_halves(words[2, upper], words[3, upper]),
        upper_halves(words[2, lower], words[3, lower]),
    )
    a_rest = (
        rest(words[0, upper], words[1, upper]),
        rest(words[0, lower], words[1, lower]),
        rest(words[2, upper], words[3, upper]),
        rest(words[2, lower], words[3, lower]),
    )
    return a, a_rest


@cute.jit
def vector_products(fragments: cute.Tensor, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> tuple[Float32, Float32]:
    """This warp's part of A or B: (k_s / Gamma_s) . vector n over `tiles` steps, s = g, n = 2q and 2q + 1 of its tile.

    The vectors of tile `warp % tiles` and the steps from `warp // tiles * tiles` on.
    """
    none = Uint32(0)
    sums = (Float32(0), Float32(0), Float32(0), Float32(0))
    corrections = sums
    for i in range_constexpr(P.tiles):
        step = warp // P.tiles * P.tiles + i
        a = cute.make_rmem_tensor(4, Uint32)
        b = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(fragments[None, lane, P.tiles, step], a)
        cute.autovec_copy(fragments[None, lane, warp % P.tiles, step], b)
        first, second = (a[0], none, a[1], none), (a[2], none, a[3], none)
        sums = blocks.mma_16816(sums, first, (b[0], b[1]))
        corrections = blocks.mma_16816(corrections, first, (b[2], b[3]))
        corrections = blocks.mma_16816(corrections, second, (b[0], b[1]))
    return sums[0] + corrections[0], sums[1] + corrections[1]


@cute.jit
def put_results(
    results: cute.Tensor,
    sums: list[tuple[Float32, ...]],
    corrections: list[tuple[Float32, ...]],
    coefficients: tuple[Float32, Float32],
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """w and y [vector, row], and this warp's partial sums of A and B [partial, s, vector]."""
    g, q = lane // 4, lane % 4
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.vectors), stride=(1, _RESULT_PITCH)))
    for tile in range_constexpr(P.tiles):
        for half in range_constexpr(2):
            for side in range_constexpr(2):
                total = sums[tile][2 * half + side] + corrections[tile][2 * half + side]
                rows[warp * 16 + 8 * half + g, 8 * tile + 2 * q + side] = total
    partial = cute.make_tensor(
        results.iterator + P.vectors * _RESULT_PITCH,
        cute.make_layout((2, 4, P.tiles, 8, P.partials), stride=(1, 2, 8, P.vectors, 8 * P.vectors)),
    )
    two = cute.make_rmem_tensor(2, Float32)
    two[0], two[1] = coefficients
    cute.autovec_copy(two, partial[None, q, warp % P.tiles, g, warp // P.tiles])


@cute.jit
def epilogue(
    projected: Int64,
    norm_weight: Int64,
    slots: Int64,
    corrections: Int64,
    record_rows: Int64,
    out: Int64,
    pitch: Int64,
    slots_stride: Int64,
    corrections_stride: Int64,
    record_tokens: Int32,
    heads: Int32,
    requests: Int32,
    per: Int32,
    eps: Float32,
    s_results: cute.Tensor,
    s_values: cute.Tensor,
    s_factors: cute.Tensor,
    s_coefficients: cute.Tensor,
    s_outputs: cute.Tensor,
    results_full: cute.Pointer,
    results_empty: cute.Pointer,
    values_empty: cute.Pointer,
    count: Int32,
    cta: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Thread = state row in the substitution, 8 channels of a token in the norm."""
    lane = tid % 32
    zero = Int32(lane >= 32 * heads)
    D = heads * HEAD_DIM
    t, unit = min(tid // 16, P.tokens - 1), tid % 16
    head, request, first, size = first_item(cta, per, heads, requests)
    norm = cute.make_rmem_tensor(_UNIT, Float32)
    norm_units = cute.make_tensor(
        cute.make_ptr(Float32, norm_weight, GMEM, assumed_align=16), cute.make_layout((_UNIT, 16), stride=(1, _UNIT))
    )
    cute.autovec_copy(norm_units[None, unit], norm)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    result_stage, result_phase = Int32(0), Int32(0)
    value_stage = Int32(0)
    for _ in cutlass.range(count, unroll=1):
        slot = of_request(slots, slots_stride, request, zero)
        record = of_request(record_rows, Int64(1), request, zero)
        row = Int64(request * P.tokens + t)
        channel = Int64(head * HEAD_DIM + unit * _UNIT)
        gates = cute.make_rmem_tensor(_UNIT, BFloat16)
        load_unit((projected + (row * pitch + Int64(D) * 3 + channel) * 2), gates)
        target = out + (row * D + channel) * 2

        arch.mbarrier_wait(results_full + result_stage, result_phase)
        if slot > 0:
            results = stage_of(s_results, result_stage, P.result_stages)
            kept = (
                corrections
                + (Int64(record) * corrections_stride + Int64(head * record_tokens) * HEAD_DIM) * 4
                + Int64(tid) * 4
            )
            add_coefficients(results, s_coefficients, tid, P)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=_EPILOGUE_THREADS)
            substitute(
                results,
                s_coefficients,
                stage_of(s_values, value_stage, VALUE_STAGES),
                stage_of(s_factors, value_stage, VALUE_STAGES),
                s_outputs,
                record,
                kept,
                tid,
                P,
            )
            arrive(results_empty + result_stage, lane)
            if lane == 0:
                arch.mbarrier_arrive(values_empty + value_stage)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=_EPILOGUE_THREADS)
            normalize(s_outputs, gates, norm, eps, target, t, unit, tid, P)
        else:
            arrive(results_empty + result_stage, lane)
            if lane == 0:
                arch.mbarrier_arrive(values_empty + value_stage)
            gates.fill(BFloat16(0))
            if tid < 16 * P.tokens:
                put_unit(gates, target)

        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1
        value_stage += 1
        if value_stage == VALUE_STAGES:
            value_stage = Int32(0)
        head, request, first, size = next_item(head, request, first, size, heads, requests)


@cute.jit
def load_unit(address: Int64, values: cute.Tensor) -> None:
    source = cute.make_ptr(BFloat16, address, GMEM, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(_UNIT)), values)


@cute.jit
def put_unit(values: cute.Tensor, address: Int64) -> None:
    target = cute.make_ptr(BFloat16, address, GMEM, assumed_align=16)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(_UNIT)))


@cute.jit
def add_coefficients(results: cute.Tensor, s_coefficients: cute.Tensor, tid: Int32, P: cutlass.Constexpr) -> None:
    """A and B [s, vector] from their partial sums, in the same order every time."""
    partial = cute.make_tensor(
        results.iterator + P.vectors * _RESULT_PITCH,
        cute.make_layout((8 * P.vectors, P.partials), stride=(1, 8 * P.vectors)),
    )
    if tid < 8 * P.vectors:
        total = partial[tid, 0]
        for i in range_constexpr(1, P.partials):
            total += partial[tid, i]
        s_coefficients[tid] = total


@cute.jit
def substitute(
    results: cute.Tensor,
    s_coefficients: cute.Tensor,
    values: cute.Tensor,
    factors: cute.Tensor,
    s_outputs: cute.Tensor,
    record: Int32,
    kept: Int64,
    row: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Corrections and outputs of one row. As soon as a correction is known, all later sums take their part of it."""
    half = P.vectors // 2
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.vectors), stride=(1, _RESULT_PITCH)))
    v = cute.make_tensor(values.iterator, cute.make_layout((HEAD_DIM, P.padded), stride=(1, HEAD_DIM)))
    coefficients = cute.make_tensor(
        s_coefficients.iterator, cute.make_layout((4, P.vectors // 4, 8), stride=(1, 4, P.vectors))
    )
    token_factors = cute.make_tensor(factors.iterator, cute.make_layout((4, P.padded), stride=(1, 4)))
    outputs = cute.make_tensor(s_outputs.iterator, cute.make_layout((HEAD_DIM, P.tokens), stride=(1, HEAD_DIM)))
    w = cute.make_rmem_tensor(P.tokens, Float32)
    y = cute.make_rmem_tensor(P.tokens, Float32)
    for t in range_constexpr(P.tokens):
        w[t] = rows[row, t]
        y[t] = rows[row, half + t]
    for s in range_constexpr(P.tokens):
        factor = cute.make_rmem_tensor(4, Float32)  # rk, rq, beta
        cute.autovec_copy(token_factors[None, s], factor)
        u = factor[2] * (v[row, s].to(Float32) - factor[0] * w[s])
        scaled = factor[0] * u
        column = cute.make_rmem_tensor((4, P.vectors // 4), Float32)
        for i in range_constexpr(P.vectors // 4):
            # Of A only the tokens after s, of B those from s on.
            if const_expr(s + 1 <= i * 4 % half + 3 or (i * 4 >= half and s <= i * 4 % half + 3)):
                cute.autovec_copy(coefficients[None, i, s], column[None, i])
        for t in range_constexpr(s, P.tokens):
            if const_expr(t > s):
                w[t] = w[t] + column[t % 4, t // 4] * scaled
            y[t] = y[t] + column[(half + t) % 4, (half + t) // 4] * scaled
        outputs[row, s] = (factor[1] * y[s]).to(BFloat16)
        if record >= 0:
            blocks.put(Float32, kept + s * (HEAD_DIM * 4), u)


@cute.jit
def normalize(
    s_outputs: cute.Tensor,
    gates: cute.Tensor,
    norm: cute.Tensor,
    eps: Float32,
    target: Int64,
    t: Int32,
    unit: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """RMSNorm and output gate of 8 channels; a token's lie on 16 neighbouring lanes."""
    outputs = cute.make_tensor(s_outputs.iterator, cute.make_layout((_UNIT, 16, P.tokens), stride=(1, _UNIT, HEAD_DIM)))
    o = cute.make_rmem_tensor(_UNIT, BFloat16)
    cute.autovec_copy(outputs[None, unit, t], o)
    square = Float32(0)
    for e in range_constexpr(_UNIT):
        square += o[e].to(Float32) * o[e].to(Float32)
    rms = blocks.rsqrt(blocks.lane_sum(square, 1, 16) * Float32(1 / HEAD_DIM) + eps)
    result = cute.make_rmem_tensor(_UNIT, BFloat16)
    for e in range_constexpr(_UNIT):
        result[e] = (o[e].to(Float32) * rms * (norm[e] * blocks.sigmoid(gates[e].to(Float32)))).to(BFloat16)
    if tid < 16 * P.tokens:
        put_unit(result, target)
