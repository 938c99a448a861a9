"""KDA decode and record steps for many items: persistent, one CTA per SM, its warps specialized.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; read (record), updated in place (decode)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

A CTA walks a run of consecutive items. In its steady state three groups of warps work on three items:
  prologue  item i+1: convolution, gate on tensor cores, decays, norms; leaves the window, the recorded keys and gates,
            and the vectors for the product. The inputs of item i+2 are on their way
  product   item i: what the state takes part in. The state lies in cells of shared memory that are private to the
            threads (cp.async, no barrier), several items of it, and is refilled as it is read
  epilogue  item i-1: RMSNorm and output gate; for record also the substitution and the corrections
Norms are deferred: vectors stay unnormalized, rk and rq are the inverse norms.

record, 4 or 8 + 8 + 4 warps: the chunked form. The vectors are MMA fragments of the 2q vectors Gamma_t k_t, Gamma_t q_t
and of the q vectors k_t / Gamma_t. Product, warp = 16 state rows: w = S (Gamma k), y = S (Gamma q) on tensor cores,
state and vectors in two BF16 terms. The products of vectors with vectors, A and B, come from the same fragments:
k_s / Gamma_s are further state rows. Epilogue, thread = row, with u'_s = rk_s u_s:
  u_t = beta_t (v_t - rk_t (w_t + sum_{s<t} A_ts u'_s)),  o_t = rq_t (y_t + sum_{s<=t} B_ts u'_s)

decode, 4 + 8 + 1 warps: the recurrence in FP32. Product, warp = 16 state rows, half a warp per row: the state goes
through registers; w = S (d k), y = S (d q), then
  u = beta (v - w rk),  o = rq (y + u rk k.q),  S <- S d + (u rk) k

Handed on by mbarriers, a full and an empty one per stage: vectors (prologue to product), results (product to epilogue).
What the epilogue takes from the prologue (v and the factors of a window) lies behind them and has an empty one alone.

Order of items: blocks of as many requests as a CTA has items; in a block, head by head. A CTA so keeps one head (its
gate weights stay in registers), and neighbouring CTAs work on neighbouring heads of one request at a time.
Source: docs/operation.md, "The mathematics, per item" and "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
VECTOR_STAGES = 2
VALUE_STAGES = 3
MIN_LOG_DECAY = -64.0
"""Record: lower_bound * tokens must not lie below, so that 1 / Gamma and its split stay far inside FP32."""

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
    def columns(self) -> int:
        """Of the products with the state; column t belongs to Gamma_t k_t, column `columns / 2 + t` to Gamma_t q_t."""
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

    def unit_offset(self, unit: int) -> int:
        """Byte offset of a thread's cell in a page, from its first one. A warp asks for 64 bytes of eight rows at a
        time (record, upper rows first), or for half or whole rows, two at a time (decode).
        """
        row_bytes = HEAD_DIM * self.item_bytes
        if self.kind == "record":
            return unit // 2 * 64 + unit % 2 * (8 * row_bytes)
        cells = row_bytes // 256  # of a lane in a row
        return unit // cells * (2 * row_bytes) + unit % cells * 256

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
        return self.columns * _RESULT_PITCH + self.partials * 8 * self.columns

    @property
    def vector_words(self) -> int:
        """A stage of vectors. record: fragments, (word, lane, tile, step); the last tile holds k / Gamma. decode: FP32,
        d k, d q, d, k, v; then k.k, q.q and k.q, a part per warp of the prologue; then beta.
        """
        if self.kind == "decode":
            return 5 * HEAD_DIM + 4 * self.prologue + 4
        return _STEPS * (self.tiles + 1) * 128

    @property
    def barriers(self) -> int:
        return 2 * VECTOR_STAGES + 2 * self.result_stages + VALUE_STAGES

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
            "vectors": VECTOR_STAGES * self.vector_words * 4,
            "results": self.result_stages * self.result_words * 4,
            "barriers": 16 * ceil_div(self.barriers * 8, 16),
        }
        if self.kind == "record":
            areas |= {
                "gates": self.padded * _GATE_PITCH * 2,
                "values": VALUE_STAGES * self.padded * HEAD_DIM * 2,
                "factors": VALUE_STAGES * self.padded * 16,
                "coefficients": 8 * self.columns * 4,
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
        return "kind=spec: its time is that of storing the state of every token, where KdaSplit lacks nothing"
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
    )
    records = (0, 0, 0)
    if p.kind == "record" and o.corrections is not None and o.key_gates is not None:
        records = (o.corrections.stride(0), o.key_gates.stride(0), o.corrections.shape[2])
    assert o.lower_bound is not None
    values = (*addresses, *strides, *records, heads, requests, per, o.lower_bound, o.scale, o.eps)
    cubin.launcher(compiled.binary).launch((ctas, 1, 1), values, stream, compiled.pdl)


def _check(p: Plan, o: StepOperands) -> None:
    def refuse(name: str, rule: str) -> None:
        tensor = getattr(o, name)
        about = "" if tensor is None else f" ({tensor.dtype}, {tuple(tensor.shape)}, strides {tensor.stride()})"
        raise ValueError(f"{name}{about} {rule}")

    if o.lower_bound is None:
        raise ValueError("lower_bound is None: KdaWS needs a bounded gate")
    if p.kind == "record" and o.lower_bound * p.tokens < MIN_LOG_DECAY:
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
        "out": bf16,
    }
    if p.kind == "record":
        dtypes |= {"corrections": f32, "key_gates": bf16, "record_rows": int32}
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
        if name in dtypes and not getattr(o, name)[0].is_contiguous():
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
    if p.kind == "record" and o.corrections is not None and o.key_gates is not None:
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


class Args(NamedTuple):
    """Parameters of the kernel: addresses, strides in elements, sizes. per: items of a CTA."""

    projected: Int64
    conv_weight: Int64
    conv_bias: Int64
    conv_state: Int64
    f_b: Int64
    A_log: Int64
    dt_bias: Int64
    norm_weight: Int64
    state: Int64
    slots: Int64
    corrections: Int64
    key_gates: Int64
    record_rows: Int64
    out: Int64
    pitch: Int64
    conv_stride: Int64
    tap_stride: Int64
    state_stride: Int64
    slots_stride: Int64
    corrections_stride: Int64
    key_gates_stride: Int64
    record_tokens: Int32
    heads: Int32
    requests: Int32
    per: Int32
    lower_bound: Float32
    scale: Float32
    eps: Float32


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: flat areas, most of several stages, and mbarriers, one per stage."""

    state: Any  # [stages, cells, threads, 4 words]
    inputs: Any  # [2, history + tokens, 3, 128] bf16
    f_a: Any  # [2, tokens, 128] bf16, units swizzled by token
    beta: Any  # [2, tokens, 2] bf16, of an even head and its neighbour
    window: Any  # [2, 3, 128, entries] bf16, dim-first only
    taps: Any  # [3, 4, 128]
    bias: Any  # [3, 128]
    decays: Any  # [tokens, _DECAY_PITCH] f32, base-2 logarithms of Gamma
    vectors: Any  # [stages, `vector_words`]
    results: Any  # [stages, `result_words`] f32
    gates: Any  # [tokens, _GATE_PITCH] bf16 raw gates; record only, as all that follows
    values: Any  # [stages, tokens, 128] bf16
    factors: Any  # [stages, tokens, 4] rk, rq, beta
    coefficients: Any  # [8, columns] A and B
    outputs: Any  # [tokens, 128] bf16
    vectors_full: Any
    vectors_empty: Any
    results_full: Any
    results_empty: Any
    values_empty: Any


class Item(NamedTuple):
    """A place in the walk over the items: head and request, first request and size of the block of requests."""

    head: Int32
    request: Int32
    first: Int32
    size: Int32


def _arguments(p: Plan) -> tuple[Any, ...]:
    sizes = (Int32(0), Int32(1), Int32(1), Int32(2))
    return (Args(*(Int64(0),) * 21, *sizes, Float32(-5), Float32(1), Float32(1e-5)), p)


@cute.jit
def _host(A: Args, P: cutlass.Constexpr) -> None:
    kda_ws(A, P).launch(grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=1)


@cute.kernel
def kda_ws(A: Args, P: cutlass.Constexpr) -> None:
    thread, _, _ = arch.thread_idx()
    cta, _, _ = arch.block_idx()
    lane = thread % 32
    warp = arch.make_warp_uniform(thread // 32)
    M = allocate(P)
    if thread == 0:
        for s in range_constexpr(VECTOR_STAGES):
            arch.mbarrier_init(M.vectors_full + s, P.prologue)
            arch.mbarrier_init(M.vectors_empty + s, PRODUCT)
        for s in range_constexpr(P.result_stages):
            arch.mbarrier_init(M.results_full + s, PRODUCT)
            arch.mbarrier_init(M.results_empty + s, P.epilogue)
        for s in range_constexpr(VALUE_STAGES):
            arch.mbarrier_init(M.values_empty + s, P.epilogue)
        arch.mbarrier_init_fence()
    arch.sync_threads()

    count = min(A.per, A.heads * A.requests - cta * A.per)
    start = first_item(cta, A.per, A.heads, A.requests)
    # Zero, which the compiler must not know: loads that it takes for the same in all lanes go to a uniform register,
    # and so are waited for at once.
    zero = Int32(lane >= 32 * A.heads)
    if warp < P.prologue:
        if const_expr(P.kind == "record"):
            arch.setmaxregister_increase(REGISTERS[P.prologue][0])
        prologue(A, M, start, count, warp, lane, zero, P)
    elif warp < P.prologue + PRODUCT:
        if const_expr(P.kind == "record"):
            if const_expr(P.prologue == 4):
                arch.setmaxregister_decrease(REGISTERS[P.prologue][1])
            record_product(A, M, start, count, warp - P.prologue, lane, zero, P)
        else:
            decode_product(A, M, start, count, warp - P.prologue, lane, zero, P)
    else:
        if const_expr(P.kind == "record"):
            arch.setmaxregister_decrease(REGISTERS[P.prologue][2])
            record_epilogue(A, M, start, count, thread - 32 * (P.prologue + PRODUCT), zero, P)
        else:
            decode_epilogue(A, M, start, count, lane, zero, P)


@cute.jit
def allocate(P: cutlass.Constexpr) -> Shared:
    smem = SmemAllocator()

    def take(dtype: Any, name: str) -> Any:
        count = P.areas[name] // (dtype.width // 8)
        return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    state = take(Uint32, "state")
    barriers = take(Int64, "barriers").iterator
    window, windows_used = None, P.layout == "rows"
    if const_expr(windows_used):
        window = take(BFloat16, "window")
    gates, values, factors, coefficients, outputs = None, None, None, None, None
    if const_expr(P.kind == "record"):
        gates = take(BFloat16, "gates")
        values = take(BFloat16, "values")
        factors = take(Float32, "factors")
        coefficients = take(Float32, "coefficients")
        outputs = take(BFloat16, "outputs")
    return Shared(
        state=state,
        inputs=take(BFloat16, "inputs"),
        f_a=take(BFloat16, "f_a"),
        beta=take(BFloat16, "beta"),
        window=window,
        taps=take(P.conv_dtype, "taps"),
        bias=take(P.conv_dtype, "bias"),
        decays=take(Float32, "decays"),
        vectors=take(Uint32 if P.kind == "record" else Float32, "vectors"),
        results=take(Float32, "results"),
        gates=gates,
        values=values,
        factors=factors,
        coefficients=coefficients,
        outputs=outputs,
        vectors_full=barriers,
        vectors_empty=barriers + VECTOR_STAGES,
        results_full=barriers + 2 * VECTOR_STAGES,
        results_empty=barriers + 2 * VECTOR_STAGES + P.result_stages,
        values_empty=barriers + 2 * VECTOR_STAGES + 2 * P.result_stages,
    )


@cute.jit
def stage_of(area: cute.Tensor, stage: Int32, stages: cutlass.Constexpr) -> cute.Tensor:
    """One of the equal stages of an area, flat; a multiple of 16 bytes."""
    size = cute.size(area) // stages
    return cute.make_tensor(area.iterator, cute.make_layout((size, stages), stride=(1, size)))[None, stage]


@cute.jit
def first_item(cta: Int32, per: Int32, heads: Int32, requests: Int32) -> Item:
    """A CTA's first item."""
    size = min(per, requests)
    full = requests // size  # blocks of that size
    index = cta * per
    block = min(index // (size * heads), full)
    index = index - block * size * heads
    first = block * size
    if block == full:
        size = requests - first
    head = index // size
    return Item(head, first + index - head * size, first, size)


@cute.jit
def next_item(item: Item, heads: Int32, requests: Int32) -> Item:
    """The item after it; past the last one, request = requests."""
    head, request, first, size = item
    request = request + 1
    if request == first + size:
        head = head + 1
        if head == heads:
            head = Int32(0)
            first = first + size
            size = min(size, requests - first)
        request = first
    return Item(head, request, first, size)


@cute.jit
def slot_of(A: Args, request: Int32, zero: Int32) -> Int32:
    return blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, zero)


@cute.jit
def record_row_of(A: Args, request: Int32, zero: Int32, P: cutlass.Constexpr) -> Int32:
    if const_expr(P.kind != "record"):
        return Int32(-1)
    return blocks.at(Int32, A.record_rows + Int64(request) * 4, zero)


@cute.jit
def arrive(barrier: cute.Pointer, lane: Int32) -> None:
    """One arrival for the warp, behind all that its lanes have done."""
    arch.sync_warp()
    if lane == 0:
        arch.mbarrier_arrive(barrier)


@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, approx=True, ftz=True)


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
def get_vector(dtype: cutlass.Constexpr, address: Int64, count: cutlass.Constexpr) -> cute.Tensor:
    """Neighbouring elements from global memory to registers, 16 bytes at a time."""
    values = cute.make_rmem_tensor(count, dtype)
    source = cute.make_ptr(dtype, address, GMEM, assumed_align=min(16, count * dtype.width // 8))
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
    return values


@cute.jit
def put_vector(values: cute.Tensor, address: Int64) -> None:
    """Neighbouring elements from registers to global memory, in one access."""
    dtype, count = values.element_type, cute.size(values)
    target = cute.make_ptr(dtype, address, GMEM, assumed_align=count * dtype.width // 8)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(count)))


@cute.jit
def prologue(
    A: Args,
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Round n asks for the inputs of item n and works on item n-1; an item's inputs have two stages."""
    tid = warp * 32 + lane
    item = start
    slot = slot_of(A, item.request, zero)
    record = record_row_of(A, item.request, zero, P)
    # The item before: the one that is worked on.
    head, own_slot, own_record = item.head, Int32(0), Int32(-1)

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

        later = next_item(item, A.heads, A.requests)
        later_slot, later_record = Int32(0), Int32(-1)
        if n + 1 < count:
            later_slot = slot_of(A, later.request, zero)
            later_record = record_row_of(A, later.request, zero, P)

        if head != loaded:
            loaded = head
            load_taps(A, M, head, tid, P)
            a_log = load_gate(A, weights, biases, head, zero, warp, lane, P)
        arch.cp_async_commit_group()
        if n < count and slot > 0:
            load_window(A, M, stage, slot, item.head, tid, P)
        if n == 0:
            arch.griddepcontrol_wait()
            arch.griddepcontrol_launch_dependents()
        if n < count and slot > 0:
            load_projection(A, M, stage, item, tid, P)
        arch.cp_async_commit_group()

        if n > 0:
            before = stage ^ 1
            x = stage_of(M.inputs, before, 2)
            if own_slot > 0:
                if const_expr(P.layout == "rows"):
                    roll_window(stage_of(M.window, before, 2), x, tid, P)
                gate(A, M, weights, biases, a_log, stage_of(M.f_a, before, 2), warp, lane, P)
            arch.cp_async_wait_group(1)  # the taps
            arch.barrier(barrier_id=_PROLOGUE_BARRIER, number_of_threads=P.prologue_threads)

            # Item n-1 takes the stage (n-1) % 2 for the (n-1) / 2-th time.
            arch.mbarrier_wait(M.vectors_empty + before, (((n - 1) >> 1) & 1) ^ 1)
            if const_expr(P.kind == "record"):
                arch.mbarrier_wait(M.values_empty + value_stage, value_phase)
            if own_slot > 0:
                if const_expr(P.kind == "record"):
                    record_vectors(A, M, x, before, value_stage, head, own_record, warp, lane, P)
                else:
                    decode_vectors(M, x, before, head, warp, lane, P)
            arrive(M.vectors_full + before, lane)
            if own_slot > 0:
                store_window(A, M, x, before, own_slot, head, tid, P)
            value_stage += 1
            if value_stage == VALUE_STAGES:
                value_stage, value_phase = Int32(0), value_phase ^ 1

        head, own_slot, own_record = item.head, slot, record
        item, slot, record = later, later_slot, later_record


@cute.jit
def load_taps(A: Args, M: cutlass.Constexpr, head: Int32, tid: Int32, P: cutlass.Constexpr) -> None:
    """Convolution weights [3, 4, 128] and biases [3, 128] of a head."""
    units = HEAD_DIM * P.weight_bytes // 16  # of a row
    step = P.prologue_threads // units  # rows at a time
    row, unit = tid // units, tid % units
    row_bytes = Int64(A.heads) * (HEAD_DIM * P.weight_bytes)
    offset = Int64(head) * (HEAD_DIM * P.weight_bytes) + row_bytes * row + unit * 16
    target = M.taps.iterator.toint() + tid * 16
    for i in range_constexpr(ceil_div(3 * CONV_WIDTH, step)):
        if row + i * step < 3 * CONV_WIDTH:
            blocks.copy_async(
                target + i * (16 * P.prologue_threads), A.conv_weight + offset + row_bytes * (i * step), 16
            )
    if A.conv_bias != Int64(0):
        if row < 3:
            blocks.copy_async(M.bias.iterator.toint() + tid * 16, A.conv_bias + offset, 16)
    else:
        for i in range_constexpr(ceil_div(3 * HEAD_DIM, P.prologue_threads)):
            if tid + i * P.prologue_threads < 3 * HEAD_DIM:
                M.bias[tid + i * P.prologue_threads] = P.conv_dtype(0)


@cute.jit
def load_gate(
    A: Args,
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
    row = HEAD_DIM // 2
    words = cute.make_ptr(Uint32, A.f_b + Int64(feature) * (4 * row) + lane % 4 * 4, GMEM, assumed_align=4)
    part = cute.make_tensor(words, cute.make_layout((2, 2, _STEPS, P.gate_tiles), stride=(4, 8 * row, 8, 16 * row)))
    for tile in range_constexpr(P.gate_tiles):
        for step in range_constexpr(_STEPS):
            for half in range_constexpr(2):
                for k in range_constexpr(2):
                    weights[k, half, step, tile] = part[k, half, step, tile]
    for tile in range_constexpr(P.gate_tiles):
        for half in range_constexpr(2):
            biases[half, tile] = blocks.at(Float32, A.dt_bias, feature + 16 * tile + 8 * half)
    return blocks.at(Float32, A.A_log, head + zero)


@cute.jit
def load_window(
    A: Args, M: cutlass.Constexpr, stage: Int32, slot: Int32, head: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """rows: all entries, `[3, 128, W]`; taps: the first three, to the rows before the inputs."""
    page = A.conv_state + Int64(slot) * A.conv_stride * 2
    D = Int64(A.heads) * HEAD_DIM
    if const_expr(P.layout == "rows"):
        target = stage_of(M.window, stage, 2).iterator.toint() + tid * 16
        part_bytes = HEAD_DIM * P.window * 2
        source = page + Int64(head) * part_bytes + tid * 16
        for part in range_constexpr(3):
            for i in range_constexpr(ceil_div(part_bytes, 16 * P.prologue_threads)):
                offset = i * 16 * P.prologue_threads
                if tid * 16 + offset < part_bytes:
                    blocks.copy_async(target + (part * part_bytes + offset), source + offset, 16)
            source = source + D * (P.window * 2)
    else:
        row, unit = tid // 16, tid % 16
        step = P.prologue_threads // 16
        target = stage_of(M.inputs, stage, 2).iterator.toint() + tid * 16
        source = page + Int64(head * HEAD_DIM + unit * _UNIT) * 2
        for i in range_constexpr(ceil_div(3 * _HISTORY, step)):
            r = row + step * i  # [entry, part]
            if r < 3 * _HISTORY:
                entry = r // 3
                offset = (Int64(entry) * A.tap_stride + Int64(r - 3 * entry) * D) * 2
                blocks.copy_async(target + i * (16 * P.prologue_threads), source + offset, 16)


@cute.jit
def load_projection(A: Args, M: cutlass.Constexpr, stage: Int32, item: Item, tid: Int32, P: cutlass.Constexpr) -> None:
    """q, k, v of a head, f_a, swizzled, and beta: a thread takes a 16-byte unit of one token, of each or of two."""
    t, unit = tid // 16 % 8, tid % 16
    if t < P.tokens:
        row = A.projected + (Int64(item.request * P.tokens) + t) * A.pitch * 2 + unit * 16
        inputs = stage_of(M.inputs, stage, 2).iterator.toint() + (_HISTORY + t) * (6 * HEAD_DIM) + unit * 16
        place = stage_of(M.f_a, stage, 2).iterator.toint() + t * (2 * HEAD_DIM) + (unit ^ t) * 16
        part_bytes = Int64(A.heads) * (2 * HEAD_DIM)
        part = row + Int64(item.head) * (2 * HEAD_DIM)
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
            word = f_a + 2 * HEAD_DIM + (item.head >> 1) * 4
            blocks.copy_async(stage_of(M.beta, stage, 2).iterator.toint() + t * 4, word, 4)


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
    A: Args,
    M: cutlass.Constexpr,
    x: cute.Tensor,
    stage: Int32,
    slot: Int32,
    head: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The two inputs before this step's, then these, as the first tokens + 2 entries."""
    page = A.conv_state + Int64(slot) * A.conv_stride * 2
    D = Int64(A.heads) * HEAD_DIM
    if const_expr(P.layout == "rows"):
        part_units = HEAD_DIM * P.window // _UNIT
        units = cute.make_tensor(
            stage_of(M.window, stage, 2).iterator,
            cute.make_layout((_UNIT, part_units, 3), stride=(1, _UNIT, HEAD_DIM * P.window)),
        )
        target = page + Int64(head) * (HEAD_DIM * P.window * 2) + tid * 16
        for part in range_constexpr(3):
            for i in range_constexpr(ceil_div(part_units, P.prologue_threads)):
                unit = tid + i * P.prologue_threads
                if unit < part_units:
                    store_unit(units[None, unit, part], target + i * (16 * P.prologue_threads))
            target = target + D * (P.window * 2)
    else:
        # [entry, part] from the second row on
        units = cute.make_tensor(
            x.iterator + 3 * HEAD_DIM, cute.make_layout((_UNIT, (P.tokens + 2) * 48), stride=(1, _UNIT))
        )
        row, unit = tid // 16, tid % 16
        step = P.prologue_threads // 16
        target = page + Int64(head * HEAD_DIM + unit * _UNIT) * 2
        for i in range_constexpr(ceil_div(3 * (P.tokens + 2), step)):
            r = row + step * i
            if r < 3 * (P.tokens + 2):
                entry = r // 3
                offset = (Int64(entry) * A.tap_stride + Int64(r - 3 * entry) * D) * 2
                store_unit(units[None, tid + i * P.prologue_threads], target + offset)


@cute.jit
def store_unit(unit: cute.Tensor, address: Int64) -> None:
    """16 bytes from shared to global memory."""
    values = cute.make_rmem_tensor(_UNIT, BFloat16)
    cute.autovec_copy(unit, values)
    put_vector(values, address)


@cute.jit
def gate(
    A: Args,
    M: cutlass.Constexpr,
    weights: cute.Tensor,
    biases: cute.Tensor,
    a_log: Float32,
    f_a: cute.Tensor,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """16 or 32 features of all tokens per warp: raw gates (record), and the base-2 logarithms of Gamma."""
    g, q = lane // 4, lane % 4
    # Pairs of columns: (pair of a unit, unit, token); units are swizzled by token % 8.
    inputs = cute.make_tensor(
        cute.recast_ptr(f_a.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.tokens), stride=(1, 4, HEAD_DIM // 2)),
    )
    decays = cute.make_tensor(M.decays.iterator, cute.make_layout((HEAD_DIM, P.padded), stride=(1, _DECAY_PITCH)))
    exp_A = blocks.exp(a_log)
    token = min(g, P.tokens - 1)
    chains = 1 if const_expr(P.gate_mode == 0) else 4
    none = (Float32(0), Float32(0), Float32(0), Float32(0))
    for tile in range_constexpr(P.gate_tiles):
        sums = [none for _ in range(chains)]
        for i in range_constexpr(_STEPS):
            chain = i * chains // _STEPS
            a = (weights[0, 0, i, tile], weights[0, 1, i, tile], weights[1, 0, i, tile], weights[1, 1, i, tile])
            b = (inputs[q, 2 * i ^ (token & 7), token], inputs[q, (2 * i + 1) ^ (token & 7), token])
            sums[chain] = blocks.mma_16816(sums[chain], a, b)
        for half in range_constexpr(2):
            feature = warp * (16 * P.gate_tiles) + 16 * tile + 8 * half + g
            logs = cute.make_rmem_tensor(2, Float32)
            for side in range_constexpr(2):
                raw = sums[0][2 * half + side]
                for chain in range_constexpr(1, chains):
                    raw = raw + sums[chain][2 * half + side]
                rounded = raw.to(BFloat16)
                logs[side] = blocks.log_decay(
                    rounded.to(Float32), biases[half, tile], exp_A, A.lower_bound * Float32(_LOG2E)
                )
                if const_expr(P.kind == "record"):
                    gates = cute.make_tensor(
                        M.gates.iterator, cute.make_layout((HEAD_DIM, P.padded), stride=(1, _GATE_PITCH))
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
def record_vectors(
    A: Args,
    M: cutlass.Constexpr,
    x: cute.Tensor,
    stage: Int32,
    value_stage: Int32,
    head: Int32,
    record: Int32,
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
        records = (
            A.key_gates + (Int64(record) * A.key_gates_stride + Int64(head * A.record_tokens) * (2 * HEAD_DIM)) * 2
        )
        inputs = cute.make_tensor(
            x.iterator, cute.make_layout((4, 32, 3, P.rows), stride=(1, 4, HEAD_DIM, 3 * HEAD_DIM))
        )
        taps = cute.make_tensor(
            M.taps.iterator, cute.make_layout((4, 32, CONV_WIDTH, 3), stride=(1, 4, HEAD_DIM, CONV_WIDTH * HEAD_DIM))
        )
        biases = cute.make_tensor(M.bias.iterator, cute.make_layout((4, 32, 3), stride=(1, 4, HEAD_DIM)))
        decays = cute.make_tensor(M.decays.iterator, cute.make_layout((4, 32, P.padded), stride=(1, 4, _DECAY_PITCH)))
        gates = cute.make_tensor(M.gates.iterator, cute.make_layout((4, 32, P.padded), stride=(1, 4, _GATE_PITCH)))
        v = cute.make_tensor(
            stage_of(M.values, value_stage, VALUE_STAGES).iterator,
            cute.make_layout((4, 32, P.padded), stride=(1, 4, HEAD_DIM)),
        )
        cells = fragments_of(M, stage, P)
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
                            put_vector(rounded, records + Int64(t * (2 * HEAD_DIM) + 4 * lane) * 2)
                            raw = cute.make_rmem_tensor(4, BFloat16)
                            cute.autovec_copy(gates[None, lane, t], raw)
                            put_vector(raw, records + Int64(t * (2 * HEAD_DIM) + HEAD_DIM + 4 * lane) * 2)
                    for c in range_constexpr(4):
                        convolved[c] = convolved[c] * exp2(log_gamma[c])
                    vector = t
                    if const_expr(part == 0 and P.tiles == 1):
                        vector = 4 + t
                    tile = 1 if const_expr(part == 0 and P.tiles == 2) else 0
                    put_fragment(convolved, cells, vector * 4 + column, tile, step)

        factors = stage_of(M.factors, value_stage, VALUE_STAGES)
        beta = stage_of(M.beta, stage, 2)
        copies = 16 // P.warp_tokens
        total = blocks.row_sums(squares, 2 * P.warp_tokens, 32, lane)
        inverse = blocks.rsqrt(total + Float32(_KEY_EPS))
        which = lane // copies  # of the squares
        if which % 2 == 1:
            inverse = inverse * A.scale
        if lane % copies == 0:
            factors[(begin + which // 2) * 4 + which % 2] = inverse
        if lane < P.warp_tokens:
            factors[(begin + lane) * 4 + 2] = blocks.sigmoid(beta[(begin + lane) * 2 + (head & 1)].to(Float32))


@cute.jit
def fragments_of(M: cutlass.Constexpr, stage: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """(word, lane, tile, step) of a stage."""
    return cute.make_tensor(
        stage_of(M.vectors, stage, VECTOR_STAGES).iterator,
        cute.make_layout((4, 32, P.tiles + 1, _STEPS), stride=(1, 4, 128, 128 * (P.tiles + 1))),
    )


@cute.jit
def fragment_of(quad: Int32, P: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """MMA step along K, and lane of a group of four, that hold the columns 4*quad .. +3.

    A lane takes 16 neighbouring bytes of a state row: four columns of one step (FP32), or eight of two (BF16).
    """
    if const_expr(P.state_dtype == "fp32"):
        return quad // 4, quad % 4
    return quad // 8 * 2 + quad % 2, quad % 8 // 2


@cute.jit
def decode_vectors(
    M: cutlass.Constexpr,
    x: cute.Tensor,
    stage: Int32,
    head: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Thread = channel of q, k and v: see `vector_words`."""
    channel = warp * 32 + lane
    inputs = cute.make_tensor(x.iterator, cute.make_layout((HEAD_DIM, 3, P.rows), stride=(1, HEAD_DIM, 3 * HEAD_DIM)))
    taps = cute.make_tensor(
        M.taps.iterator, cute.make_layout((HEAD_DIM, CONV_WIDTH, 3), stride=(1, HEAD_DIM, CONV_WIDTH * HEAD_DIM))
    )
    biases = cute.make_tensor(M.bias.iterator, cute.make_layout((HEAD_DIM, 3), stride=(1, HEAD_DIM)))
    convolved = cute.make_rmem_tensor(3, Float32)
    for part in range_constexpr(3):
        y = biases[channel, part].to(Float32)
        for tap in range_constexpr(CONV_WIDTH):
            y += taps[channel, tap, part].to(Float32) * inputs[channel, part, tap].to(Float32)
        convolved[part] = (y * blocks.sigmoid(y)).to(BFloat16).to(Float32)
    q, k, v = convolved[0], convolved[1], convolved[2]
    d = exp2(M.decays[channel])
    words = stage_of(M.vectors, stage, VECTOR_STAGES)
    of_channel = cute.make_tensor(words.iterator, cute.make_layout((HEAD_DIM, 5), stride=(1, HEAD_DIM)))
    of_channel[channel, 0] = d * k
    of_channel[channel, 1] = d * q
    of_channel[channel, 2] = d
    of_channel[channel, 3] = k
    of_channel[channel, 4] = v
    sums = cute.make_rmem_tensor(4, Float32)
    sums[0], sums[1], sums[2], sums[3] = k * k, q * q, k * q, Float32(0)
    total = blocks.row_sums(sums, 4, 32, lane)  # of sum lane // 8
    if lane % 8 == 0 and lane < 24:
        words[5 * HEAD_DIM + lane // 8 * 4 + warp] = total
    if channel == 0:
        words[5 * HEAD_DIM + 12] = blocks.sigmoid(stage_of(M.beta, stage, 2)[head & 1].to(Float32))


@cute.jit
def page_of(A: Args, base: Int64, slot: Int32, head: Int32, P: cutlass.Constexpr) -> Int64:
    return base + (Int64(slot) * A.state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes


@cute.jit
def cells_of(M: cutlass.Constexpr, P: cutlass.Constexpr) -> cute.Tensor:
    """(word, thread, cell, stage)"""
    return cute.make_tensor(
        M.state.iterator,
        cute.make_layout(
            (4, _PRODUCT_THREADS, P.units, P.state_stages),
            stride=(1, 4, 4 * _PRODUCT_THREADS, 4 * _PRODUCT_THREADS * P.units),
        ),
    )


@cute.jit
def load_group(
    cells: cute.Tensor, page: Int64, group: cutlass.Constexpr, stage: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """Ask for a group of a thread's cells, from its place in a page."""
    for i in range_constexpr(P.units // P.groups):
        unit = group * (P.units // P.groups) + i
        blocks.copy_async(cells[None, tid, unit, stage].iterator.toint(), page + P.unit_offset(unit), 16)


@cute.jit
def first_loads(
    A: Args,
    base: Int64,
    cells: cute.Tensor,
    start: Item,
    count: Int32,
    tid: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> Item:
    """Ask for the states that there are stages for. Returns the item after them."""
    item = start
    for n in cutlass.range(P.state_stages, unroll=1):
        slot = Int32(0)
        if n < count:
            slot = slot_of(A, item.request, zero)
        page = page_of(A, base, slot, item.head, P)
        for group in range_constexpr(P.groups):
            if slot > 0:
                load_group(cells, page, group, n, tid, P)
            arch.cp_async_commit_group()
        item = next_item(item, A.heads, A.requests)
    return item


@cute.jit
def record_product(
    A: Args,
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, lane (g, q) = columns of rows g and g + 8. Its cells are refilled with item n + stages."""
    tid = warp * 32 + lane
    base = A.state + Int64((warp * 16 + lane // 4) * (HEAD_DIM * P.item_bytes) + lane % 4 * 16)
    cells = cells_of(M, P)
    item = first_loads(A, base, cells, start, count, tid, zero, P)
    slot = Int32(0)  # of that item
    if count > P.state_stages:
        slot = slot_of(A, item.request, zero)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    state_stage, result_stage, result_phase = Int32(0), Int32(0), Int32(1)
    for n in cutlass.range(count, unroll=1):
        stage = n & 1
        refill = slot
        page = page_of(A, base, slot, item.head, P)
        item = next_item(item, A.heads, A.requests)
        slot = Int32(0)
        if n + 1 + P.state_stages < count:
            slot = slot_of(A, item.request, zero)

        arch.mbarrier_wait(M.vectors_full + stage, (n >> 1) & 1)
        fragments = fragments_of(M, stage, P)
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
        arrive(M.vectors_empty + stage, lane)

        arch.mbarrier_wait(M.results_empty + result_stage, result_phase)
        put_results(stage_of(M.results, result_stage, P.result_stages), sums, corrections, coefficients, warp, lane, P)
        arrive(M.results_full + result_stage, lane)
        state_stage += 1
        if state_stage == P.state_stages:
            state_stage = Int32(0)
        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1


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
    """w and y [column, row], and this warp's partial sums of A and B [partial, s, column]."""
    g, q = lane // 4, lane % 4
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, _RESULT_PITCH)))
    for tile in range_constexpr(P.tiles):
        for half in range_constexpr(2):
            for side in range_constexpr(2):
                total = sums[tile][2 * half + side] + corrections[tile][2 * half + side]
                rows[warp * 16 + 8 * half + g, 8 * tile + 2 * q + side] = total
    partial = cute.make_tensor(
        results.iterator + P.columns * _RESULT_PITCH,
        cute.make_layout((2, 4, P.tiles, 8, P.partials), stride=(1, 2, 8, P.columns, 8 * P.columns)),
    )
    two = cute.make_rmem_tensor(2, Float32)
    two[0], two[1] = coefficients
    cute.autovec_copy(two, partial[None, q, warp % P.tiles, g, warp // P.tiles])


@cute.jit
def decode_product(
    A: Args,
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, two at a time; a half-warp holds a row. Its cells are refilled with item n + stages."""
    tid = warp * 32 + lane
    row = warp * 16 + lane // 16
    base = A.state + Int64(row * (HEAD_DIM * P.item_bytes) + lane % 16 * 16)
    cells = cells_of(M, P)
    item = first_loads(A, base, cells, start, count, tid, zero, P)
    slot = Int32(0)  # of that item
    if count > P.state_stages:
        slot = slot_of(A, item.request, zero)
    own_item = start
    own_slot = slot_of(A, start.request, zero)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    own = row + lane % 16 // 2 * 2  # row whose sums end up on this lane, and on a neighbour
    state_stage, result_stage, result_phase = Int32(0), Int32(0), Int32(1)
    for n in cutlass.range(count, unroll=1):
        stage = n & 1
        refill = slot
        page = page_of(A, base, slot, item.head, P)
        item = next_item(item, A.heads, A.requests)
        slot = Int32(0)
        if n + 1 + P.state_stages < count:
            slot = slot_of(A, item.request, zero)
        target = page_of(A, base, own_slot, own_item.head, P)
        live = own_slot > 0
        own_item = next_item(own_item, A.heads, A.requests)
        own_slot = Int32(0)
        if n + 1 < count:
            own_slot = slot_of(A, own_item.request, zero)

        arch.cp_async_wait_group(P.state_stages - 1)
        S = take_state(cells, tid, state_stage, P)
        if refill > 0:
            load_group(cells, page, 0, state_stage, tid, P)
        arch.cp_async_commit_group()

        arch.mbarrier_wait(M.vectors_full + stage, (n >> 1) & 1)
        words = stage_of(M.vectors, stage, VECTOR_STAGES)
        w = row_products(S, words, 0, lane, P)
        y = row_products(S, words, 1, lane, P)
        dots = cute.make_rmem_tensor((4, 4), Float32)  # parts of k.k, q.q, k.q; beta
        cute.autovec_copy(cute.make_tensor(words.iterator + 5 * HEAD_DIM, cute.make_layout((4, 4))), dots)
        kk = (dots[0, 0] + dots[1, 0]) + (dots[2, 0] + dots[3, 0])
        qq = (dots[0, 1] + dots[1, 1]) + (dots[2, 1] + dots[3, 1])
        kq = (dots[0, 2] + dots[1, 2]) + (dots[2, 2] + dots[3, 2])
        rk = blocks.rsqrt(kk + Float32(_KEY_EPS))
        rq = A.scale * blocks.rsqrt(qq + Float32(_KEY_EPS))
        u = dots[0, 3] * (words[4 * HEAD_DIM + own] - w * rk)
        o = rq * (y + u * rk * kq)

        arch.mbarrier_wait(M.results_empty + result_stage, result_phase)
        results = stage_of(M.results, result_stage, P.result_stages)
        if lane % 2 == 0:
            results[own] = o
        arrive(M.results_full + result_stage, lane)

        update(S, words, u * rk, lane, P)
        arrive(M.vectors_empty + stage, lane)
        if live:
            store_state(S, target, P)
        state_stage += 1
        if state_stage == P.state_stages:
            state_stage = Int32(0)
        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1


@cute.jit
def take_state(cells: cute.Tensor, tid: Int32, stage: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A thread's cells of a stage in registers, (element, cell)."""
    S = cute.make_rmem_tensor((P.vector, P.units), Float32)
    for unit in range_constexpr(P.units):
        raw = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(cells[None, tid, unit, stage], raw)
        S[None, unit].store(cute.recast_tensor(raw, P.dtype).load().to(Float32))
    return S


@cute.jit
def store_state(S: cute.Tensor, target: Int64, P: cutlass.Constexpr) -> None:
    for unit in range_constexpr(P.units):
        piece = cute.make_rmem_tensor(P.vector, P.dtype)
        piece.store(S[None, unit].load().to(P.dtype))
        put_vector(piece, target + P.unit_offset(unit))


@cute.jit
def columns_of(words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A vector's elements in this lane's columns, (4, fours of a row)."""
    fours = cute.make_tensor(
        words.iterator + which * HEAD_DIM,
        cute.make_layout((4, 16, 2), stride=(1, P.vector, 64 if P.state_dtype == "fp32" else 4)),
    )
    x = cute.make_rmem_tensor((4, 2), Float32)
    for i in range_constexpr(2):
        cute.autovec_copy(fours[None, lane % 16, i], x[None, i])
    return x


@cute.jit
def row_products(
    S: cute.Tensor, words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr
) -> Float32:
    """The product of a vector with this lane's row: see `own` in `decode_product`."""
    x = columns_of(words, which, lane, P)
    sums = cute.make_rmem_tensor(8, Float32)
    for j in range_constexpr(8):
        sums[j] = Float32(0)
        for e in range_constexpr(8):
            sums[j] += S[8 * j + e] * x[e]
    return blocks.row_sums(sums, 8, 16, lane)


@cute.jit
def update(S: cute.Tensor, words: cute.Tensor, correction: Float32, lane: Int32, P: cutlass.Constexpr) -> None:
    """S = S d + (u rk) k, each row's u rk from the lanes that hold it."""
    d = columns_of(words, 2, lane, P)
    k = columns_of(words, 3, lane, P)
    for j in range_constexpr(8):
        # Within groups of 16 lanes, so that the source is a constant.
        u = arch.shuffle_sync(correction, 2 * j, mask_and_clamp=(32 - 16) << 8 | 31)
        for e in range_constexpr(8):
            S[8 * j + e] = S[8 * j + e] * d[e] + u * k[e]


@cute.jit
def record_epilogue(
    A: Args, M: cutlass.Constexpr, start: Item, count: Int32, tid: Int32, zero: Int32, P: cutlass.Constexpr
) -> None:
    """Thread = state row in the substitution, 8 channels of a token in the norm."""
    lane = tid % 32
    t, unit = min(tid // 16, P.tokens - 1), tid % 16
    norm = get_vector(Float32, A.norm_weight + Int64(unit) * 32, _UNIT)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    item = start
    result_stage, result_phase, value_stage = Int32(0), Int32(0), Int32(0)
    for _ in cutlass.range(count, unroll=1):
        slot = slot_of(A, item.request, zero)
        record = record_row_of(A, item.request, zero, P)
        gate_address, target = channels_of(A, item, t, unit * _UNIT, P)
        gates = get_vector(BFloat16, gate_address, _UNIT)

        arch.mbarrier_wait(M.results_full + result_stage, result_phase)
        if slot > 0:
            results = stage_of(M.results, result_stage, P.result_stages)
            kept = Int64(record) * A.corrections_stride + Int64(item.head * A.record_tokens) * HEAD_DIM + tid
            add_coefficients(results, M.coefficients, tid, P)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=P.epilogue_threads)
            substitute(M, results, value_stage, record, A.corrections + kept * 4, tid, P)
            arrive(M.results_empty + result_stage, lane)
            if lane == 0:
                arch.mbarrier_arrive(M.values_empty + value_stage)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=P.epilogue_threads)
            outputs = cute.make_tensor(
                M.outputs.iterator, cute.make_layout((_UNIT, 16, P.tokens), stride=(1, _UNIT, HEAD_DIM))
            )
            o = cute.make_rmem_tensor(_UNIT, BFloat16)
            cute.autovec_copy(outputs[None, unit, t], o)
            result = normalize(o, gates, norm, A.eps, 16)
            if tid < 16 * P.tokens:
                put_vector(result, target)
        else:
            arrive(M.results_empty + result_stage, lane)
            if lane == 0:
                arch.mbarrier_arrive(M.values_empty + value_stage)
            gates.fill(BFloat16(0))
            if tid < 16 * P.tokens:
                put_vector(gates, target)

        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1
        value_stage += 1
        if value_stage == VALUE_STAGES:
            value_stage = Int32(0)
        item = next_item(item, A.heads, A.requests)


@cute.jit
def channels_of(A: Args, item: Item, t: Int32, channel: Int32, P: cutlass.Constexpr) -> tuple[Int64, Int64]:
    """Addresses of a token's output gate and output, from a channel of the item's head on."""
    row = Int64(item.request * P.tokens) + t
    D = Int64(A.heads) * HEAD_DIM
    mine = Int64(item.head * HEAD_DIM + channel)
    return A.projected + (row * A.pitch + D * 3 + mine) * 2, A.out + (row * D + mine) * 2


@cute.jit
def add_coefficients(results: cute.Tensor, coefficients: cute.Tensor, tid: Int32, P: cutlass.Constexpr) -> None:
    """A and B [s, column] from their partial sums, in the same order every time."""
    partial = cute.make_tensor(
        results.iterator + P.columns * _RESULT_PITCH,
        cute.make_layout((8 * P.columns, P.partials), stride=(1, 8 * P.columns)),
    )
    if tid < 8 * P.columns:
        total = partial[tid, 0]
        for i in range_constexpr(1, P.partials):
            total += partial[tid, i]
        coefficients[tid] = total


@cute.jit
def substitute(
    M: cutlass.Constexpr,
    results: cute.Tensor,
    value_stage: Int32,
    record: Int32,
    kept: Int64,
    row: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Corrections and outputs of one row. As soon as a correction is known, all later sums take their part of it."""
    half = P.columns // 2
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, _RESULT_PITCH)))
    v = cute.make_tensor(
        stage_of(M.values, value_stage, VALUE_STAGES).iterator,
        cute.make_layout((HEAD_DIM, P.padded), stride=(1, HEAD_DIM)),
    )
    token_factors = cute.make_tensor(
        stage_of(M.factors, value_stage, VALUE_STAGES).iterator, cute.make_layout((4, P.padded), stride=(1, 4))
    )
    coefficients = cute.make_tensor(
        M.coefficients.iterator, cute.make_layout((4, P.columns // 4, 8), stride=(1, 4, P.columns))
    )
    outputs = cute.make_tensor(M.outputs.iterator, cute.make_layout((HEAD_DIM, P.tokens), stride=(1, HEAD_DIM)))
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
        column = cute.make_rmem_tensor((4, P.columns // 4), Float32)
        for i in range_constexpr(P.columns // 4):
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
    o: cute.Tensor, gates: cute.Tensor, norm: cute.Tensor, eps: Float32, lanes: cutlass.Constexpr
) -> cute.Tensor:
    """RMSNorm and output gate of a token's channels, which lie on neighbouring lanes."""
    square = Float32(0)
    for e in range_constexpr(cute.size(o)):
        square += o[e].to(Float32) * o[e].to(Float32)
    rms = blocks.rsqrt(blocks.lane_sum(square, 1, lanes) * Float32(1 / HEAD_DIM) + eps)
    result = cute.make_rmem_tensor(cute.size(o), BFloat16)
    for e in range_constexpr(cute.size(o)):
        result[e] = (o[e].to(Float32) * rms * (norm[e] * blocks.sigmoid(gates[e].to(Float32)))).to(BFloat16)
    return result


@cute.jit
def decode_epilogue(
    A: Args, M: cutlass.Constexpr, start: Item, count: Int32, lane: Int32, zero: Int32, P: cutlass.Constexpr
) -> None:
    """Lane = four channels."""
    norm = get_vector(Float32, A.norm_weight + Int64(lane) * 16, 4)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    item = start
    result_stage, result_phase = Int32(0), Int32(0)
    for _ in cutlass.range(count, unroll=1):
        slot = slot_of(A, item.request, zero)
        gate_address, target = channels_of(A, item, Int32(0), 4 * lane, P)
        gates = get_vector(BFloat16, gate_address, 4)
        arch.mbarrier_wait(M.results_full + result_stage, result_phase)
        results = cute.make_tensor(
            stage_of(M.results, result_stage, P.result_stages).iterator, cute.make_layout((4, 32), stride=(1, 4))
        )
        o = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(results[None, lane], o)
        arrive(M.results_empty + result_stage, lane)
        rounded = cute.make_rmem_tensor(4, BFloat16)
        rounded.store(o.load().to(BFloat16))
        result = normalize(rounded, gates, norm, A.eps, 32)
        if slot <= 0:
            result.fill(BFloat16(0))
        put_vector(result, target)
        result_stage += 1
        if result_stage == P.result_stages:
            result_stage, result_phase = Int32(0), result_phase ^ 1
        item = next_item(item, A.heads, A.requests)
