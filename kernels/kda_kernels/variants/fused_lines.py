"""KdaFused with source=shared."""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.parts import chunked, conv_window, fold, gate_product, prologue, wide_prologue
from kda_kernels.parts.prologue import ALIGNMENT, Operands, Place
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class LinesPlan(fold.Shape):
    """source=shared. staged: lines of the state that there is room for; gate_bytes as `Plan` has it."""

    staged: int
    gate_bytes: int
    ctas_per_sm: int

    @property
    def split(self) -> int:
        return 1

    @property
    def areas(self) -> dict[str, int]:
        row, tokens = 2 * HEAD_DIM, self.tokens
        areas = {
            "state": self.staged * chunked.LINE_BYTES,
            # x, f_a, the record's keys and gates; then the fragments.
            "inputs": max(row * (3 * (self.history + tokens) + tokens + 2 * tokens), self.fragment_bytes),
            "dt_bias": 4 * HEAD_DIM,
            "norm_weight": 4 * HEAD_DIM,
            "out_gate": row * tokens,
            "A_log": 4,
            "beta": 4 * tokens,
            "fold": self.fold_bytes,
            "fold_scale": 4 * HEAD_DIM,
            # Then A and B, a part per step.
            "gamma": max(self.gamma_bytes, self.partial_bytes),
            "qkv": self.qkv_bytes,
            "pairs": 4 * self.pair_floats,
            "matrix": 8 * self.slots**2,
            "solution": 128 * self.solution_words,
            "squares": 4 * self.slots * chunked.WARPS,
        }
        if self.layout == "rows":
            areas["window"] = 3 * row * self.window
        return prologue.aligned(areas)

    @property
    def fits(self) -> bool:
        return self.ctas_per_sm * (self.smem_bytes + prologue.RESERVED_SMEM) <= prologue.SM_SMEM


def _areas(P: LinesPlan) -> Any:
    """All shared memory, by `prologue.viewer`."""
    smem = SmemAllocator()
    area = smem.allocate_tensor(Uint8, cute.make_layout(P.smem_bytes), byte_alignment=ALIGNMENT)
    return prologue.side_by_side(P.areas, area.iterator.toint())


@dataclass(frozen=True)
class SharedLines(Operands):
    """A CTA's shared memory with source=shared: as `Shared` has it, but for what is said here."""

    state: Any  # lines as `chunked.copy_line` has them
    old_key_gates: Any
    fragments: Any  # in the place of x, f_a and old_key_gates
    norm_weight: Any
    fold: Any
    fold_scale: Any
    gamma: Any
    partials: Any  # in the place of gamma
    qkv: Any
    pairs: Any
    matrix: Any
    solution: Any
    squares: Any


def allocate_lines(P: LinesPlan) -> SharedLines:
    view = _areas(P)
    entries = P.history + P.tokens
    x = view(BFloat16, "inputs", (HEAD_DIM, 3, entries))
    f_a = 6 * HEAD_DIM * entries
    return SharedLines(
        state=view(Uint8, "state", P.staged * chunked.LINE_BYTES),
        x=x,
        f_a=view(BFloat16, "inputs", P.tokens * HEAD_DIM, f_a),
        old_key_gates=view(BFloat16, "inputs", 2 * HEAD_DIM * P.tokens, f_a + 2 * HEAD_DIM * P.tokens),
        fragments=view(Uint8, "inputs", P.fragment_bytes),
        window=view(BFloat16, "window", 3 * HEAD_DIM * P.window) if P.layout == "rows" else x,
        dt_bias=view(Float32, "dt_bias", HEAD_DIM),
        norm_weight=view(Float32, "norm_weight", HEAD_DIM),
        out_gate=view(BFloat16, "out_gate", (HEAD_DIM, P.tokens)),
        A_log=view(Float32, "A_log", 1),
        beta=view(BFloat16, "beta", (2, P.tokens)),
        fold=view(Uint32, "fold", P.fold_bytes // 4),
        fold_scale=view(Float32, "fold_scale", HEAD_DIM),
        gamma=view(Float32, "gamma", P.gamma_bytes // 4),
        partials=view(Float32, "gamma", P.partial_bytes // 4),
        qkv=view(BFloat16, "qkv", P.qkv_bytes // 2),
        pairs=view(Float32, "pairs", P.pair_floats),
        matrix=view(Float32, "matrix", 2 * P.slots**2),
        solution=view(Uint32, "solution", 32 * P.solution_words),
        squares=view(Float32, "squares", P.slots * chunked.WARPS),
    )


@cute.kernel
def kda_fused_lines(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, Int32(0))
    row = blocks.at(Int32, A.record_rows, request)

    M = allocate_lines(P)
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
def ask_line(M: cutlass.Constexpr, state: Int64, line: Int32, at: Place, P: cutlass.Constexpr) -> None:
    cells = M.state.iterator.toint() + (line % P.staged * chunked.LINE_BYTES + 16 * at.tid)
    chunked.copy_line(cells, state, line, at.warp, at.lane, Int64(0), False, P)


@cute.jit
def host(A: Arguments, P: cutlass.Constexpr) -> None:
    kda_fused_lines(A, P).launch(
        grid=(1, 1, 1),
        block=(P.threads, 1, 1),
        min_blocks_per_mp=P.ctas_per_sm,
        preferred_smem_carveout=100,
    )
