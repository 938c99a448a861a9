"""KdaSplit chunked, kind record: all tokens of a window at once, products on tensor cores.

Operands: `kda_kernels.variants.split`, of whose kernels this is the one for `form="chunked"`.

CTA r of a cluster owns rows, channels and gate features r*128/split .. of its item:
  load      slot; weights, projection, window (cp.async); state cells (LDG, in flight until
            `multiply`)
  gate      its gate features of all tokens, on tensor cores; decays multiplied up over the tokens
  exchange  convolution of its channels; Gamma k, Gamma q and k / Gamma of these, not normalized,
            become fragments in every CTA by st.async, and so do its parts of |q|^2 and |k|^2; all
            on one mbarrier per CTA
  pairs     A and B of all pairs of tokens, a share of the columns per warp
  multiply  state times vectors: a warp has 16 rows and a share of the columns
  finish    a thread has one row and a few tokens; every thread of a row substitutes for all of them
  normalize RMSNorm; sums of squares go to every CTA by st.async
With W = S Gamma k, Y = S Gamma q, rk and rq the inverse norms, A and B of unnormalized vectors:
    u_t = beta_t (v_t - rk_t W_t) - sum_{s<t} beta_t rk_t rk_s A_ts u_s
    o_t = rq_t Y_t + sum_{s<=t} rq_t rk_s B_ts u_s
so that no norm is awaited before the products. No CTA leaves before it has received all that its
peers send, so none is written to after its end. Source: docs/operation.md, "The same, chunked";
layouts of cells and fragments: `kda_kernels.parts.chunked`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.blocks import UNIT
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.smem import Area, Barriers, Smem
from kda_kernels.parts import chunked, conv_window, prologue
from kda_kernels.parts.cluster import ClusterPlan
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Place, Record, Rows, copy_rows_anew
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, ceil_div

SHAPES = ((1, 256), (2, 128), (2, 256), (4, 128), (4, 256), (8, 128))
"""split, threads."""

_VECTORS, _SUMS = 0, 1
"""mbarriers."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Plan(ClusterPlan, chunked.Shape):
    """What decides the code."""

    @property
    def least_log_gate(self) -> float | None:
        return chunked.MIN_LOG_GAMMA

    def refused(self, gpu: Gpu) -> str | None:
        """Why there is no such kernel, or None. The same on all targets."""
        if self.kind != "record":
            return f"kind={self.kind}: form=chunked does not write the state, as only kind record wants"
        if (self.split, self.threads) not in SHAPES:
            known = ", ".join(f"{split} x {threads}" for split, threads in SHAPES)
            return f"split={self.split} threads={self.threads}: form=chunked takes {known}"
        if self.gate_mode not in (0, 1):
            return f"gate_mode={self.gate_mode}: form=chunked takes 0, 1"
        return None

    @property
    def row_tiles(self) -> int:
        """Groups of 16 state rows, and of 16 gate features; one warp each projects these."""
        return self.rows // 16

    @property
    def column_parts(self) -> int:
        """Warps that share 16 state rows."""
        return self.warps // self.row_tiles

    @property
    def steps(self) -> int:
        """k16 steps of a warp in `multiply`."""
        return 8 // self.column_parts

    @property
    def cells(self) -> int:
        """16-byte cells of a thread per state row."""
        return self.steps * self.item_bytes // 4

    @property
    def pair_steps(self) -> int:
        """k16 steps of a warp in `pairs`."""
        return 8 // self.warps

    @property
    def pair_count(self) -> int:
        """A and B of all pairs of columns."""
        return 64 * self.tiles

    @property
    def quads(self) -> int:
        """Groups of four channels."""
        return self.rows // 4

    @property
    def group_tokens(self) -> int:
        """Tokens that a thread convolves: as few as keep everything in one pass."""
        count = 1
        while 3 * self.quads * ceil_div(self.tokens, count) > self.threads:
            count *= 2
        return count

    @property
    def groups(self) -> int:
        return ceil_div(self.tokens, self.group_tokens)

    @property
    def conv_tasks(self) -> int:
        return 3 * self.quads * self.groups

    @property
    def conv_warps(self) -> int:
        return ceil_div(self.conv_tasks, 32)

    @property
    def row_threads(self) -> int:
        """Threads that share a row in `finish`."""
        return min(self.threads // self.rows, self.slots)

    @property
    def own_tokens(self) -> int:
        """Tokens of a thread in `finish`."""
        return self.slots // self.row_threads

    @property
    def warp_rows(self) -> int:
        """Rows of a warp in `finish`, on neighbouring lanes."""
        return 32 // self.row_threads

    @property
    def row_warps(self) -> int:
        """Warps that take part in `finish`."""
        return self.rows // self.warp_rows

    @property
    def norm_slots(self) -> int:
        """Partial sums of squares of o per token."""
        return self.split * self.row_warps

    @property
    def row_pitch(self) -> int:
        """Floats per token or column in which rows lie side by side."""
        return self.rows + 4

    @property
    def vector_bytes(self) -> int:
        """What a CTA gets from all CTAs, itself too where that is not a plain store, on the
        mbarrier of the vectors."""
        cells = 3 * self.tokens * self.quads * (self.split - 1)
        return 16 * cells + 8 * self.tokens * self.split

    @property
    def areas(self) -> dict[str, Area]:
        rows, tokens, slots = self.rows, self.tokens, self.slots
        inputs = 3 * rows * (self.history + tokens)
        copied = {
            # Rows of 128, swizzled.
            "gate_weight": Area(BFloat16, rows * HEAD_DIM),
            "taps": Area(self.conv_dtype, 3 * CONV_WIDTH * rows),
            "bias": Area(self.conv_dtype, (rows, 3)),
            "dt_bias": Area(Float32, rows),
            "norm_weight": Area(Float32, rows),
            "A_log": Area(Float32, 1),
            "x": Area(BFloat16, inputs),
            "f_a": Area(BFloat16, tokens * HEAD_DIM),
            "out_gate": Area(BFloat16, rows * tokens),
            "beta": Area(BFloat16, (2, tokens)),
            "window": Area(BFloat16, inputs, inside="x"),
        }
        if self.layout == "rows":
            copied["window"] = Area(BFloat16, 3 * rows * self.window)
        computed = {
            # All columns; received.
            "fragments": (Uint8, self.fragment_bytes),
            # Of each token, `rows` used.
            "gamma": (Float32, self.gamma_bytes // 4),
            # v: [tokens, row_pitch].
            "values": (Float32, self.row_pitch * tokens),
            # Parts of |q|^2 and |k|^2: [2, tokens, split]; received.
            "squares": (Float32, 2 * tokens * self.split),
            # Parts of A and B: [warp][tile][s][column].
            "partials": (Float32, self.pair_count * self.warps),
            # beta_t rk_t rk_s A_ts: [s, 8][t, slots]; rq_t rk_s B_ts, zero for s > t: [t, slots][s,
            # 8].
            "coefficients": (Float32, 2 * slots * 8),
            # Per token beta, beta rk, rq.
            "factors": (Float32, 4 * slots),
            # [column part][Gamma k, Gamma q of each slot][row_pitch]
            "products": (Float32, self.row_pitch * 2 * slots * self.column_parts),
            # Parts of |o|^2: [tokens, norm_slots]; received.
            "sums": (Float32, tokens * self.norm_slots),
        }
        close = {name: Area(dtype, size, align=16) for name, (dtype, size) in computed.items()}
        return copied | close | {"barriers": Barriers(shape=2, align=16)}

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold, by registers and shared memory."""
        registers = 128 if self.cells > 4 else 96 if self.cells > 2 else 80
        return self.ctas_with(registers)


class Task(NamedTuple):
    """What a thread convolves: four channels of q, k or v (part 0, 1, 2), `group_tokens` tokens
    from `first` on.

    live is False for threads past the last task, which repeat it.
    """

    part: Int32
    quad: Int32
    first: Int32
    live: Any


@cute.kernel
def kda_split_chunked(A: Arguments, P: cutlass.Constexpr) -> None:
    if const_expr(P.split > 1):
        blocks.declare_cluster(P.split)
    tid, _, _ = arch.thread_idx()
    column, request, _ = arch.block_idx()
    rank, head = column % P.split, column // P.split
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    # One load for both numbers, so that neither shares a scoreboard with the state.
    table = prologue.slots_of(A, request)
    if lane > 0:
        table = A.record_rows + Int64(request) * 4
    mine = blocks.at(Int32, table, Int32(0))

    M = smem.allocate_as_they_are(P.areas)
    if const_expr(P.split > 1):
        prologue.join_cluster(M.barriers, (P.vector_bytes, 4 * P.tokens * P.norm_slots), tid)

    at = Place(tid, warp, lane, rank, head, head * HEAD_DIM + rank * P.rows, A.heads * HEAD_DIM)
    load_weights(A, M, at, P)
    projected = prologue.projected_of(A, request, P)
    if const_expr(not P.chained):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        prologue.load_projection(copy_rows_anew, M, projected, A.pitch, at, P)
        arch.cp_async_commit_group()
    # What doesn't need the slot is computed before it: pinned, or it would be moved behind.
    offset = blocks.pinned(state_offset(at, P))
    cells = window_offsets(A, at, P)
    results = prologue.results_of(A, request, at, P)
    page, row = arch.shuffle_sync(mine, 0), arch.shuffle_sync(mine, 1)
    if page > 0:
        window = conv_window.window_of(A, page, Int32(0))
        load_window(M, window, cells, at, P)
        item = A.state + (Int64(page) * A.state_stride * P.item_bytes + offset)
        raw = cute.make_rmem_tensor((4, 2, P.cells), Uint32)
        if const_expr(not P.late):
            load_state(raw, item, P)
        if const_expr(P.chained):
            arch.griddepcontrol_wait()
            arch.griddepcontrol_launch_dependents()
            prologue.load_projection(copy_rows_anew, M, projected, A.pitch, at, P)
            arch.cp_async_commit_group()
        arch.cp_async_commit_group()
        record = record_of(A, row, at, P)

        arch.cp_async_wait_group(1)
        arch.sync_threads()
        if const_expr(P.late):
            load_state(raw, item, P)
        gate(A, M, record, at, P)
        task = task_of(at, P)
        weight = cute.make_rmem_tensor((4, CONV_WIDTH), P.conv_dtype)
        bias = cute.make_rmem_tensor(4, P.conv_dtype)
        inputs = cute.make_rmem_tensor((2, P.group_tokens), Uint32)
        if warp < P.conv_warps:
            fetch_operands(weight, bias, inputs, M, task, P)
        arch.cp_async_wait_group(0)
        if const_expr(P.split > 1):
            arch.cluster_wait()
        arch.sync_threads()
        if warp < P.conv_warps:
            seen = cute.make_rmem_tensor((4, HISTORY + P.group_tokens), Float32)
            fetch_history(seen, M, window, task, P)
            exchange(M, convolve(weight, bias, seen, inputs, P), record, task, at, P)
        arch.sync_threads()
        keep_window(M, window, at, P)
        if const_expr(P.split > 1):
            prologue.wait(M, _VECTORS, P)

        pairs(M, at, P)
        arch.sync_threads()
        reduce_pairs(M, A.scale, at, P)
        multiply(raw, M, at, P)
        arch.sync_threads()
        if at.warp < P.row_warps:
            finish(A, M, window, results, record, at, P)
        else:
            if const_expr(P.layout == "rows"):
                store_window(M, window, at, P)
    else:
        if const_expr(P.chained):
            arch.griddepcontrol_wait()
            arch.griddepcontrol_launch_dependents()
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        prologue.store_zeros(results, at, P)
        if const_expr(P.split > 1):
            arch.cluster_wait()


@cute.jit
def record_of(A: Arguments, row: Int32, at: Place, P: cutlass.Constexpr) -> Record:
    """From this CTA's first channel on."""
    entry = Int64(at.head * A.record_tokens) * HEAD_DIM
    return Record(
        row,
        A.key_gates + (Int64(row) * A.key_gates_stride + 2 * entry + at.rank * P.rows) * 2,
        A.corrections + (Int64(row) * A.corrections_stride + entry + at.rank * P.rows) * 4,
    )


@cute.jit
def load_weights(A: Arguments, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    quads, tap_bytes, none = P.rows // 4, Int64(at.D) * P.weight_bytes, Int64(0)
    features = A.f_b + Int64(at.channel) * (2 * HEAD_DIM)
    rows = Rows(1, P.rows, HEAD_DIM // UNIT, swizzled=True)
    copy_rows_anew(M.gate_weight.iterator, features, none, Int64(2 * HEAD_DIM), rows, at, P)
    used = P.rows * (HEAD_DIM // UNIT)
    copy_rows_anew(
        M.dt_bias.iterator,
        A.dt_bias + Int64(at.channel) * 4,
        none,
        none,
        Rows(1, 1, quads, first=used),
        at,
        P,
    )
    used += quads
    if at.tid == P.threads - 1:
        blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(at.head) * 4, 4)
    prologue.load_taps(copy_rows_anew, A, M, tap_bytes, used, at, P)
    rows = Rows(1, 1, quads, first=used + prologue.tap_units(P))
    copy_rows_anew(
        M.norm_weight.iterator, A.norm_weight + Int64(at.rank * P.rows) * 4, none, none, rows, at, P
    )


@cute.jit
def window_offsets(A: Arguments, at: Place, P: cutlass.Constexpr) -> cute.Tensor:
    """Bytes in a page of this thread's units of a window that is copied whole."""
    count = max(ceil_div(3 * P.rows // UNIT * P.window, P.threads), 1)
    offsets = cute.make_rmem_tensor(count, Int32)
    if const_expr(P.layout == "rows"):
        for i in range_constexpr(count):
            offsets[i] = blocks.pinned(
                _rows_offset(A.channel_stride, at.tid + i * P.threads, at, P)
            )
    return offsets


@cute.jit
def _rows_offset(entries: Int32, unit: Int32, at: Place, P: cutlass.Constexpr) -> Int32:
    """Byte in a dim-first page of one of this CTA's 16-byte units, `[3, R / 8 * entries]`."""
    units = P.rows // UNIT * entries  # of one of q, k, v
    part = Int32(0)
    if unit >= units:
        part = Int32(1)
    if unit >= 2 * units:
        part = Int32(2)
    return (part * at.D + at.channel) * (2 * entries) + (unit - part * units) * 16


@cute.jit
def load_window(
    M: Smem, window: Window, offsets: cute.Tensor, at: Place, P: cutlass.Constexpr
) -> None:
    """rows: all entries, `[3, R, W]`, from `window_offsets`; else the first three, `[3 entries, 3,
    R]`."""
    if const_expr(P.layout == "rows"):
        units = 3 * P.rows // UNIT * window.channel_stride
        base = M.window.iterator.toint()
        for i in range_constexpr(cute.size(offsets)):
            unit = at.tid + i * P.threads
            if unit < units:
                blocks.copy_async(base + unit * 16, window.page + offsets[i], 16)
    elif const_expr(P.layout == "taps"):
        tap_bytes = Int64(window.tap_stride) * 2
        rows = Rows(HISTORY, 3, P.rows // UNIT)
        copy_rows_anew(
            M.window.iterator,
            window.page + Int64(at.channel) * 2,
            tap_bytes,
            Int64(at.D) * 2,
            rows,
            at,
            P,
        )
    else:
        conv_window.load_elements(M, window, at, P)


@cute.jit
def state_offset(at: Place, P: cutlass.Constexpr) -> Int32:
    """Byte in a slot's state of this thread's first cell."""
    row = at.head * HEAD_DIM + at.rank * P.rows + 16 * (at.warp % P.row_tiles) + at.lane // 4 * 2
    return (
        row * (HEAD_DIM * P.item_bytes) + at.warp // P.row_tiles * (P.cells * 64) + at.lane % 4 * 16
    )


@cute.jit
def load_state(raw: cute.Tensor, first: Int64, P: cutlass.Constexpr) -> None:
    """This thread's cells: (word, row of two, cell)."""
    source = cute.make_tensor(
        cute.make_ptr(Uint32, first, GMEM, assumed_align=16),
        cute.make_layout((4, 2, P.cells), stride=(1, HEAD_DIM * P.item_bytes // 4, 16)),
    )
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(P.hints):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Uint32, num_bits_per_copy=128, l1c_evict_priority=priority
    )
    for c in range_constexpr(P.cells):
        for r in range_constexpr(2):
            cute.copy(atom, source[None, r, c], raw[None, r, c])


@cute.jit
def gate(A: Arguments, M: Smem, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """Gamma of this CTA's features, by the last warps, 16 features each; raw gates to the
    record."""
    index = at.warp - (P.warps - P.row_tiles)
    if index >= 0:
        g, t = at.lane // 4, at.lane % 4
        # (word, half of a unit, unit, row)
        source = cute.make_tensor(
            cute.recast_ptr(M.gate_weight.iterator, dtype=Uint32),
            cute.make_layout((2, 2, HEAD_DIM // UNIT, P.rows), stride=(1, 2, 4, HEAD_DIM // 2)),
        )
        weights = cute.make_rmem_tensor((2, 2, chunked.STEPS), Uint32)
        for step in range_constexpr(chunked.STEPS):
            for r in range_constexpr(2):
                # Swizzled unit 2 step + t // 2, the part that depends on the lane apart.
                place = (t // 2 ^ (2 * g + r) % 8 ^ step % 4 * 2) + step // 4 * 8
                cute.autovec_copy(
                    source[None, t % 2, place, 16 * index + 2 * g + r], weights[None, r, step]
                )
        raw = chunked.raw_gates(weights, M.f_a, at.lane, P.chains, P)
        exp_A = blocks.exp(M.A_log[0])
        chunked.store_gammas(
            raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, index, at.lane, P
        )


@cute.jit
def task_of(at: Place, P: cutlass.Constexpr) -> Task:
    index = min(at.tid, P.conv_tasks - 1)
    first = index // P.quads % P.groups * P.group_tokens
    return Task(index // (P.quads * P.groups), index % P.quads, first, at.tid < P.conv_tasks)


@cute.jit
def input_words(M: Smem, P: cutlass.Constexpr) -> cute.Tensor:
    """x by pairs of channels: (word of a quad, quad, part, entry)."""
    pairs = P.rows // 2
    return cute.make_tensor(
        cute.recast_ptr(M.x.iterator, dtype=Uint32),
        cute.make_layout((2, P.quads, 3, P.history + P.tokens), stride=(1, 2, pairs, 3 * pairs)),
    )


@cute.jit
def fetch_operands(
    weight: cute.Tensor,
    bias: cute.Tensor,
    inputs: cute.Tensor,
    M: Smem,
    task: Task,
    P: cutlass.Constexpr,
) -> None:
    """A task's taps (4, tap), bias (4) and inputs (2 words, token); tokens past the last repeat
    it."""
    x = input_words(M, P)
    taps = cute.make_tensor(
        M.taps.iterator,
        cute.make_layout((4, P.quads, CONV_WIDTH, 3), stride=(1, 4, P.rows, CONV_WIDTH * P.rows)),
    )
    biases = cute.make_tensor(
        M.bias.iterator, cute.make_layout((4, P.quads, 3), stride=(1, 4, P.rows))
    )
    cute.autovec_copy(biases[None, task.quad, task.part], bias)
    for tap in range_constexpr(CONV_WIDTH):
        cute.autovec_copy(taps[None, task.quad, tap, task.part], weight[None, tap])
    for j in range_constexpr(P.group_tokens):
        entry = P.history + min(task.first + j, P.tokens - 1)
        cute.autovec_copy(x[None, task.quad, task.part, entry], inputs[None, j])


@cute.jit
def fetch_history(
    seen: cute.Tensor, M: Smem, window: Window, task: Task, P: cutlass.Constexpr
) -> None:
    """The three inputs before a task's first token, of the window or of this step: (4, entry)."""
    x = input_words(M, P)
    for e in range_constexpr(HISTORY):
        entry = task.first + e - HISTORY  # negative in the window
        if const_expr(P.layout == "rows"):
            pair = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(x[None, task.quad, task.part, max(entry, Int32(0))], pair)
            take_halves(seen, pair, e)
            place = (task.part * P.rows + 4 * task.quad) * window.channel_stride + min(
                HISTORY + entry, HISTORY - 1
            )
            for i in range_constexpr(4):
                # Read in any case: a branch would cost more.
                older = M.window[place + i * window.channel_stride].to(Float32)
                seen[i, e] = older if entry < 0 else seen[i, e]
        else:
            pair = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(x[None, task.quad, task.part, HISTORY + entry], pair)
            take_halves(seen, pair, e)


@cute.jit
def take_halves(seen: cute.Tensor, pair: cute.Tensor, e: cutlass.Constexpr) -> None:
    """Four channels of an input from two words."""
    for i in range_constexpr(2):
        seen[2 * i, e], seen[2 * i + 1, e] = blocks.low_half(pair[i]), blocks.high_half(pair[i])


@cute.jit
def convolve(
    weight: cute.Tensor,
    bias: cute.Tensor,
    seen: cute.Tensor,
    inputs: cute.Tensor,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """A task's results, rounded: words (2, token). `seen` holds the history, and room for the
    inputs."""
    words = cute.make_rmem_tensor((2, P.group_tokens), Uint32)
    for j in range_constexpr(P.group_tokens):
        take_halves(seen, inputs[None, j], HISTORY + j)
        y = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            y[i] = bias[i].to(Float32)
            for tap in range_constexpr(CONV_WIDTH):
                y[i] += weight[i, tap].to(Float32) * seen[i, j + tap]
            y[i] = y[i] * blocks.sigmoid(y[i])
        words[0, j], words[1, j] = blocks.pack(y[0], y[1]), blocks.pack(y[2], y[3])
    return words


@cute.jit
def exchange(
    M: Smem,
    words: cute.Tensor,
    record: Record,
    task: Task,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Hands a task's results on: q and k as fragments to every CTA, v to this one; keys to the
    record."""
    shifts = peer_shifts(M, at, P)
    for j in range_constexpr(P.group_tokens):
        t = task.first + j
        held = task.live
        if const_expr(P.groups * P.group_tokens > P.tokens):
            held = held and t < P.tokens
        x = cute.make_rmem_tensor(4, Float32)
        for pair in range_constexpr(2):
            x[2 * pair], x[2 * pair + 1] = (
                blocks.low_half(words[pair, j]),
                blocks.high_half(words[pair, j]),
            )
        if held:
            if task.part == 2:
                values = cute.make_tensor(
                    M.values.iterator,
                    cute.make_layout((4, P.quads, P.tokens), stride=(1, 4, P.row_pitch)),
                )
                cute.autovec_copy(x, values[None, task.quad, t])
            else:
                send_vectors(M, x, task, t, shifts, at, P)
        square = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])
        square = blocks.lane_sum(square, 1, P.quads)
        if held and task.part < 2:
            send_square(M, square, task, t, at, P)
            if task.part == 1 and record.row >= 0:
                key = record.key_gates + Int64(t * (2 * HEAD_DIM) + 4 * task.quad) * 2
                target = cute.make_ptr(Uint32, key, GMEM, assumed_align=8)
                cute.autovec_copy(words[None, j], cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def peer_shifts(M: Smem, at: Place, P: cutlass.Constexpr) -> tuple[Int32, ...]:
    """What to add to an address of this CTA's shared memory for the cluster address in each other
    CTA, the next first, so that not all send to the same one."""
    base = M.fragments.iterator.toint()
    shifts = []
    for j in range_constexpr(1, P.split):
        shifts.append(blocks.peer(base, (at.rank + j) % P.split) - base)
    return tuple(shifts)


@cute.jit
def send_vectors(
    M: Smem,
    x: cute.Tensor,
    task: Task,
    t: Int32,
    shifts: tuple[Int32, ...],
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Gamma x, and of a key also x / Gamma, of four channels of a token."""
    gammas = cute.make_tensor(
        M.gamma.iterator,
        cute.make_layout((4, P.quads, P.tokens), stride=(1, 4, chunked.GAMMA_PITCH)),
    )
    gamma = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(gammas[None, task.quad, t], gamma)
    step, column = P.quad_place(at.rank * P.quads + task.quad)
    place = step * P.step_bytes + (4 * t + column) * 16
    aged = cute.make_rmem_tensor(4, Float32)
    for i in range_constexpr(4):
        aged[i] = x[i] * gamma[i]
    # Behind the columns of Gamma k, in the same tile or the next.
    queries = 64 * P.slots
    send_cell(M, aged, place + (1 - task.part) * queries, shifts, P)
    if task.part == 1:
        young = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            young[i] = x[i] * arch.rcp_approx(gamma[i])
        send_cell(M, young, place + 512 * P.tiles, shifts, P)


@cute.jit
def send_cell(
    M: Smem, x: cute.Tensor, place: Int32, shifts: tuple[Int32, ...], P: cutlass.Constexpr
) -> None:
    """hi(0,1) hi(2,3) lo(0,1) lo(2,3) of four floats, to a byte of the fragments of every CTA."""
    words = cute.make_rmem_tensor(4, Uint32)
    words[0], words[2] = chunked.split_rounded(x[0], x[1])
    words[1], words[3] = chunked.split_rounded(x[2], x[3])
    address, barrier = M.fragments.iterator.toint() + place, (M.barriers + _VECTORS).toint()
    for j in range_constexpr(P.split - 1):
        blocks.send_quad(address + shifts[j], barrier + shifts[j], words)
    cell = cute.make_ptr(Uint32, address, SMEM, assumed_align=16)
    cute.autovec_copy(words, cute.make_tensor(cell, cute.make_layout(4)))


@cute.jit
def send_square(
    M: Smem, square: Float32, task: Task, t: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """This CTA's part of |q|^2 or |k|^2 of a token, which all lanes of its quads hold, to every
    CTA."""
    place = (task.part * P.tokens + t) * P.split + at.rank
    if const_expr(P.split == 1):
        if task.quad == 0:
            M.squares[place] = square
    else:
        address, barrier = M.squares.iterator.toint() + place * 4, (M.barriers + _VECTORS).toint()
        for j in range_constexpr(ceil_div(P.split, P.quads)):
            cta = task.quad + j * P.quads
            if cta < P.split:
                blocks.send(blocks.peer(address, cta), blocks.peer(barrier, cta), square)


@cute.jit
def keep_window(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """This step's inputs enter the window: at once, or where it is copied whole in shared memory,
    stored later."""
    if const_expr(P.layout == "rows"):
        roll_window(M, window, at, P)
    else:
        store_window(M, window, at, P)


@cute.jit
def roll_window(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """The last two entries of the history, then the inputs, as the first entries of a window copied
    whole."""
    if at.tid < P.conv_tasks:
        task = task_of(at, P)
        x = cute.make_tensor(
            M.x.iterator,
            cute.make_layout((4, P.quads, 3, P.tokens), stride=(1, 4, P.rows, 3 * P.rows)),
        )
        entries = window.channel_stride
        place = (task.part * P.rows + 4 * task.quad) * entries
        for i in range_constexpr(4):
            at_channel = place + i * entries
            if task.first == 0:
                older, newer = M.window[at_channel + 1], M.window[at_channel + 2]
                M.window[at_channel], M.window[at_channel + 1] = older, newer
        for j in range_constexpr(P.group_tokens):
            t = task.first + j
            if t < P.tokens:
                new = cute.make_rmem_tensor(4, BFloat16)
                cute.autovec_copy(x[None, task.quad, task.part, t], new)
                for i in range_constexpr(4):
                    M.window[place + i * entries + 2 + t] = new[i]


@cute.jit
def store_window(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """The two inputs before this step's, then these, as the first tokens+2 entries."""
    part_units = P.rows // UNIT
    if const_expr(P.layout == "rows"):
        most = 3 * part_units * P.window
        for i in range_constexpr(ceil_div(most, P.threads)):
            unit = at.tid + i * P.threads
            if unit < 3 * part_units * window.channel_stride:
                address = window.page + _rows_offset(window.channel_stride, unit, at, P)
                conv_window.store_unit(M.window.iterator, unit, most, address)
    else:
        conv_window.store_entries(M, window, at, P)


@cute.jit
def fragments_from(M: Smem, step: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """The fragments of a step and the later ones, as words (word, lane, tile, step)."""
    address = M.fragments.iterator.toint() + step * P.step_bytes
    return cute.make_tensor(
        cute.make_ptr(Uint32, address, SMEM, assumed_align=16), P.fragment_layout
    )


@cute.jit
def pairs(M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """This warp's part of A and B: k / Gamma as rows s, over its share of the columns."""
    none = Uint32(0)
    fragments = fragments_from(M, at.warp * P.pair_steps, P)
    sums = cute.make_rmem_tensor((4, 3, P.tiles), Float32)
    sums.fill(Float32(0))
    for step in range_constexpr(P.pair_steps):
        k = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(fragments[None, at.lane, P.tiles, step], k)
        high, low = (k[0], none, k[1], none), (k[2], none, k[3], none)
        for tile in range_constexpr(P.tiles):
            x = cute.make_rmem_tensor(4, Uint32)
            cute.autovec_copy(fragments[None, at.lane, tile, step], x)
            add_product(sums[None, 0, tile], high, (x[0], x[1]))
            add_product(sums[None, 1, tile], high, (x[2], x[3]))
            add_product(sums[None, 2, tile], low, (x[0], x[1]))
    targets = cute.make_tensor(
        M.partials.iterator,
        cute.make_layout((2, 32, P.tiles, P.warps), stride=(1, 2, 64, P.pair_count)),
    )
    for tile in range_constexpr(P.tiles):
        pair = cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            pair[i] = sums[i, 0, tile] + (sums[i, 1, tile] + sums[i, 2, tile])
        cute.autovec_copy(pair, targets[None, at.lane, tile, at.warp])


@cute.jit
def add_product(c: cute.Tensor, a: tuple[Uint32, ...], b: tuple[Uint32, ...]) -> None:
    c[0], c[1], c[2], c[3] = blocks.mma_16816((c[0], c[1], c[2], c[3]), a, b)


@cute.jit
def inverse_norm(M: Smem, part: Int32, t: Int32, P: cutlass.Constexpr) -> Float32:
    """Of q (part 0) or k (part 1) of a token; past the last token, of that."""
    squares = cute.make_tensor(M.squares.iterator, cute.make_layout((P.split, 2 * P.tokens)))
    values = cute.make_rmem_tensor(P.split, Float32)
    cute.autovec_copy(squares[None, part * P.tokens + min(t, P.tokens - 1)], values)
    total = values[0]
    for i in range_constexpr(1, P.split):
        total += values[i]
    return blocks.rsqrt(total + Float32(blocks.KEY_EPS))


@cute.jit
def reduce_pairs(M: Smem, scale: Float32, at: Place, P: cutlass.Constexpr) -> None:
    """A and B with their factors, a thread per pair; each token's factors of W and Y from its pair
    with itself."""
    if const_expr(P.pair_count == P.threads):
        _reduce_pair(M, scale, at, P)
    else:
        if at.warp < P.pair_count // 32:
            _reduce_pair(M, scale, at, P)


@cute.jit
def _reduce_pair(M: Smem, scale: Float32, at: Place, P: cutlass.Constexpr) -> None:
    """The pair of this thread. No branches, so that this mixes with `multiply`.

    Pairs past the last token get anything; nothing reads them.
    """
    s, column = at.tid % 64 // 8, at.tid % 8
    is_query, t = at.tid // 64, column
    if const_expr(P.slots == 4):
        is_query, t = column // 4, column % 4
    partials = cute.make_tensor(M.partials.iterator, cute.make_layout((P.pair_count, P.warps)))
    total = partials[at.tid, 0]
    for part in range_constexpr(1, P.warps):
        total += partials[at.tid, part]
    own = inverse_norm(M, 1 - is_query, t, P)
    other = inverse_norm(M, Int32(1), s, P)
    betas = cute.make_tensor(M.beta.iterator, cute.make_layout(2 * P.tokens))
    beta = blocks.sigmoid(betas[2 * min(t, P.tokens - 1) + at.head % 2].to(Float32))
    left = scale if is_query == 1 else beta
    value = total * (left * own) * other
    value = Float32(0) if s > t else value
    place = P.slots * 8 + t * 8 + s if is_query == 1 else s * P.slots + t
    M.coefficients[place] = value
    if s == t:
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0] = left * own if is_query == 1 else beta
        pair[1] = left * own
        factors = cute.make_tensor(
            M.factors.iterator, cute.make_layout((2, 2, P.slots), stride=(1, 2, 4))
        )
        cute.autovec_copy(pair, factors[None, is_query, t])


@cute.jit
def multiply(raw: cute.Tensor, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """State times Gamma k and Gamma q: this warp's 16 rows and share of the columns."""
    tile_rows, part = at.warp % P.row_tiles, at.warp // P.row_tiles
    fragments = fragments_from(M, part * P.steps, P)
    sums = cute.make_rmem_tensor((4, 3, P.tiles), Float32)
    sums.fill(Float32(0))
    for c in range_constexpr(P.cells):
        if const_expr(P.state_dtype == "fp32"):
            floats = cute.make_tensor(
                cute.recast_ptr(raw.iterator, dtype=Float32),
                cute.make_layout((4, 2, P.cells), stride=(1, 4, 8)),
            )
            x_high0, x_low0 = chunked.split_truncated(floats[0, 0, c], floats[1, 0, c])
            x_high1, x_low1 = chunked.split_truncated(floats[2, 0, c], floats[3, 0, c])
            y_high0, y_low0 = chunked.split_truncated(floats[0, 1, c], floats[1, 1, c])
            y_high1, y_low1 = chunked.split_truncated(floats[2, 1, c], floats[3, 1, c])
            high = (x_high0, y_high0, x_high1, y_high1)
            low = (x_low0, y_low0, x_low1, y_low1)
            for tile in range_constexpr(P.tiles):
                b = cute.make_rmem_tensor(4, Uint32)
                cute.autovec_copy(fragments[None, at.lane, tile, c], b)
                add_product(sums[None, 0, tile], high, (b[0], b[1]))
                add_product(sums[None, 1, tile], high, (b[2], b[3]))
                add_product(sums[None, 2, tile], low, (b[0], b[1]))
        else:
            for half in range_constexpr(2):
                a = (
                    raw[2 * half, 0, c],
                    raw[2 * half, 1, c],
                    raw[2 * half + 1, 0, c],
                    raw[2 * half + 1, 1, c],
                )
                for tile in range_constexpr(P.tiles):
                    b = cute.make_rmem_tensor(4, Uint32)
                    cute.autovec_copy(fragments[None, at.lane, tile, 2 * c + half], b)
                    add_product(sums[None, 2 * half, tile], a, (b[0], b[1]))
                    if const_expr(P.terms == 2):
                        add_product(sums[None, 1, tile], a, (b[2], b[3]))
    # (row pair of a tile, row tile, column, part)
    targets = cute.make_tensor(
        M.products.iterator,
        cute.make_layout(
            (2, P.rows // 2, 2 * P.slots, P.column_parts),
            stride=(1, 2, P.row_pitch, 2 * P.slots * P.row_pitch),
        ),
    )
    for tile in range_constexpr(P.tiles):
        for side in range_constexpr(2):
            pair = cute.make_rmem_tensor(2, Float32)
            for r in range_constexpr(2):
                i = 2 * r + side
                pair[r] = (sums[i, 0, tile] + sums[i, 2, tile]) + sums[i, 1, tile]
            column = 8 * tile + at.lane % 4 * 2 + side
            cute.autovec_copy(pair, targets[None, 8 * tile_rows + at.lane // 4, column, part])


@cute.jit
def finish(
    A: Arguments,
    M: Smem,
    window: Window,
    results: Int64,
    record: Record,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Corrections and outputs of one row and `own_tokens` tokens per thread."""
    r, part = at.lane % P.warp_rows, at.lane // P.warp_rows
    row, first = at.warp * P.warp_rows + r, part * P.own_tokens
    u = cute.make_rmem_tensor(P.tokens, Float32)
    o = cute.make_rmem_tensor(P.own_tokens, Float32)
    substitute(M, u, o, row, r, first, P)
    squares = cute.make_rmem_tensor(P.own_tokens, Float32)
    for e in range_constexpr(P.own_tokens):
        o[e] = blocks.rounded(o[e])
        squares[e] = blocks.lane_sum(o[e] * o[e], 1, P.warp_rows)
        send_sum(M, squares[e], first + e, r, at, P)
    if record.row >= 0:
        for e in range_constexpr(P.own_tokens):
            if first + e < P.tokens:
                mine = u[min(e, P.tokens - 1)]
                for t in range_constexpr(P.own_tokens + e, P.tokens, P.own_tokens):
                    mine = u[t] if first + e == t else mine
                blocks.put(
                    Float32, record.corrections + Int64((first + e) * HEAD_DIM + row) * 4, mine
                )
    gates = cute.make_rmem_tensor(P.own_tokens, Float32)
    for e in range_constexpr(P.own_tokens):
        t = min(first + e, P.tokens - 1)
        gates[e] = M.norm_weight[row] * blocks.sigmoid(M.out_gate[t * P.rows + row].to(Float32))
    if const_expr(P.layout == "rows"):
        store_window(M, window, at, P)
    prologue.meet(M, _SUMS, P)
    sums = cute.make_tensor(
        M.sums.iterator,
        cute.make_layout((4, P.norm_slots // 4, P.tokens), stride=(1, 4, P.norm_slots)),
    )
    for e in range_constexpr(P.own_tokens):
        if first + e < P.tokens:
            total = Float32(0)
            for i in range_constexpr(P.norm_slots // 4):
                quad = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(sums[None, i, first + e], quad)
                total += (quad[0] + quad[1]) + (quad[2] + quad[3])
            rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + A.eps)
            place = results + (Int64(first + e) * at.D + row) * 2
            word = cute.make_rmem_tensor(1, Uint32)
            word[0] = blocks.pack(o[e] * rms * gates[e], Float32(0))
            halves = cute.make_tensor(
                cute.recast_ptr(word.iterator, dtype=BFloat16), cute.make_layout(2)
            )
            blocks.put(BFloat16, place, halves[0])


@cute.jit
def substitute(
    M: Smem,
    u: cute.Tensor,
    o: cute.Tensor,
    row: Int32,
    r: Int32,
    first: Int32,
    P: cutlass.Constexpr,
) -> None:
    """u of all tokens and o of `own_tokens` from `first` on, of one row.

    r   of the row in its warp: lane r + warp_rows * i has the tokens from own_tokens * i on
    """
    products = cute.make_tensor(
        M.products.iterator,
        cute.make_layout(
            (P.row_pitch, 2 * P.slots, P.column_parts),
            stride=(1, P.row_pitch, 2 * P.slots * P.row_pitch),
        ),
    )
    values = cute.make_tensor(M.values.iterator, cute.make_layout((P.row_pitch, P.tokens)))
    factors = cute.make_tensor(M.factors.iterator, cute.make_layout((4, P.slots)))
    rest = cute.make_rmem_tensor(P.own_tokens, Float32)
    for e in range_constexpr(P.own_tokens):
        t = min(first + e, P.tokens - 1)
        w, y = products[row, t, 0], products[row, P.slots + t, 0]
        for part in range_constexpr(1, P.column_parts):
            w += products[row, t, part]
            y += products[row, P.slots + t, part]
        factor = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(factors[None, t], factor)
        rest[e] = factor[0] * values[row, t] - factor[1] * w
        o[e] = factor[2] * y
    for t in range_constexpr(P.tokens):
        u[t] = arch.shuffle_sync(rest[t % P.own_tokens], t // P.own_tokens * P.warp_rows + r)
    A = cute.make_tensor(
        M.coefficients.iterator, cute.make_layout((4, P.slots // 4, 8), stride=(1, 4, P.slots))
    )
    for s in range_constexpr(P.tokens - 1):
        for half in range_constexpr((s + 1) // 4, ceil_div(P.tokens, 4)):
            quad = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(A[None, half, s], quad)
            for t in range_constexpr(max(4 * half, s + 1), min(4 * half + 4, P.tokens)):
                u[t] = u[t] - quad[t % 4] * u[s]
    B = cute.make_tensor(
        M.coefficients.iterator + 8 * P.slots, cute.make_layout((4, 2, P.slots), stride=(1, 4, 8))
    )
    for e in range_constexpr(P.own_tokens):
        t = min(first + e, P.tokens - 1)
        for half in range_constexpr(ceil_div(P.tokens, 4)):
            quad = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(B[None, half, t], quad)
            for s in range_constexpr(4 * half, min(4 * half + 4, P.tokens)):
                o[e] += quad[s % 4] * u[s]


@cute.jit
def send_sum(M: Smem, square: Float32, t: Int32, r: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """A warp's part of |o|^2 of a token, which all lanes of its rows hold, to every CTA."""
    if t < P.tokens:
        place = t * P.norm_slots + at.rank * P.row_warps + at.warp
        if const_expr(P.split == 1):
            if r == 0:
                M.sums[place] = square
        else:
            address, barrier = M.sums.iterator.toint() + place * 4, (M.barriers + _SUMS).toint()
            for j in range_constexpr(ceil_div(P.split, P.warp_rows)):
                cta = r + j * P.warp_rows
                if cta < P.split:
                    blocks.send(blocks.peer(address, cta), blocks.peer(barrier, cta), square)
