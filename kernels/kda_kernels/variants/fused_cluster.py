"""KdaFused with source=registers: a cluster of `split` CTAs has an item, and its state in
registers.

CTA r owns rows, channels and gate features r*128/split .. of its item:
  load      slot, record row, pending count; weights, window, record, projection (cp.async); gate
            weights and state rows (registers: the state stays in flight until it is folded)
  gate      its features of all tokens on tensor cores, Gamma across lanes
  convolve  its channels of q, k, v of all tokens
  weigh     two warps: k^_t e^{L_n - L_t} of the pending tokens and e^{L_n}, all columns, as
            fragments
  exchange  q, k and Gamma of its channels go to the other CTAs by st.async, on one mbarrier per CTA
  fold      S <- S e^{L_n} + U K on tensor cores, in the registers that hold S; stored where it came
            from
  build     norms, and the 2q vectors as fragments; then keys, raw gates and window are written
  solve     A and B, a part per warp; one warp turns them into the triangles T and C
  multiply  the state with the vectors, by three products of BF16 terms
  finish    corrections and outputs; RMSNorm, its sums of squares to every CTA by st.async
A record is overwritten by the one that replaces it: every CTA has read all of the old one when it
sends, and writes the new one when it has received. From the fold on a warp has 16 rows and, in a
CTA of fewer rows than 16 per warp, a part of the columns; the parts' products are summed in shared
memory. No CTA leaves before it has received all that its peers send, so none is written to after
its end.
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from kda_kernels import step
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_REGISTERS, SM_SMEM_BYTES, Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.parts import chunked, conv_window, fold, gate_product, prologue
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import UNIT, Place, Record, Rows
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, ceil_div

_VECTORS, _SUMS, _SOLUTION = 0, 1, 2
"""mbarriers: what the other CTAs send of q, k and Gamma; of sums of squares; the triangles are
there."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Plan(fold.Shape):
    """What decides the code.

    split         CTAs of an item
    gate_bytes    of a lane in one load of gate weights, 16 or 8
    asked_ctas    of an SM, by which registers are capped; 0: as `ctas_per_sm` finds
    """

    split: int
    gate_bytes: int
    fold: str
    state_first: bool
    bypass_l1: bool
    asked_ctas: int

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def rows(self) -> int:
        """State rows, channels of each of q, k, v and gate features of a CTA."""
        return HEAD_DIM // self.split

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 state rows, or of 16 gate features."""
        return self.rows // 16

    @property
    def column_parts(self) -> int:
        """Warps that share a tile of rows."""
        return self.warps // self.row_tiles

    @property
    def cells(self) -> int:
        """16-byte cells of a thread per row."""
        return self.row_cells // self.column_parts

    @property
    def gate_warp(self) -> int:
        """First of the warps that have a tile of gate features: where they can, they leave
        `fold.weigh` to others."""
        return max(0, self.warps - fold.WEIGHING_WARPS - self.row_tiles)

    @property
    def token_groups(self) -> int:
        """Groups of tokens that different threads convolve; the second never reaches back into the
        window."""
        return 2 if self.tokens > 4 and 3 * self.rows <= self.threads else 1

    @property
    def group_tokens(self) -> int:
        return ceil_div(self.tokens, self.token_groups)

    @property
    def sent_units(self) -> int:
        """16-byte units of a token's q, k and Gamma that a CTA sends to each other."""
        return self.rows // 2

    @property
    def areas(self) -> dict[str, Area]:
        rows, tokens = self.rows, self.tokens
        history = Area(BFloat16, (rows, 3, self.history + tokens), inside="x")
        whole = Area(BFloat16, 3 * rows * self.window)
        return {
            "taps": Area(self.conv_dtype, (rows, CONV_WIDTH, 3)),
            "bias": Area(self.conv_dtype, (rows, 3)),
            "x": Area(BFloat16, (rows, 3, self.history + tokens)),
            "f_a": Area(BFloat16, tokens * HEAD_DIM),
            "dt_bias": Area(Float32, HEAD_DIM),
            "norm_weight": Area(Float32, rows),
            "A_log": Area(Float32, 1),
            "out_gate": Area(BFloat16, (rows, tokens)),
            "beta": Area(BFloat16, (2, tokens)),
            "window": whole if self.layout == "rows" else history,
            "old_key_gates": Area(BFloat16, 2 * HEAD_DIM * tokens),
            "old_corrections": Area(Float32, (rows, tokens)),
            "fold": Area(Uint32, self.fold_bytes // 4),
            "fold_scale": Area(Float32, HEAD_DIM),
            "gamma": Area(Float32, self.gamma_bytes // 4),
            "qkv": Area(BFloat16, self.qkv_bytes // 2),  # v of this CTA's channels alone
            "raw_gates": Area(BFloat16, (rows, tokens)),
            "fragments": Area(Uint8, self.fragment_bytes),
            "partials": Area(Float32, self.partial_bytes // 4),
            "pairs": Area(Float32, self.pair_floats),
            "matrix": Area(Float32, 2 * self.slots**2),
            "solution": Area(Uint32, 32 * self.solution_words),
            "squares": Area(Float32, self.slots * chunked.WARPS),  # of o, of this CTA's tiles
            "sums": Area(Float32, self.slots * chunked.WARPS),  # the same of all tiles, as received
            # Products of a part of the columns, to be summed.
            "parts": Area(Float32, (4, 32, self.tiles, self.warps) if self.column_parts > 1 else 0),
            "barriers": Area(Int64, 3),
        }

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)

    @property
    def ctas_per_sm(self) -> int:
        """As asked for; else by shared memory and registers, 96 a thread, with 64 of state 128 or,
        in clusters, 168."""
        if self.asked_ctas:
            return self.asked_ctas
        registers = 96
        if self.cells == self.row_cells:
            registers = 128 if self.split == 1 else 168
        return min(
            SM_REGISTERS // (registers * self.threads),
            SM_SMEM_BYTES // (self.smem_bytes + RESERVED_SMEM_BYTES),
        )

    def on(self, gpu: Gpu) -> Plan:
        """The plan for a GPU: with gate weights by eight bytes where those by sixteen spill.

        Where they do is what the compiler said of every form of the grid on every target;
        tests/kernels/test_fused.py compiles some of them.
        """
        spills = self.split == 1 and gpu.arch != "sm_90a"
        return replace(self, gate_bytes=8) if spills and self.gate_mode != 0 else self


@cute.kernel
def kda_fused(A: Arguments, P: cutlass.Constexpr) -> None:
    tid, _, _ = arch.thread_idx()
    column, request, _ = arch.block_idx()
    rank, head = column % P.split, column // P.split
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    # One load for slot and record row, on the first lanes, so that neither shares a scoreboard with
    # the state.
    table = A.slots + Int64(request) * A.slots_stride * 4
    if lane > 0:
        table = A.record_rows + Int64(request) * 4
    mine = blocks.at(Int32, table, Int32(0))

    M = smem.allocate_together(P.areas, last=("window", "parts"))
    join_cluster(M, tid, P)
    at = place_of(A, tid, warp, rank, head, P)
    load_weights(A, M, at, P)
    gate_weights = gate_product.registers(P)
    load_gate_weights(A, gate_weights, at, P)
    page, row = arch.shuffle_sync(mine, 0), arch.shuffle_sync(mine, 1)
    inputs = A.projected + Int64(request * P.tokens) * A.pitch * 2
    first = Int64(request * P.tokens) * at.D
    if page > 0:
        S = cute.make_rmem_tensor((4, 2, P.cells), Float32)
        pending = load_item(A, S, M, page, row, inputs, at, P)
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.sync_threads()

        # Not sooner: whatever stands behind its first use waits for it.
        n = fold.clamped(pending, P)
        # From here on places and addresses are asked for anew, so that they aren't kept beside the
        # state.
        at = here(A, P)
        warp, lane = at.warp, at.lane
        tile = gate_tile(at, P)
        exp_A = blocks.exp(M.A_log[0])
        gate(M, gate_weights, exp_A, A.lower_bound, tile, at, P)
        if at.tid < 3 * P.rows // 2 * P.token_groups:
            convolve(M, fold.window_of(A, page, n), at, P)
        if warp >= P.warps - fold.WEIGHING_WARPS:
            index = warp - (P.warps - fold.WEIGHING_WARPS)
            fold.weigh(M, n, exp_A, A.lower_bound, index, lane, P)
        arch.sync_threads()

        if const_expr(P.split > 1):
            arch.cluster_wait()
            send_vectors(M, at, P)
        if const_expr(P.fold == "early"):
            fold_state(A, S, M, page, n, P)
        if const_expr(P.split > 1):
            blocks.poll(M.barriers.iterator + _VECTORS, 0)
        chunked.build_fragments(M.fragments, M.qkv, M.gamma, A.scale, warp, P.warps, lane, P)
        at = here(A, P)
        if row >= 0:
            store_keys_and_gates(M, prologue.record_of(A, row, at.head), at, P)
        conv_window.store_own(M, fold.window_of(A, page, n), at, P)
        arch.sync_threads()

        solve(M, at.head, warp, lane, P)
        sums = chunked.accumulators(P)
        if const_expr(P.fold == "late"):
            fold_state(A, S, M, page, n, P)
        multiply(sums, S, M, warp // P.row_tiles, lane, P)
        finish(A, sums, M, row, warp, lane, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        prologue.store_zeros(A.out + (first + at.channel) * 2, at, P)
        if const_expr(P.split > 1):
            arch.cluster_wait()


@cute.jit
def join_cluster(M: Smem, tid: Int32, P: cutlass.Constexpr) -> None:
    """Prepare mbarriers and, in a cluster, say so; a wait for the other CTAs is to follow."""
    if const_expr(P.split > 1):
        blocks.declare_cluster(P.split)
    if tid == 0:
        arch.mbarrier_init(M.barriers.iterator + _VECTORS, 1)
        arch.mbarrier_init(M.barriers.iterator + _SUMS, 1)
        arch.mbarrier_init(M.barriers.iterator + _SOLUTION, 32)
        arch.mbarrier_init_fence()
    if const_expr(P.split > 1):
        arch.sync_warp()
        if tid == 0:
            sent = (P.split - 1) * P.tokens * P.sent_units * 16
            squares = chunked.WARPS * P.slots * 4
            arch.mbarrier_arrive_and_expect_tx(M.barriers.iterator + _VECTORS, sent)
            arch.mbarrier_arrive_and_expect_tx(M.barriers.iterator + _SUMS, squares)
        arch.cluster_arrive_relaxed()


@cute.jit
def place_of(
    A: Arguments, tid: Int32, warp: Int32, rank: Int32, head: Int32, P: cutlass.Constexpr
) -> Place:
    channel = head * HEAD_DIM + rank * P.rows
    return Place(tid, warp, tid % 32, rank, head, channel, A.heads * HEAD_DIM)


@cute.jit
def here(A: Arguments, P: cutlass.Constexpr) -> Place:
    """`place_of`, from special registers read where this stands."""
    tid, column = blocks.special("%tid.x"), blocks.special("%ctaid.x")
    rank, head = column % P.split, column // P.split
    place: Place = place_of(A, tid, arch.make_warp_uniform(tid // 32), rank, head, P)
    return place


@cute.jit
def rows_of(A: Arguments, page: Int32, at: Place, P: cutlass.Constexpr) -> Int64:
    """Address of a thread's first cell: of rows 2g, 2g + 1 of its warp's tile, in its warp's part
    of the columns."""
    tile = at.rank * P.row_tiles + at.warp % P.row_tiles
    cell = (
        (16 * tile + at.lane // 4 * 2) * fold.ROW_BYTES
        + at.warp // P.row_tiles * (P.cells * 64)
        + at.lane % 4 * 16
    )
    address: Int64 = prologue.state_of(A, page, at.head, P) + Int64(cell)
    return address


@cute.jit
def load_weights(A: Arguments, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """All weights of this CTA but the gate's, by cp.async."""
    prologue.load_taps(prologue.copy_rows, A, M, Int64(at.D) * P.weight_bytes, 0, at, P)
    used, none = prologue.tap_units(P), Int64(0)
    rows = Rows(1, 1, HEAD_DIM // 4, first=used)
    prologue.copy_rows(
        M.dt_bias.iterator, A.dt_bias + Int64(at.head * HEAD_DIM) * 4, none, none, rows, at, P
    )
    rows = Rows(1, 1, P.rows // 4, first=used + HEAD_DIM // 4)
    prologue.copy_rows(
        M.norm_weight.iterator, A.norm_weight + Int64(at.rank * P.rows) * 4, none, none, rows, at, P
    )
    if at.tid == P.threads - 1:
        blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(at.head) * 4, 4)


@cute.jit
def load_gate_weights(A: Arguments, weights: cute.Tensor, at: Place, P: cutlass.Constexpr) -> None:
    """Those of a tile of gate features, to registers of the warps that have one."""
    tile = gate_tile(at, P)
    features = A.f_b + Int64(at.head * HEAD_DIM) * (2 * HEAD_DIM)
    if const_expr(P.row_tiles == P.warps):
        gate_product.load(weights, features, tile, at.lane, P)
    else:
        if at.warp >= P.gate_warp and at.warp < P.gate_warp + P.row_tiles:
            gate_product.load(weights, features, tile, at.lane, P)


def gate_tile(at: Place, P: Plan) -> Int32:
    """A warp's tile of 16 gate features, of the item's eight, if it has one."""
    return at.rank * P.row_tiles + (at.warp - P.gate_warp)


@cute.jit
def load_item(
    A: Arguments,
    S: cute.Tensor,
    M: Smem,
    page: Int32,
    row: Int32,
    inputs: Int64,
    at: Place,
    P: cutlass.Constexpr,
) -> Int32:
    """Ask for window, record and projection, by cp.async, and for the state, to registers.

    Returns the count of pending tokens, as the request has it.
    """
    record = prologue.record_of(A, row, at.head)
    if const_expr(P.layout == "rows"):
        conv_window.load_own(M, fold.window_of(A, page, Int32(0)), at, P)
    if const_expr(P.records == "all"):
        load_record(M, record, Int32(P.tokens), at, P)
    if const_expr(P.state_first):
        load_rows(S, rows_of(A, page, at, P), P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    prologue.load_projection(prologue.copy_rows, M, inputs, A.pitch, at, P)
    pending = fold.pending_of(A, row)
    if const_expr(not P.state_first):
        # Keeps the state's loads behind the copies, which are waited for first.
        arch.sync_warp()
        load_rows(S, rows_of(A, page, at, P), P)
    if const_expr(P.records == "pending"):
        load_record(M, record, fold.clamped(pending, P), at, P)
    if const_expr(P.layout != "rows"):
        conv_window.load_own(M, fold.window_of(A, page, fold.clamped(pending, P)), at, P)
    return pending


@cute.jit
def load_record(M: Smem, record: Record, count: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """Keys and gates, and this CTA's rows of the corrections, of a record's first `count`
    tokens."""
    fold.load_keys(M, record, count, at.tid, P)
    tokens = Int32(0)
    if record.row >= 0:
        tokens = count
    units = P.rows // 4
    corrections = M.old_corrections.iterator.toint()
    source = record.corrections + Int64(at.rank * P.rows) * 4
    for i in range_constexpr(ceil_div(P.tokens * units, P.threads)):
        unit = P.threads - 1 - at.tid + i * P.threads
        if unit < tokens * units:
            place = unit // units * (4 * HEAD_DIM) + unit % units * 16
            blocks.copy_async(corrections + unit * 16, source + Int64(place), 16)


@cute.jit
def load_rows(S: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    """This thread's cells of its two state rows: (4, row, cell)."""
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(P.bypass_l1):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    load = cute.nvgpu.CopyG2ROp()
    atom = cute.make_copy_atom(load, Float32, num_bits_per_copy=128, l1c_evict_priority=priority)
    part = _cells(address, P)
    for c in range_constexpr(P.cells):
        for row in range_constexpr(2):
            cute.copy(atom, part[None, row, c], S[None, row, c])


def _cells(address: Int64, P: Plan) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, GMEM, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((4, 2, P.cells), stride=(1, HEAD_DIM, 16)))


@cute.jit
def gate(
    M: Smem,
    weights: cute.Tensor,
    exp_A: Float32,
    lower_bound: Float32,
    tile: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Gamma and raw gates of the CTA's features, on the warps that have a tile of them."""
    if const_expr(P.row_tiles == P.warps):
        gate_features(M, weights, exp_A, lower_bound, tile, at, P)
    else:
        if at.warp >= P.gate_warp and at.warp < P.gate_warp + P.row_tiles:
            gate_features(M, weights, exp_A, lower_bound, tile, at, P)


@cute.jit
def gate_features(
    M: Smem,
    weights: cute.Tensor,
    exp_A: Float32,
    lower_bound: Float32,
    tile: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """`gate` of a tile."""
    raw = gate_product.product(weights, M.f_a, at.lane, P)
    # The record still holds the old gates.
    none = Record(Int32(-1), Int64(0), Int64(0))
    chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, lower_bound, none, tile, at.lane, P)
    gates = cute.make_tensor(
        cute.recast_ptr(M.raw_gates.iterator, dtype=Uint32),
        cute.make_layout((P.rows // 2, P.tokens)),
    )
    place = 8 * (tile - at.rank * P.row_tiles) + at.lane // 4
    for side in range_constexpr(2):
        token = at.lane % 4 * 2 + side
        if token < P.tokens:
            gates[place, token] = blocks.pack(raw[side], raw[2 + side])


@cute.jit
def convolve(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """Two channels of one of q, k, v, a group of tokens; a window that is copied whole is rolled in
    shared memory."""
    pairs = P.rows // 2
    group = at.tid // (3 * pairs)
    part, pair = at.tid // pairs % 3, at.tid % pairs
    x = conv_window.inputs_by_pair(M, P)
    results = cute.make_tensor(
        cute.recast_ptr(M.qkv.iterator, dtype=Uint32),
        cute.make_layout(
            (HEAD_DIM // 2, 3, P.tokens), stride=(1, HEAD_DIM // 2, chunked.QKV_PITCH // 2)
        ),
    )
    weight = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
    bias = cute.make_rmem_tensor(2, P.conv_dtype)
    conv_window.take_weights(weight, bias, M, pair, part, P)
    past = cute.make_rmem_tensor((2, HISTORY), BFloat16)
    conv_window.take_past(past, x, M, window, group, pair, part, P)
    seen = cute.make_rmem_tensor((2, CONV_WIDTH), Float32)
    for e in range_constexpr(HISTORY):
        for i in range_constexpr(2):
            seen[i, e + 1] = past[i, e].to(Float32)
    for j in range_constexpr(P.group_tokens):
        t = group * P.group_tokens + j
        if t < P.tokens:
            new = cute.make_rmem_tensor(2, BFloat16)
            cute.autovec_copy(x[None, pair, part, P.history + t], new)
            y = cute.make_rmem_tensor(2, Float32)
            for i in range_constexpr(2):
                for e in range_constexpr(HISTORY):
                    seen[i, e] = seen[i, e + 1]
                seen[i, HISTORY] = new[i].to(Float32)
                y[i] = bias[i].to(Float32)
                for tap in range_constexpr(CONV_WIDTH):
                    y[i] += weight[i, tap].to(Float32) * seen[i, tap]
            rounded = blocks.pack(y[0] * blocks.sigmoid(y[0]), y[1] * blocks.sigmoid(y[1]))
            results[at.rank * pairs + pair, part, t] = rounded
    if const_expr(P.layout == "rows"):
        if group == 0:
            conv_window.roll(past, x, M, window, pair, part, P)


@cute.jit
def send_vectors(M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """q, k and Gamma of this CTA's channels to the same places of the other CTAs, by 16 bytes."""
    units, values = P.rows // UNIT, P.rows // 4
    total = P.tokens * P.sent_units
    barrier = M.barriers.iterator.toint() + 8 * _VECTORS
    qkv, gamma = M.qkv.iterator.toint(), M.gamma.iterator.toint()
    for i in range_constexpr(ceil_div(total * (P.split - 1), P.threads)):
        index = at.tid + i * P.threads
        if index < total * (P.split - 1):
            cta = (at.rank + 1 + index // total) % P.split
            token, unit = index % total // P.sent_units, index % P.sent_units
            place = gamma + (token * chunked.GAMMA_PITCH + at.rank * P.rows) * 4 + unit * 16
            if unit >= values:
                unit -= values
                channel = unit // units * HEAD_DIM + at.rank * P.rows + unit % units * UNIT
                place = qkv + (token * chunked.QKV_PITCH + channel) * 2
            four = cute.make_rmem_tensor(4, Uint32)
            source = cute.make_ptr(Uint32, place, SMEM, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), four)
            blocks.send_quad(blocks.peer(place, cta), blocks.peer(barrier, cta), four)


@cute.jit
def fold_state(
    A: Arguments, S: cute.Tensor, M: Smem, page: Int32, n: Int32, P: cutlass.Constexpr
) -> None:
    """If tokens are pending: S e^{L_n} + U K of this thread's cells, in place and to the page."""
    if n > 0:
        at = here(A, P)
        lane, part = at.lane, at.warp // P.row_tiles
        u = fold.old_corrections(M, n, at.warp % P.row_tiles, lane, P)
        atom = fold.store_atom(P)
        target = _cells(rows_of(A, page, at, P), P)
        for c in range_constexpr(P.cells):
            cell = part * P.cells + c
            fold.fold_cell(S[None, 0, c], S[None, 1, c], u, M, cell, lane, P)
            for row in range_constexpr(2):
                cute.copy(atom, S[None, row, c], target[None, row, c])


@cute.jit
def store_keys_and_gates(M: Smem, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """Keys and raw gates of this CTA's channels to the record."""
    units = P.rows // UNIT
    total = 2 * P.tokens * units
    for i in range_constexpr(ceil_div(total, P.threads)):
        index = at.tid + i * P.threads
        if index < total:
            token, unit = index // (2 * units), index % (2 * units)
            channel = at.rank * P.rows + unit * UNIT
            place = M.qkv.iterator.toint() + (token * chunked.QKV_PITCH + HEAD_DIM + channel) * 2
            if unit >= units:
                channel += HEAD_DIM - P.rows
                place = M.raw_gates.iterator.toint() + (token * P.rows + (unit - units) * UNIT) * 2
            blocks.copy_out(place, record.key_gates + Int64(token * (2 * HEAD_DIM) + channel) * 2)


@cute.jit
def solve(M: Smem, head: Int32, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """A and B, a part per warp; the last warp turns them into the triangles, and says so to others
    if they are to come by a mbarrier."""
    for i in range_constexpr(chunked.STEPS // P.warps):
        chunked.token_products(M.fragments, M.partials, warp + i * P.warps, lane, P)
    arch.sync_threads()
    if warp == P.warps - 1:
        raw = M.beta[head % 2, min(lane % P.slots, P.tokens - 1)]
        beta = blocks.sigmoid(raw.to(Float32))
        chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)
        if const_expr(P.column_parts == 1):
            arch.mbarrier_arrive(M.barriers.iterator + _SOLUTION)


@cute.jit
def multiply(
    sums: cute.Tensor, S: cute.Tensor, M: Smem, part: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """Add the products of this thread's cells with the window's vectors."""
    address = M.fragments.iterator.toint() + part * (P.cells * P.step_bytes)
    pointer = cute.make_ptr(Uint8, address, SMEM, assumed_align=16)
    fragments = cute.make_tensor(pointer, cute.make_layout(P.cells * P.step_bytes))
    for c in range_constexpr(P.cells):
        x = cute.make_rmem_tensor(4, Float32)
        y = cute.make_rmem_tensor(4, Float32)
        for e in range_constexpr(4):
            x[e], y[e] = S[e, 0, c], S[e, 1, c]
        chunked.multiply_cell(sums, fold.words(x), fold.words(y), fragments, Int32(c), lane, P)


@cute.jit
def finish(
    A: Arguments,
    sums: cute.Tensor,
    M: Smem,
    row: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Corrections and outputs, behind the triangles; the products summed where warps share rows."""
    if const_expr(P.column_parts == 1):
        arch.mbarrier_wait(M.barriers.iterator + _SOLUTION, 0)
        finish_tile(A, sums, M, row, P)
    else:
        put_part(sums, M, warp, lane, P)
        arch.sync_threads()
        if warp < P.row_tiles:
            add_parts(sums, M, warp, lane, P)
            finish_tile(A, sums, M, row, P)


@cute.jit
def put_part(sums: cute.Tensor, M: Smem, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """This warp's products, of its part of the columns, where `add_parts` finds them."""
    for tile in range_constexpr(P.tiles):
        total = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            total[i] = sums[i, 0, tile] + sums[i, 1, tile]
        cute.autovec_copy(total, M.parts[None, lane, tile, warp])


@cute.jit
def add_parts(
    sums: cute.Tensor, M: Smem, row_tile: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """The sums of all warps that share a tile of rows."""
    sums.fill(Float32(0))
    for part in range_constexpr(P.column_parts):
        for tile in range_constexpr(P.tiles):
            values = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(M.parts[None, lane, tile, part * P.row_tiles + row_tile], values)
            for i in range_constexpr(4):
                sums[i, part % 2, tile] = sums[i, part % 2, tile] + values[i]


@cute.jit
def finish_tile(A: Arguments, sums: cute.Tensor, M: Smem, row: Int32, P: cutlass.Constexpr) -> None:
    """Corrections and outputs of a warp's tile of rows."""
    # Asked for anew, so that less is kept in registers until here.
    at = here(A, P)
    tile = at.warp % P.row_tiles
    own_tile = at.rank * P.row_tiles + tile  # of the item's eight
    v = chunked.values(M.qkv, own_tile, at.lane, P)
    u, attended = chunked.finish(sums, v, M.solution, at.lane, P)
    o = cute.make_rmem_tensor(4, Float32)
    for i in range_constexpr(4):
        o[i] = blocks.rounded(attended[i])
    chunked.store_squares(o, M.squares, own_tile, at.lane, P)
    if const_expr(P.split > 1):
        send_squares(M, own_tile, at.lane, P)
    factors = chunked.output_factors(M.out_gate, M.norm_weight, tile, at.lane, P)
    if row >= 0:
        chunked.store_corrections(
            u, prologue.record_of(A, row, at.head).corrections, own_tile, at.lane, P
        )
    first = Int64(blocks.special("%ctaid.y") * P.tokens)
    results = A.out + (first * at.D + at.head * HEAD_DIM) * 2
    if const_expr(P.split > 1):
        blocks.poll(M.barriers.iterator + _SUMS, 0)
        chunked.store_outputs(o, factors, M.sums, A.eps, results, at.D, own_tile, at.lane, P)
    else:
        arch.sync_threads()
        chunked.store_outputs(o, factors, M.squares, A.eps, results, at.D, own_tile, at.lane, P)


@cute.jit
def send_squares(M: Smem, own_tile: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """A tile's sums of squares, left by `chunked.store_squares`, to every CTA."""
    arch.sync_warp()
    if lane < P.slots:
        place = lane * chunked.WARPS + (own_tile ^ (lane // 4 * 4))
        square = M.squares[place]
        address, barrier = (
            M.sums.iterator.toint() + place * 4,
            M.barriers.iterator.toint() + 8 * _SUMS,
        )
        for cta in range_constexpr(P.split):
            blocks.send(blocks.peer(address, Int32(cta)), blocks.peer(barrier, Int32(cta)), square)


HOST = step.host_of(kda_fused, cluster=True)
