"""KdaFused with source=shared."""

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
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.parts import chunked, conv_window, fold, gate_product, prologue, wide_prologue
from kda_kernels.parts.prologue import Place
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
        """In the place of x, f_a and the record's keys and gates: the fragments. In that of gamma: A and B, a part per
        step."""
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
        return self.ctas_per_sm * (self.smem_bytes + smem.RESERVED_BYTES) <= smem.SM_BYTES

    def on(self, gpu: Gpu) -> Plan:
        """The plan for a GPU: with gate weights by eight bytes where those by sixteen spill.

        Where they do is what the compiler said of every form of the grid on every target; tests/test_fused.py compiles
        some of them.
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
        pending = Int32(0)
        if row >= 0:
            pending = blocks.at(Int32, A.pending, row)
        record = prologue.record_of(A, row, at.head)
        asked, start = Int32(P.tokens), Int32(0)
        if const_expr(P.records == "pending"):
            asked = fold.clamped(pending, P)
        if const_expr(P.layout != "rows"):
            start = max(fold.clamped(pending, P) - 1, Int32(0))
        fold.load_keys(M, record, asked, at.tid, P)
        conv_window.load_all(M, conv_window.window_of(A, page, start), at, P)
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
        window = conv_window.window_of(A, page, max(n - 1, Int32(0)))
        exp_A = blocks.exp(M.A_log[0])
        if warp < chunked.WARPS:
            raw = gate_product.product(gate_weights, M.f_a, lane, P)
            chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, warp, lane, P)
        if warp < chunked.CONVOLVING_WARPS:
            chunked.convolve_with(taps, bias, M, M.qkv, window, record, at.tid, P)
        if warp >= P.warps - fold.WEIGHING_WARPS:
            fold.weigh(M, n, exp_A, A.lower_bound, warp - (P.warps - fold.WEIGHING_WARPS), lane, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        if warp < chunked.WARPS:
            chunked.build_fragments(M.fragments, M.qkv, M.gamma, A.scale, warp, chunked.WARPS, lane, P)
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        if const_expr(P.warps == chunked.WARPS):
            chunked.token_products(M.fragments, M.partials, warp, lane, P)
            arch.sync_threads()
        if warp == P.warps - 1:
            if const_expr(P.warps > chunked.WARPS):
                for step in cutlass.range(chunked.STEPS, unroll=4):
                    chunked.token_products(M.fragments, M.partials, step, lane, P)
                arch.sync_warp()
            beta = blocks.sigmoid(M.beta[at.head % 2, min(lane % P.slots, P.tokens - 1)].to(Float32))
            chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)

        sums = chunked.accumulators(P)
        if warp < chunked.WARPS:
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
        arch.sync_threads()

        # Asked for anew, so that less is kept in registers until here.
        at = again(A)
        warp, lane = at.warp, at.lane
        o = cute.make_rmem_tensor(4, Float32)
        if warp < chunked.WARPS:
            v = chunked.values(M.qkv, warp, lane, P)
            corrections, attended = chunked.finish(sums, v, M.solution, lane, P)
            for i in range_constexpr(4):
                o[i] = blocks.rounded(attended[i])
            chunked.store_squares(o, M.squares, warp, lane, P)
            if row >= 0:
                chunked.store_corrections(corrections, prologue.record_of(A, row, at.head).corrections, warp, lane, P)
        arch.sync_threads()
        if warp < chunked.WARPS:
            factors = chunked.output_factors(M.out_gate, M.norm_weight, warp, lane, P)
            chunked.store_outputs(o, factors, M.squares, A.eps, results_of(A, at, P), at.D, warp, lane, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        prologue.store_zeros(results_of(A, at, P), at, P)


@cute.jit
def again(A: Arguments) -> Place:
    """`wide_prologue.place`, from special registers read where this stands."""
    tid, head = blocks.special("%tid.x"), blocks.special("%ctaid.x")
    warp = arch.make_warp_uniform(tid // 32)
    return Place(tid, warp, tid % 32, Int32(0), head, head * HEAD_DIM, A.heads * HEAD_DIM)


@cute.jit
def results_of(A: Arguments, at: Place, P: cutlass.Constexpr) -> Int64:
    address: Int64 = A.out + (Int64(blocks.special("%ctaid.y") * P.tokens) * at.D + at.channel) * 2
    return address


@cute.jit
def ask_line(M: Smem, state: Int64, line: Int32, at: Place, P: cutlass.Constexpr) -> None:
    cells = M.state.iterator.toint() + (line % P.staged * chunked.LINE_BYTES + 16 * at.tid)
    chunked.copy_line(cells, state, line, at.warp, at.lane, Int64(0), False, P)


HOST = step.host_of(kda_fused_lines)
