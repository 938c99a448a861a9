"""KdaSplit token by token, all kinds.

Operands: `kda_kernels.variants.split`, of whose kernels this is the one for `form="recurrence"`.

CTA r of a cluster owns rows, channels and gate features r*128/split .. of its item:
  load       slot; weights and projection (cp.async), without awaiting it; then window (cp.async)
             and state rows (LDG or cp.async, in flight until the recurrence). In a chain the
             projection comes last, behind the PDL wait
  gate       its gate features of all tokens, FP32 dot products or tensor cores, while the window is
             on its way
  convolve   its channels of q, k, v of all tokens; a warp copies, rolls and stores the window of
             its own 64 channels
  exchange   decays and unnormalized q and k go to every CTA by st.async, on one mbarrier each
  recurrence token by token over its state rows. Norms are deferred: with S' = S d, W = S' k and Y =
  S' q
               u = beta (v - W rk),  o = Y rq + u (k.q) rk rq,  S = S' + u rk k,  rk and rq the
                                     inverse norms
             so no norm is awaited before the products, and o not for the updated state. One token's
             state decays before q and k are there
  normalize  RMSNorm; sums of squares go to every CTA by st.async
No CTA leaves before it has received all that its peers send, so none is written to after its end.
Source: docs/operation.md, "The mathematics, per item".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.blocks import UNIT
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.smem import Area, Barriers, Smem
from kda_kernels.parts import conv_window, prologue
from kda_kernels.parts.cluster import ClusterPlan
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Place, Record, Rows
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, ceil_div

_DECAYS, _CHANNELS, _SQUARES = range(3)
"""mbarriers of a CTA of a cluster: for what the others send."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


@dataclass(frozen=True)
class Plan(ClusterPlan):
    """What decides the code.

    lanes      that share a state row
    staging    state rows wait in registers, or in shared memory
    evict      evict-first in L2 for staged state
    gate_mode  2: FP32 dot products
    """

    lanes: int
    staging: str
    evict: bool

    def refused(self, gpu: Gpu) -> str | None:
        """Why the state and the gate can't be shared out among a CTA's threads like this, or
        None."""
        shape, fewest = f"split={self.split} threads={self.threads}", max(self.step, 2)
        if self.warp_rows < fewest:
            return f"{shape} lanes_per_row={self.lanes}: fewer than {fewest} rows per warp"
        if self.state_registers > 64:
            return f"{shape}: {self.state_registers} state values per thread exceed 64"
        capped = self.ctas_per_sm * self.threads >= 512
        if self.tokens > 1 and self.state_registers > 32 and capped and gpu.arch != "sm_90a":
            return f"{shape}: windows spill with {self.state_registers} state values per thread"
        if self.gate_mode != 2 and self.rows // 16 > self.warps:
            return f"gate_mode={self.gate_mode}: {self.rows} features need {self.rows // 16} warps"
        return None

    @property
    def warp_rows(self) -> int:
        return self.rows // self.warps

    @property
    def step(self) -> int:
        """Rows a warp covers at once."""
        return 32 // self.lanes

    @property
    def thread_rows(self) -> int:
        return self.warp_rows // self.step

    @property
    def copies(self) -> int:
        """Neighbouring lanes that end up with the same row's sum."""
        return self.lanes // self.thread_rows

    @property
    def vector(self) -> int:
        """State elements of one load."""
        return min(16 // self.item_bytes, HEAD_DIM // self.lanes)

    @property
    def chunks(self) -> int:
        """Loads of a thread per row."""
        return HEAD_DIM // self.lanes // self.vector

    @property
    def state_registers(self) -> int:
        return self.thread_rows * HEAD_DIM // self.lanes

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold: at 128 registers a thread with 64 values of state, else 80 or
        96."""
        registers = 128 if self.state_registers > 32 else 80 if self.tokens == 1 else 96
        return self.ctas_with(registers)

    @property
    def slot_count(self) -> int:
        """Slots of a request."""
        return self.tokens if self.kind == "spec" else 1

    @property
    def token_groups(self) -> int:
        """Groups of tokens that different threads convolve; the second never reaches back into the
        window."""
        return 2 if self.tokens > 4 and 3 * self.rows <= self.threads else 1

    @property
    def group_tokens(self) -> int:
        return ceil_div(self.tokens, self.token_groups)

    @property
    def younger_groups(self) -> int:
        """Groups of copies that may be in flight when weights and projection must be there: window,
        staged state."""
        if self.chained:
            return 0
        return 2 if self.staging == "shared" and not self.late else 1

    @property
    def norm_slots(self) -> int:
        """Partial sums of squares that a CTA gets per token."""
        return self.split * self.warps if self.tokens == 1 else self.split

    @property
    def vector_layout(self) -> Any:
        """q, k and decay of all tokens in shared memory, in a thread's columns:
        (vector, lane, chunk, 3*token + part)."""
        return cute.make_layout(
            (self.vector, self.lanes, self.chunks, 3 * self.tokens),
            stride=(1, self.vector, self.lanes * self.vector, HEAD_DIM),
        )

    @property
    def state_layout(self) -> Any:
        """A thread's part of a state page: (vector, chunk, row)."""
        return cute.make_layout(
            (self.vector, self.chunks, self.thread_rows),
            stride=(1, self.lanes * self.vector, self.step * HEAD_DIM),
        )

    @property
    def stage_layout(self) -> Any:
        """Staged state, private to its thread: (vector, chunk, row), thread."""
        cell = self.threads * self.vector
        return cute.make_layout(
            ((self.vector, self.chunks, self.thread_rows), self.threads),
            stride=((1, cell, self.chunks * cell), self.vector),
        )

    @property
    def areas(self) -> dict[str, Area]:
        rows, tokens = self.rows, self.tokens
        entries = (rows, 3, self.history + tokens)
        areas = {
            "x": Area(BFloat16, entries),
            # Of all tokens q, k and decays of 128, then v of the CTA's rows.
            "vectors": Area(Float32, tokens * (3 * HEAD_DIM + rows)),
            # Rows of 128, swizzled for tensor cores.
            "gate_weight": Area(BFloat16, rows * HEAD_DIM),
            "taps": Area(self.conv_dtype, (rows, CONV_WIDTH, 3)),
            "bias": Area(self.conv_dtype, (rows, 3)),
            "dt_bias": Area(Float32, rows),
            "norm_weight": Area(Float32, rows),
            "A_log": Area(Float32, 1),
            "f_a": Area(BFloat16, tokens * HEAD_DIM),
            "out_gate": Area(BFloat16, (rows, tokens)),
            "beta": Area(BFloat16, (2, tokens)),
            # Of squares of o, by those who send them.
            "sums": Area(Float32, (self.norm_slots, tokens)),
            "window": Area(BFloat16, entries, inside="x"),
        }
        if self.layout == "rows":
            areas["window"] = Area(BFloat16, 3 * rows * self.window)
        if tokens > 1:
            areas |= {"factors": Area(Float32, (4, tokens)), "o": Area(BFloat16, (rows, tokens))}
        if self.staging == "shared":
            areas["state"] = Area(self.dtype, rows * HEAD_DIM)
        return areas | {"barriers": Barriers(shape=4)}

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)


@cute.kernel
def kda_split(A: Arguments, P: cutlass.Constexpr) -> None:
    if const_expr(P.split > 1):
        blocks.declare_cluster(P.split)
    tid, _, _ = arch.thread_idx()
    column, request, _ = arch.block_idx()
    rank, head = column % P.split, column // P.split
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    mine = ask_numbers(A, request, lane, P)

    M = smem.allocate_as_they_are(P.areas)
    if const_expr(P.split > 1):
        floats = (P.tokens * HEAD_DIM, P.tokens * (2 * HEAD_DIM + P.rows), P.tokens * P.norm_slots)
        prologue.join_cluster(M.barriers, tuple(4 * n for n in floats), tid)
    at = Place(tid, warp, lane, rank, head, head * HEAD_DIM + rank * P.rows, A.heads * HEAD_DIM)
    inputs = prologue.projected_of(A, request, P)
    results = prologue.results_of(A, request, at, P)
    load_weights(A, M, at, P)
    if const_expr(P.split > 1):
        arch.cluster_wait()
    if const_expr(not P.chained):
        prologue.load_projection(prologue.copy_rows, M, inputs, A.pitch, at, P)
        arch.cp_async_commit_group()

    numbers = numbers_of(mine, P)
    if numbers.page > 0 and numbers.read > 0:
        window = conv_window.window_of(A, numbers.page, numbers.start)
        conv_window.load_own(M, window, at, P)
        if const_expr(not P.chained):
            arch.cp_async_commit_group()
        pages = A.state + Int64(head * (HEAD_DIM * HEAD_DIM) + thread_offset(at, P)) * P.item_bytes
        page_bytes = A.state_stride * P.item_bytes
        raw = cute.make_rmem_tensor((P.vector, P.chunks, P.thread_rows), P.dtype)
        if const_expr(not P.late):
            ask_state(raw, M, pages + Int64(numbers.read) * page_bytes, at, P)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        if const_expr(P.chained):
            prologue.load_projection(prologue.copy_rows, M, inputs, A.pitch, at, P)
            arch.cp_async_commit_group()

        arch.cp_async_wait_group(P.younger_groups)
        arch.sync_threads()
        if const_expr(P.late):
            ask_state(raw, M, pages + Int64(numbers.read) * page_bytes, at, P)
        record = prologue.record_of(A, numbers.row, head)
        own = row_of_sums(at, P)
        gate(M, A.lower_bound, record, at, P)
        arch.cp_async_wait_group(1 if const_expr(P.staging == "shared") else 0)
        arch.sync_warp()
        convolve(M, window, record, at, P)
        arch.sync_warp()
        conv_window.store_own(M, window, at, P)

        if const_expr(P.staging == "shared"):
            arch.cp_async_wait_group(0)
            unstage_state(raw, M, at, P)
        prologue.meet(M, _DECAYS, P)
        if const_expr(P.tokens == 1):
            step_token(A, raw, M, pages + Int64(numbers.page) * page_bytes, results, own, at, P)
        else:
            step_window(A, raw, M, mine, pages, page_bytes, record, own, at, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        prologue.store_zeros(results, at, P)


class Numbers(NamedTuple):
    """What the engine says of a request.

    page    slot of its window, and of its first state
    read    slot of the state that it goes on from
    start   first entry of its window's history
    row     of its record, negative for none
    """

    page: Int32
    read: Int32
    start: Int32
    row: Int32


@cute.jit
def ask_numbers(A: Arguments, request: Int32, lane: Int32, P: cutlass.Constexpr) -> Int32:
    """Slots on the first lanes, then accepted or the record row.

    One load for all of them, so that none shares a scoreboard with the state, and is waited for
    with it.
    """
    table = prologue.slots_of(A, request)
    if const_expr(P.kind != "decode"):
        if lane < P.slot_count:
            table += Int64(lane) * 4
        else:
            table = (A.accepted if const_expr(P.kind == "spec") else A.record_rows) + Int64(
                request
            ) * 4
    return blocks.at(Int32, table, Int32(0))


@cute.jit
def numbers_of(mine: Int32, P: cutlass.Constexpr) -> Numbers:
    """From what `ask_numbers` left on the lanes. By shuffle, even where all lanes hold it: the
    compiler would move a number known to be uniform to a uniform register as soon as it is loaded,
    and so wait for it before the copies."""
    page = arch.shuffle_sync(mine, 0)
    read, start, row = page, Int32(0), Int32(-1)
    if const_expr(P.kind == "spec"):
        start = min(max(arch.shuffle_sync(mine, P.slot_count) - 1, Int32(0)), Int32(P.tokens - 1))
        read = arch.shuffle_sync(mine, start)
    if const_expr(P.kind == "record"):
        row = arch.shuffle_sync(mine, P.slot_count)
    return Numbers(page, read, start, row)


@cute.jit
def row_of_sums(at: Place, P: cutlass.Constexpr) -> Int32:
    """Row of the CTA whose sums `product` gives this lane."""
    return at.warp * P.warp_rows + P.step * (at.lane % P.lanes // P.copies) + at.lane // P.lanes


@cute.jit
def thread_offset(at: Place, P: cutlass.Constexpr) -> Int32:
    """Element of a state page where this thread's part starts."""
    row = at.rank * P.rows + at.warp * P.warp_rows + at.lane // P.lanes
    return row * HEAD_DIM + at.lane % P.lanes * P.vector


@cute.jit
def load_weights(A: Arguments, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    quads, tap_bytes, none = P.rows // 4, Int64(at.D) * P.weight_bytes, Int64(0)
    rows = Rows(1, P.rows, HEAD_DIM // UNIT, swizzled=P.gate_mode != 2)
    features = A.f_b + Int64(at.channel) * (2 * HEAD_DIM)
    prologue.copy_rows(M.gate_weight.iterator, features, none, Int64(2 * HEAD_DIM), rows, at, P)
    prologue.load_taps(prologue.copy_rows, A, M, tap_bytes, 0, at, P)
    used = prologue.tap_units(P)
    rows = Rows(1, 1, quads, first=used)
    prologue.copy_rows(
        M.dt_bias.iterator, A.dt_bias + Int64(at.channel) * 4, none, none, rows, at, P
    )
    rows = Rows(1, 1, quads, first=used + quads)
    prologue.copy_rows(
        M.norm_weight.iterator, A.norm_weight + Int64(at.rank * P.rows) * 4, none, none, rows, at, P
    )
    if at.tid == P.threads - 1:
        blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(at.head) * 4, 4)


@cute.jit
def ask_state(raw: cute.Tensor, M: Smem, address: Int64, at: Place, P: cutlass.Constexpr) -> None:
    """Start to load this thread's part of a state page; staged, as a group of copies, unless in one
    with all others."""
    if const_expr(P.staging == "registers"):
        load_state(raw, address, P)
    else:
        stage_state(M, address, at, P)
        if const_expr(P.late or not P.chained):
            arch.cp_async_commit_group()


@cute.jit
def load_state(raw: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    """This thread's part of a state page to registers: [vector, chunks, rows]."""
    nbytes = P.vector * P.item_bytes
    part = cute.make_tensor(
        cute.make_ptr(P.dtype, address, GMEM, assumed_align=nbytes), P.state_layout
    )
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(P.hints):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    load = cute.nvgpu.CopyG2ROp()
    atom = cute.make_copy_atom(
        load, P.dtype, num_bits_per_copy=8 * nbytes, l1c_evict_priority=priority
    )
    for j in range_constexpr(P.thread_rows):
        for c in range_constexpr(P.chunks):
            cute.copy(atom, part[None, c, j], raw[None, c, j])


@cute.jit
def stage_state(M: Smem, address: Int64, at: Place, P: cutlass.Constexpr) -> None:
    """This thread's part of a state page to its own cells of shared memory."""
    nbytes = P.vector * P.item_bytes
    base = M.state.iterator.toint() + at.tid * nbytes
    policy = Int64(0)
    if const_expr(P.evict):
        policy = blocks.evict_first()
    for j in range_constexpr(P.thread_rows):
        for c in range_constexpr(P.chunks):
            cell = base + (j * P.chunks + c) * P.threads * nbytes
            source = address + (j * P.step * HEAD_DIM + c * P.lanes * P.vector) * P.item_bytes
            if const_expr(P.evict):
                blocks.copy_async_hinted(cell, source, nbytes, policy)
            else:
                blocks.copy_async(cell, source, nbytes)


@cute.jit
def unstage_state(raw: cute.Tensor, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    staged = cute.make_tensor(M.state.iterator, P.stage_layout)
    for j in range_constexpr(P.thread_rows):
        for c in range_constexpr(P.chunks):
            cute.autovec_copy(staged[(None, c, j), at.tid], raw[None, c, j])


@cute.jit
def store_state(S: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    nbytes = P.vector * P.item_bytes
    part = cute.make_tensor(
        cute.make_ptr(P.dtype, address, GMEM, assumed_align=nbytes), P.state_layout
    )
    mode = cute.nvgpu.StoreCacheMode.NONE
    if const_expr(P.hints):
        mode = cute.nvgpu.StoreCacheMode.STREAMING
    store = cute.nvgpu.CopyR2GOp()
    atom = cute.make_copy_atom(store, P.dtype, num_bits_per_copy=8 * nbytes, store_cache_mode=mode)
    for j in range_constexpr(P.thread_rows):
        for c in range_constexpr(P.chunks):
            piece = cute.make_rmem_tensor(P.vector, P.dtype)
            piece.store(S[None, c, j].load().to(P.dtype))
            cute.copy(atom, piece, part[None, c, j])


@cute.jit
def gate(M: Smem, lower_bound: Float32, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """This CTA's decays of all tokens, to every CTA; raw gates to the record."""
    exp_A = blocks.exp(M.A_log[0])
    if const_expr(P.gate_mode == 2):
        if const_expr(P.tokens == 1):
            _gate_dot(M, Int32(0), exp_A, lower_bound, record, at, P)
        else:
            for t in cutlass.range(P.tokens, unroll=1):
                _gate_dot(M, t, exp_A, lower_bound, record, at, P)
    elif const_expr(P.rows // 16 == P.warps):
        _gate_mma(M, exp_A, lower_bound, record, at, P)
    else:
        if at.warp < P.rows // 16:
            _gate_mma(M, exp_A, lower_bound, record, at, P)


@cute.jit
def _gate_dot(
    M: Smem,
    t: Int32,
    exp_A: Float32,
    lower_bound: Float32,
    record: Record,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """FP32 dot products of one token: a half-warp per feature, 8 columns per lane."""
    # Pairs of columns: (pair of a unit, unit, row).
    stride = (1, 4, HEAD_DIM // 2)
    weights = cute.make_tensor(
        cute.recast_ptr(M.gate_weight.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.rows), stride=stride),
    )
    inputs = cute.make_tensor(
        cute.recast_ptr(M.f_a.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.tokens), stride=stride),
    )
    half, column = at.lane // 16, at.lane % 16
    count = P.warp_rows // 2
    x = cute.make_rmem_tensor(4, Uint32)
    cute.autovec_copy(inputs[None, column, t], x)
    sums = cute.make_rmem_tensor(count, Float32)
    for i in range_constexpr(count):
        w = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(weights[None, column, at.warp * P.warp_rows + 2 * i + half], w)
        total = Float32(0)
        for e in range_constexpr(4):
            total += blocks.low_half(x[e]) * blocks.low_half(w[e])
            total += blocks.high_half(x[e]) * blocks.high_half(w[e])
        sums[i] = total
    raw = blocks.rounded(blocks.row_sums(sums, count, 16, at.lane))
    copies = 16 // count
    feature = at.warp * P.warp_rows + 2 * (column // copies) + half
    # Lane `copy` of those that hold this feature sends it to that CTA.
    copy = column % copies
    d = blocks.exp(blocks.log_decay(raw, M.dt_bias[feature], exp_A, lower_bound))
    place = (3 * t + 2) * HEAD_DIM + at.rank * P.rows + feature
    if copy < P.split:
        _send_to(M, place, d, copy, P)
    if const_expr(P.kind == "record"):
        if copy == 0 and record.row >= 0:
            _record_gate(record, t, feature, raw.to(BFloat16), at, P)


@cute.jit
def _gate_mma(
    M: Smem, exp_A: Float32, lower_bound: Float32, record: Record, at: Place, P: cutlass.Constexpr
) -> None:
    """16 features of all tokens on tensor cores; columns past the last token repeat it."""
    g, q = at.lane // 4, at.lane % 4
    # Pairs of columns: (pair of a unit, unit, row); units are swizzled by row % 8.
    stride = (1, 4, HEAD_DIM // 2)
    weights = cute.make_tensor(
        cute.recast_ptr(M.gate_weight.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.rows), stride=stride),
    )
    inputs = cute.make_tensor(
        cute.recast_ptr(M.f_a.iterator, dtype=Uint32),
        cute.make_layout((4, 16, P.tokens), stride=stride),
    )
    upper = at.warp * 16 + g
    token = min(g, P.tokens - 1)
    chains = 1 if const_expr(P.gate_mode == 0) else 4
    sums = []
    for chain in range_constexpr(chains):
        c = (Float32(0), Float32(0), Float32(0), Float32(0))
        for i in range_constexpr(8 // chains):
            u = 2 * (chain * (8 // chains) + i)
            left, right = u ^ g, (u + 1) ^ g
            a = (weights[q, left, upper], weights[q, left, upper + 8],
                 weights[q, right, upper], weights[q, right, upper + 8])  # fmt: skip
            b = (inputs[q, u ^ (token % 8), token], inputs[q, (u + 1) ^ (token % 8), token])
            c = blocks.mma_16816(c, a, b)
        sums.append(c)
    for i in range_constexpr(4):
        # Elements 0, 1: tokens 2q, 2q+1 of the upper feature; 2, 3: of the lower. One token: both
        # columns equal.
        if const_expr(P.tokens > 1 or i % 2 == 0):
            total = sums[0][i]
            for chain in range_constexpr(1, chains):
                total = total + sums[chain][i]
            feature = upper + 8 * (i // 2)
            raw = total.to(BFloat16)
            d = blocks.exp(
                blocks.log_decay(raw.to(Float32), M.dt_bias[feature], exp_A, lower_bound)
            )
            if const_expr(P.tokens > 1):
                t = 2 * q + i % 2
                if t < P.tokens:
                    place = (3 * t + 2) * HEAD_DIM + at.rank * P.rows + feature
                    for cta in range_constexpr(P.split):
                        _send_to(M, place, d, Int32(cta), P)
                    if const_expr(P.kind == "record"):
                        if record.row >= 0:
                            _record_gate(record, t, feature, raw, at, P)
            else:
                # All four lanes of a feature hold it, and share the CTAs.
                for j in range_constexpr(ceil_div(P.split, 4)):
                    if q + 4 * j < P.split:
                        _send_to(M, 2 * HEAD_DIM + at.rank * P.rows + feature, d, q + 4 * j, P)


@cute.jit
def _send_to(M: Smem, place: Int32, x: Float32, cta: Int32, P: cutlass.Constexpr) -> None:
    """A decay to an element of `vectors` in a CTA of the cluster."""
    if const_expr(P.split == 1):
        M.vectors[place] = x
    else:
        address = M.vectors.iterator.toint() + place * 4
        blocks.send(blocks.peer(address, cta), blocks.peer((M.barriers + _DECAYS).toint(), cta), x)


@cute.jit
def _record_gate(
    record: Record, t: Int32, feature: Int32, raw: BFloat16, at: Place, P: cutlass.Constexpr
) -> None:
    element = t * (2 * HEAD_DIM) + HEAD_DIM + at.rank * P.rows + feature
    blocks.put(BFloat16, record.key_gates + Int64(element) * 2, raw)


@cute.jit
def convolve(M: Smem, window: Window, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """This CTA's channels of q, k, v of all tokens: q and k to every CTA, v to this one; keys to
    the record.

    Thread = two channels of a group of tokens. A window that is copied whole is rolled in shared
    memory.
    """
    pairs = P.rows // 2
    if at.tid < 3 * pairs * P.token_groups:
        group = at.tid // (3 * pairs)
        part, pair = at.tid // pairs % 3, at.tid % pairs
        x = conv_window.inputs_by_pair(M, P)
        weight = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
        bias = cute.make_rmem_tensor(2, P.conv_dtype)
        conv_window.take_weights(weight, bias, M, pair, part, P)
        past = cute.make_rmem_tensor((2, HISTORY), BFloat16)
        first = group * P.group_tokens  # token
        conv_window.take_past(past, x, M, window, group, pair, part, P)
        seen = cute.make_rmem_tensor((2, CONV_WIDTH), Float32)
        for e in range_constexpr(HISTORY):
            for i in range_constexpr(2):
                seen[i, e + 1] = past[i, e].to(Float32)
        # Unrolled further, the tokens take more registers than the state leaves.
        for j in cutlass.range(
            P.group_tokens, unroll=2 if P.kind == "spec" and P.layout == "rows" else 1
        ):
            t = first + j
            if const_expr(P.group_tokens * P.token_groups == P.tokens):
                _convolve_token(t, x, seen, weight, bias, M, record, pair, part, at, P)
            else:
                if t < P.tokens:
                    _convolve_token(t, x, seen, weight, bias, M, record, pair, part, at, P)
        if const_expr(P.layout == "rows"):
            if group == 0:
                conv_window.roll(past, x, M, window, pair, part, P)


@cute.jit
def _convolve_token(
    t: Int32,
    x: cute.Tensor,
    seen: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    M: Smem,
    record: Record,
    pair: Int32,
    part: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """One token of two channels; `seen` holds their last three inputs behind its first place, and
    moves on."""
    new = cute.make_rmem_tensor(2, BFloat16)
    cute.autovec_copy(x[None, pair, part, P.history + t], new)
    values = cute.make_rmem_tensor(2, Float32)
    for i in range_constexpr(2):
        for e in range_constexpr(HISTORY):
            seen[i, e] = seen[i, e + 1]
        seen[i, HISTORY] = new[i].to(Float32)
        y = bias[i].to(Float32)
        for tap in range_constexpr(CONV_WIDTH):
            y += weight[i, tap].to(Float32) * seen[i, tap]
        values[i] = blocks.rounded(y * blocks.sigmoid(y))
    place = (3 * t + part) * HEAD_DIM + at.rank * P.rows + 2 * pair
    if part == 2:
        place = 3 * P.tokens * HEAD_DIM + t * P.rows + 2 * pair
    if const_expr(P.split == 1):
        halves = cute.make_layout((2, P.tokens * 2 * HEAD_DIM), stride=(1, 2))
        cute.autovec_copy(values, cute.make_tensor(M.vectors.iterator, halves)[None, place // 2])
    else:
        address, barrier = M.vectors.iterator.toint() + place * 4, (M.barriers + _CHANNELS).toint()
        if part == 2:
            mine = blocks.peer(barrier, at.rank)
            blocks.send_pair(blocks.peer(address, at.rank), mine, values[0], values[1])
        else:
            for cta in range_constexpr(P.split):
                theirs = blocks.peer(barrier, Int32(cta))
                blocks.send_pair(blocks.peer(address, Int32(cta)), theirs, values[0], values[1])
    if const_expr(P.kind == "record"):
        if part == 1 and record.row >= 0:
            key = record.key_gates + Int64(t * (2 * HEAD_DIM) + at.rank * P.rows + 2 * pair) * 2
            blocks.put(Uint32, key, blocks.pack(values[0], values[1]))


@cute.jit
def columns(
    M: Smem, part: cutlass.Constexpr, t: Int32, at: Place, P: cutlass.Constexpr
) -> cute.Tensor:
    """q, k or the decays (part 0, 1, 2) of token t in this lane's columns: [vector, chunks]."""
    vectors = cute.make_tensor(M.vectors.iterator, P.vector_layout)
    x = cute.make_rmem_tensor((P.vector, P.chunks), Float32)
    for c in range_constexpr(P.chunks):
        cute.autovec_copy(vectors[None, at.lane % P.lanes, c, 3 * t + part], x[None, c])
    return x


@cute.jit
def decayed(
    M: Smem, part: cutlass.Constexpr, t: Int32, at: Place, P: cutlass.Constexpr
) -> cute.Tensor:
    """q or k of token t times its decays, in this lane's columns: as good as decaying the state
    that they meet."""
    x, d = columns(M, part, t, at, P), columns(M, 2, t, at, P)
    for c in range_constexpr(P.chunks):
        for i in range_constexpr(P.vector):
            x[i, c] = x[i, c] * d[i, c]
    return x


@cute.jit
def decay(S: cute.Tensor, d: cute.Tensor, P: cutlass.Constexpr) -> None:
    """S = S d."""
    for j in range_constexpr(P.thread_rows):
        for c in range_constexpr(P.chunks):
            for i in range_constexpr(P.vector):
                S[i, c, j] = S[i, c, j] * d[i, c]


@cute.jit
def product(S: cute.Tensor, x: cute.Tensor, at: Place, P: cutlass.Constexpr) -> Float32:
    """S x: the sum of this lane's row."""
    sums = cute.make_rmem_tensor(P.thread_rows, Float32)
    sums.fill(Float32(0))
    for c in range_constexpr(P.chunks):
        for j in range_constexpr(P.thread_rows):
            for i in range_constexpr(P.vector):
                sums[j] += S[i, c, j] * x[i, c]
    return blocks.row_sums(sums, P.thread_rows, P.lanes, at.lane)


@cute.jit
def update(
    S: cute.Tensor, k: cute.Tensor, correction: Float32, d: Any, P: cutlass.Constexpr
) -> None:
    """S = S d + (u rk) k, each row's u rk from the lanes that hold it; without d for a state that
    has decayed."""
    for j in range_constexpr(P.thread_rows):
        # Within groups of `lanes` lanes, so that the source is a constant.
        u = arch.shuffle_sync(correction, j * P.copies, mask_and_clamp=(32 - P.lanes) << 8 | 31)
        for c in range_constexpr(P.chunks):
            for i in range_constexpr(P.vector):
                kept = S[i, c, j]
                if const_expr(d is not None):
                    kept = kept * d[i, c]
                S[i, c, j] = kept + u * k[i, c]


@cute.jit
def step_token(
    A: Arguments,
    raw: cute.Tensor,
    M: Smem,
    page: Int64,
    results: Int64,
    own: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A decode from its decays on. raw: this thread's part of the state, which goes to `page`."""
    S = cute.make_rmem_tensor((P.vector, P.chunks, P.thread_rows), Float32)
    S.store(raw.load().to(Float32))
    decay(S, columns(M, 2, Int32(0), at, P), P)
    if const_expr(P.split > 1):
        prologue.wait(M, _CHANNELS, P)
    o = decode(S, M, A.scale, page, own, at, P)
    normalize_decode(o, M, A.eps, results, own, at, P)


@cute.jit
def step_window(
    A: Arguments,
    raw: cute.Tensor,
    M: Smem,
    slots: Int32,
    pages: Int64,
    page_bytes: Int64,
    record: Record,
    own: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A spec or record step from its decays on. raw: this thread's part of the state; slots, pages:
    `recurrence`."""
    S = cute.make_rmem_tensor((P.vector, P.chunks, P.thread_rows), Float32)
    if const_expr(P.split > 1):
        prologue.wait(M, _CHANNELS, P)
    factors(M, A.scale, at, P)
    arch.sync_threads()
    S.store(raw.load().to(Float32))
    recurrence(S, M, slots, pages, page_bytes, own, at, P)
    arch.sync_threads()
    # Asked for anew, so that less is kept in registers during the recurrence.
    at, request = prologue.place_anew(A, P)
    results = prologue.results_of(A, request, at, P)
    normalize(M, A.eps, results, record, at, P)


@cute.jit
def decode(
    S: cute.Tensor,
    M: Smem,
    scale: Float32,
    page: Int64,
    own: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> Float32:
    """One token, S decayed; the state goes back to its page. Returns o of row `own`, rounded to
    BF16.

    The sum of squares is on its way to every CTA before the state is updated.
    """
    q, k = columns(M, 0, Int32(0), at, P), columns(M, 1, Int32(0), at, P)
    w = product(S, k, at, P)
    y = product(S, q, at, P)
    rk, rq, kq = blocks.normalizers(q, k, scale, P.lanes)
    beta = blocks.sigmoid(M.beta[at.head % 2, 0].to(Float32))
    u = beta * (M.vectors[3 * HEAD_DIM + own] - w * rk)
    o = blocks.rounded(y * rq + u * kq)

    square = blocks.lane_sum(o * o, P.copies, 32)
    if const_expr(P.split == 1):
        if at.lane == 0:
            M.sums[at.warp, 0] = square
    else:
        if at.lane < P.split:
            address = M.sums.iterator.toint() + (at.rank * P.warps + at.warp) * 4
            barrier = (M.barriers + _SQUARES).toint()
            blocks.send(blocks.peer(address, at.lane), blocks.peer(barrier, at.lane), square)
    update(S, k, u * rk, None, P)
    store_state(S, page, P)
    return o


@cute.jit
def normalize_decode(
    o: Float32, M: Smem, eps: Float32, results: Int64, own: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    gated = M.norm_weight[own] * blocks.sigmoid(M.out_gate[own, 0].to(Float32))
    prologue.meet(M, _SQUARES, P)
    quads = cute.make_tensor(
        M.sums.iterator, cute.make_layout((4, P.norm_slots // 4), stride=(1, 4))
    )
    total = Float32(0)
    for i in range_constexpr(P.norm_slots // 4):
        part = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(quads[None, i], part)
        total += (part[0] + part[1]) + (part[2] + part[3])
    rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + eps)
    if at.lane % P.copies == 0:
        blocks.put(BFloat16, results + Int64(own) * 2, (o * rms * gated).to(BFloat16))


@cute.jit
def factors(M: Smem, scale: Float32, at: Place, P: cutlass.Constexpr) -> None:
    """Per token rk, rq, (k.q) rk rq and beta; a warp per token."""
    quads = cute.make_tensor(
        M.vectors.iterator, cute.make_layout((4, 32, 3 * P.tokens), stride=(1, 4, HEAD_DIM))
    )
    for i in range_constexpr(ceil_div(P.tokens, P.warps)):
        t = at.warp + i * P.warps
        if t < P.tokens:
            q = cute.make_rmem_tensor(4, Float32)
            k = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(quads[None, at.lane, 3 * t], q)
            cute.autovec_copy(quads[None, at.lane, 3 * t + 1], k)
            rk, rq, kq = blocks.normalizers(q, k, scale, 32)
            if at.lane == 0:
                M.factors[0, t] = rk
                M.factors[1, t] = rq
                M.factors[2, t] = kq
                M.factors[3, t] = blocks.sigmoid(M.beta[at.head % 2, t].to(Float32))


@cute.jit
def recurrence(
    S: cute.Tensor,
    M: Smem,
    slots: Int32,
    pages: Int64,
    page_bytes: Int64,
    own: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """All tokens in turn. spec: the state after each goes to its slot, held by lane t; record: u
    replaces v."""
    values = cute.make_tensor(
        M.vectors.iterator + 3 * P.tokens * HEAD_DIM, cute.make_layout((P.rows, P.tokens))
    )
    for t in cutlass.range(P.tokens, unroll=1):
        factor = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(M.factors[None, t], factor)
        v = values[own, t]
        # Vectors are read again each time: to keep them, or the decayed state, takes too many
        # registers.
        w = product(S, decayed(M, 1, t, at, P), at, P)
        y = product(S, decayed(M, 0, blocks.pinned(t), at, P), at, P)
        u = factor[3] * (v - w * factor[0])
        again = blocks.pinned(t)
        if const_expr(P.kind == "record"):
            # The state after the last token is not kept.
            if t + 1 < P.tokens:
                update(
                    S, columns(M, 1, again, at, P), u * factor[0], columns(M, 2, again, at, P), P
                )
        else:
            update(S, columns(M, 1, again, at, P), u * factor[0], columns(M, 2, again, at, P), P)
        o = y * factor[1] + u * factor[2]
        if const_expr(P.kind == "record"):
            arch.sync_warp()  # all lanes of the row have read v
        if at.lane % P.copies == 0:
            M.o[own, t] = o.to(BFloat16)
            if const_expr(P.kind == "record"):
                values[own, t] = u
        if const_expr(P.kind == "spec"):
            slot = arch.shuffle_sync(slots, t)
            if slot > 0:
                store_state(S, pages + Int64(slot) * page_bytes, P)


@cute.jit
def normalize(
    M: Smem, eps: Float32, results: Int64, record: Record, at: Place, P: cutlass.Constexpr
) -> None:
    """All tokens' outputs, four channels per thread; a token's channels of this CTA lie on
    neighbouring lanes.

    record: the corrections, too.
    """
    lanes = P.rows // 4
    total_quads = P.tokens * lanes
    count = ceil_div(total_quads, P.threads)
    layout = cute.make_layout((4, lanes, P.tokens), stride=(1, 4, P.rows))
    o = cute.make_rmem_tensor((4, count), BFloat16)
    squares = cute.make_rmem_tensor(count, Float32)
    for i in range_constexpr(count):
        # Lanes past the end repeat the last quad: the sums need whole warps.
        index = min(at.tid + i * P.threads, total_quads - 1)
        t, quad = index // lanes, index % lanes
        cute.autovec_copy(cute.make_tensor(M.o.iterator, layout)[None, quad, t], o[None, i])
        square = Float32(0)
        for e in range_constexpr(4):
            square += o[e, i].to(Float32) * o[e, i].to(Float32)
        squares[i] = blocks.lane_sum(square, 1, lanes)
        if const_expr(P.split > 1):
            if at.tid + i * P.threads < total_quads:
                address = M.sums.iterator.toint() + (t * P.split + at.rank) * 4
                barrier = (M.barriers + _SQUARES).toint()
                for j in range_constexpr(ceil_div(P.split, lanes)):
                    cta = quad + j * lanes
                    if cta < P.split:
                        blocks.send(
                            blocks.peer(address, cta), blocks.peer(barrier, cta), squares[i]
                        )
    if const_expr(P.kind == "record"):
        if record.row >= 0:
            store_corrections(M, record, at, P)
    if const_expr(P.split > 1):
        prologue.wait(M, _SQUARES, P)
    for i in range_constexpr(count):
        index = at.tid + i * P.threads
        if index < total_quads:
            t, quad = index // lanes, index % lanes
            total = squares[i]
            if const_expr(P.split > 1):
                total = Float32(0)
                for cta in range_constexpr(P.split):
                    total += M.sums[cta, t]
            rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + eps)
            weights = cute.make_rmem_tensor(4, Float32)
            gates = cute.make_rmem_tensor(4, BFloat16)
            quads = cute.make_layout((4, lanes), stride=(1, 4))
            cute.autovec_copy(cute.make_tensor(M.norm_weight.iterator, quads)[None, quad], weights)
            cute.autovec_copy(cute.make_tensor(M.out_gate.iterator, layout)[None, quad, t], gates)
            y = cute.make_rmem_tensor(4, BFloat16)
            for e in range_constexpr(4):
                gated = weights[e] * blocks.sigmoid(gates[e].to(Float32))
                y[e] = (o[e, i].to(Float32) * rms * gated).to(BFloat16)
            prologue.store_quad(y, results + (Int64(t) * at.D + 4 * quad) * 2)


@cute.jit
def store_corrections(M: Smem, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """This CTA's rows of all tokens, from where v was, four per thread."""
    lanes = P.rows // 4
    quads = cute.make_tensor(
        M.vectors.iterator + 3 * P.tokens * HEAD_DIM,
        cute.make_layout((4, P.tokens * lanes), stride=(1, 4)),
    )
    for i in range_constexpr(ceil_div(P.tokens * lanes, P.threads)):
        index = at.tid + i * P.threads
        if index < P.tokens * lanes:
            u = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(quads[None, index], u)
            element = index // lanes * HEAD_DIM + at.rank * P.rows + 4 * (index % lanes)
            target = cute.make_ptr(
                Float32, record.corrections + Int64(element) * 4, GMEM, assumed_align=16
            )
            cute.autovec_copy(u, cute.make_tensor(target, cute.make_layout(4)))
