"""KdaFused with source=shared: a CTA has an item, and its state passes through shared memory.

The state comes by cp.async in lines of 128 bytes, a warp's 16 rows for itself, so that no barrier
of the CTA stands before them:
  load      slot, record row; vectors, projection, window, record (cp.async); gate and convolution
            weights and the old corrections (registers); as many lines of the state as there is room
            for (cp.async)
  gate      its features of all tokens on tensor cores, Gamma across lanes; raw gates on to the
            record, which nobody needs any more
  convolve  q, k, v of all tokens on six warps; weigh, on two others: the pending tokens' keys, as
            fragments
  build     norms, and the 2q vectors as fragments
  solve     A and B, T and C
  advance   each line: folded, stored by whole lines if tokens are pending, multiplied; its room
            goes to the next one
  finish    corrections and outputs; RMSNorm
More than eight warps: the last one solves, while the first eight have the state, and the last two
weigh.
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
from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_SMEM_BYTES, Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.parts import chunked, conv_window, fold, gate_product, prologue, wide_prologue
from kda_kernels.parts.prologue import Place, Record
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM

arch = cute.arch


@dataclass(frozen=True)
class Plan(fold.Shape):
    """What decides the code.

    staged        lines of the state that there is room for
    ctas_per_sm   by which registers are capped
    gate_bytes    of a lane in one load of gate weights, 16 or 8
    """

    staged: int
    ctas_per_sm: int
    gate_bytes: int

    @property
    def areas(self) -> dict[str, Area]:
        """In the place of x, f_a and the record's keys and gates: the fragments. In that of gamma:
        A and B, a part per step."""
        tokens, entries = self.tokens, self.history + self.tokens
        f_a, keys = 2 * HEAD_DIM * 3 * entries, 2 * HEAD_DIM * (3 * entries + tokens)
        history = Area(BFloat16, (HEAD_DIM, 3, entries), inside="x")
        whole = Area(BFloat16, 3 * HEAD_DIM * self.window)
        return {
            "state": Area(Uint8, self.staged * chunked.LINE_BYTES),
            "x": Area(BFloat16, (HEAD_DIM, 3, entries)),
            "f_a": Area(BFloat16, tokens * HEAD_DIM, inside="x", skip=f_a),
            "old_key_gates": Area(BFloat16, 2 * HEAD_DIM * tokens, inside="x", skip=keys),
            "fragments": Area(Uint8, self.fragment_bytes, inside="x"),
            "window": whole if self.layout == "rows" else history,
            "dt_bias": Area(Float32, HEAD_DIM),
            "norm_weight": Area(Float32, HEAD_DIM),
            "out_gate": Area(BFloat16, (HEAD_DIM, tokens)),
            "A_log": Area(Float32, 1),
            "beta": Area(BFloat16, (2, tokens)),
            "fold": Area(Uint32, self.fold_bytes // 4),
            "fold_scale": Area(Float32, HEAD_DIM),
            "gamma": Area(Float32, self.gamma_bytes // 4),
            "partials": Area(Float32, self.partial_bytes // 4, inside="gamma"),
            "qkv": Area(BFloat16, self.qkv_bytes // 2),
            "pairs": Area(Float32, self.pair_floats),
            "matrix": Area(Float32, 2 * self.slots**2),
            "solution": Area(Uint32, 32 * self.solution_words),
            "squares": Area(Float32, self.slots * chunked.WARPS),
        }

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)

    @property
    def fits(self) -> bool:
        return self.ctas_per_sm * (self.smem_bytes + RESERVED_SMEM_BYTES) <= SM_SMEM_BYTES

    def on(self, gpu: Gpu) -> Plan:
        """The plan for a GPU: with gate weights by eight bytes where those by sixteen spill.

        Where they do is what the compiler said of every form of the grid on every target;
        tests/kernels/test_fused.py compiles some of them.
        """
        spills = self.ctas_per_sm > 2 and (self.tokens in (5, 7) or gpu.arch != "sm_90a")
        return replace(self, gate_bytes=8) if spills and self.gate_mode != 0 else self


@cute.kernel
def kda_fused_lines(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, Int32(0))
    row = blocks.at(Int32, A.record_rows, request)

    M = smem.allocate_together(P.areas, last=("window",))
    wide_prologue.load_vectors(A, M, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    wide_prologue.load_projection(A, M, request, at, P)
    if page > 0:
        # So that nothing later waits for the weights on its behalf.
        row = blocks.pinned(row)
        pending = fold.pending_of(A, row)
        record = prologue.record_of(A, row, at.head)
        load_past(A, M, record, page, pending, at, P)
        arch.cp_async_commit_group()
        u = cute.make_rmem_tensor((2, 2), Float32)
        gate_weights = gate_product.registers(P)
        taps = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
        bias = cute.make_rmem_tensor(2, P.conv_dtype)
        state = prologue.state_of(A, page, at.head, P)
        if warp < chunked.WARPS:
            fold.load_corrections(u, record, warp, lane, P)
            features = A.f_b + Int64(at.channel) * gate_product.ROW_BYTES
            gate_product.load(gate_weights, features, warp, lane, P)
            wide_prologue.load_taps(A, taps, bias, at, P)
        for line in range_constexpr(P.staged):
            if warp < chunked.WARPS:
                ask_line(M, state, Int32(line), at, P)
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(P.staged)
        arch.sync_threads()

        # Not sooner: whatever stands behind its first use waits for it.
        n = fold.clamped(pending, P)
        window = fold.window_of(A, page, n)
        exp_A = blocks.exp(M.A_log[0])
        if warp < chunked.WARPS:
            raw = gate_product.product(gate_weights, M.f_a, lane, P)
            chunked.store_gammas(
                raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, warp, lane, P
            )
        if warp < chunked.CONVOLVING_WARPS:
            chunked.convolve_with(taps, bias, M, M.qkv, window, record, at.tid, P)
        if warp >= P.warps - fold.WEIGHING_WARPS:
            index = warp - (P.warps - fold.WEIGHING_WARPS)
            fold.weigh(M, n, exp_A, A.lower_bound, index, lane, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        if warp < chunked.WARPS:
            chunked.build_fragments(
                M.fragments, M.qkv, M.gamma, A.scale, warp, chunked.WARPS, lane, P
            )
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        solve(M, at.head, warp, lane, P)
        sums = chunked.accumulators(P)
        if warp < chunked.WARPS:
            advance(A, sums, M, u, state, n, warp, lane, P)
        arch.sync_threads()
        finish(A, sums, M, row, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        prologue.store_zeros(results_of(A, at, P), at, P)


@cute.jit
def load_past(
    A: Arguments,
    M: Smem,
    record: Record,
    page: Int32,
    pending: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Ask for the record's keys and gates and for the window's history, all or as far as needed."""
    asked, start = Int32(P.tokens), Int32(0)
    if const_expr(P.records == "pending"):
        asked = fold.clamped(pending, P)
    if const_expr(P.layout != "rows"):
        start = max(fold.clamped(pending, P) - 1, Int32(0))
    fold.load_keys(M, record, asked, at.tid, P)
    conv_window.load_all(M, conv_window.window_of(A, page, start), at, P)


@cute.jit
def solve(M: Smem, head: Int32, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """A and B, a part per warp, and the triangles of them, on the last warp; all of it there if it
    has no part of the state."""
    if const_expr(P.warps == chunked.WARPS):
        chunked.token_products(M.fragments, M.partials, warp, lane, P)
        arch.sync_threads()
    if warp == P.warps - 1:
        if const_expr(P.warps > chunked.WARPS):
            for k in cutlass.range(chunked.STEPS, unroll=4):
                chunked.token_products(M.fragments, M.partials, k, lane, P)
            arch.sync_warp()
        raw = M.beta[head % 2, min(lane % P.slots, P.tokens - 1)]
        beta = blocks.sigmoid(raw.to(Float32))
        chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)


@cute.jit
def advance(
    A: Arguments,
    sums: cute.Tensor,
    M: Smem,
    u: cute.Tensor,
    state: Int64,
    n: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The warp's rows, line by line: folded, stored if n > 0, multiplied. u: of
    `fold.load_corrections`."""
    old = fold.corrections_fragment(u, n, lane, P)
    # Rolled: the compiler would put off the products of a line until the last one has arrived.
    for line in cutlass.range(P.lines, unroll=1):
        arch.cp_async_wait_group(P.staged - 1)
        slot = M.state.iterator.toint() + line % P.staged * chunked.LINE_BYTES
        fold.advance_line(sums, M, old, slot, state, n, line, warp, lane, P)
        if const_expr(P.staged < P.lines):
            if line + P.staged < P.lines:
                arch.sync_warp()
                ask_line(M, state, line + P.staged, again(A), P)
        arch.cp_async_commit_group()


@cute.jit
def finish(A: Arguments, sums: cute.Tensor, M: Smem, row: Int32, P: cutlass.Constexpr) -> None:
    """Corrections and outputs; RMSNorm over the CTA."""
    # Asked for anew, so that less is kept in registers until here.
    at = again(A)
    warp, lane = at.warp, at.lane
    o = cute.make_rmem_tensor(4, Float32)
    if warp < chunked.WARPS:
        v = chunked.values(M.qkv, warp, lane, P)
        u, attended = chunked.finish(sums, v, M.solution, lane, P)
        for i in range_constexpr(4):
            o[i] = blocks.rounded(attended[i])
        chunked.store_squares(o, M.squares, warp, lane, P)
        if row >= 0:
            record = prologue.record_of(A, row, at.head)
            chunked.store_corrections(u, record.corrections, warp, lane, P)
    arch.sync_threads()
    if warp < chunked.WARPS:
        factors = chunked.output_factors(M.out_gate, M.norm_weight, warp, lane, P)
        results = results_of(A, at, P)
        chunked.store_outputs(o, factors, M.squares, A.eps, results, at.D, warp, lane, P)


@cute.jit
def again(A: Arguments) -> Place:
    """`wide_prologue.place`, from special registers read where this stands."""
    tid, head = blocks.special("%tid.x"), blocks.special("%ctaid.x")
    warp = arch.make_warp_uniform(tid // 32)
    return Place(tid, warp, tid % 32, Int32(0), head, head * HEAD_DIM, A.heads * HEAD_DIM)


@cute.jit
def results_of(A: Arguments, at: Place, P: cutlass.Constexpr) -> Int64:
    """Address of the item's first channel of the request's first token."""
    address: Int64 = A.out + (Int64(blocks.special("%ctaid.y") * P.tokens) * at.D + at.channel) * 2
    return address


@cute.jit
def ask_line(M: Smem, state: Int64, line: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """A line of the state at an address to its room, which the line `staged` before it must have
    left."""
    cells = M.state.iterator.toint() + (line % P.staged * chunked.LINE_BYTES + 16 * at.tid)
    chunked.copy_line(cells, state, line, at.warp, at.lane, Int64(0), False, P)


HOST = step.host_of(kda_fused_lines)
