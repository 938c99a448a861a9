"""KdaWide without a GPU: its rules and arithmetic, its source run thread by thread, what the
compiler made of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kda_kernels import arguments
from kda_kernels.check import reference
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import make_step
from kda_kernels.parts import chunked
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import wide
from support import simt, simt_cluster
from support.compiled import Recorder, sass_of

H200 = Gpu("sm_90a", 132)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    return simt_cluster.load("wide")["wide"]


def problem(
    kind: str = "record", tokens: int = 8, state_dtype: str = "fp32", **more: Any
) -> Problem:
    return Problem(kind, 4, 6, tokens, state_dtype=state_dtype, **more)  # type: ignore[arg-type]


CHUNKED = wide.Options(form="chunked")


@pytest.mark.parametrize(
    ("of", "options", "reason"),
    [
        (Problem("replay", 4, 6, 4, pending=2), CHUNKED, "kind=replay"),
        (Problem("commit", 4, 6, 4), wide.Options(), "kind=commit"),
        (problem("spec", 4), CHUNKED, "form='chunked': kind=spec takes recurrence"),
        (problem("decode", 1), CHUNKED, "form='chunked': kind=decode takes recurrence"),
        (problem(), wide.Options(), "form='recurrence': kind=record takes chunked"),
        (problem(), replace(CHUNKED, gate_mode=2), "gate_mode=2"),
        (problem(), replace(CHUNKED, terms=3), "terms=3"),
        (problem(), replace(CHUNKED, ctas=5), "ctas=5"),
        (problem(), replace(CHUNKED, ctas=4), "leave no room for ctas=4"),
        (problem("spec", 4), wide.Options(ctas=3), "leave no room for ctas=3"),
        (problem(), replace(CHUNKED, window=9), "window=9 must lie in 10..16"),
        (problem("decode", 1), wide.Options(window=2), "window=2 must lie in 3..16"),
        (problem("decode", 1), wide.Options(conv_weight_dtype="fp16"), "conv_weight_dtype"),  # type: ignore[arg-type]
        (Problem("record", 70_000, 1, 4), CHUNKED, "requests=70000"),
    ],
)
def test_unsupported(of: Problem, options: wide.Options, reason: str) -> None:
    found = wide.unsupported(of, options, H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        wide.compile(of, options, H200)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("streamable", [True, False])
def test_supported(dtype: str, layout: str, streamable: bool) -> None:
    for tokens in range(1, 9):
        for kind in ("decode",) if tokens == 1 else ("record", "spec"):
            options = wide.Options(
                "chunked" if kind == "record" else "recurrence", streamable=streamable
            )
            of = problem(kind, tokens, dtype, conv_layout=layout)
            assert wide.unsupported(of, options, H200) is None
            p = wide.plan(of, options)
            assert p.staged == p.lines
            assert p.ctas_per_sm >= 2


def test_room_for_more_ctas_is_made_by_staging_fewer_lines() -> None:
    staged = {q: wide.plan(problem(tokens=q), replace(CHUNKED, ctas=3)).staged for q in range(2, 9)}
    assert staged == {2: 3, 3: 3, 4: 3, 5: 2, 6: 2, 7: 2, 8: 2}
    assert all(wide.plan(problem(tokens=q), replace(CHUNKED, ctas=2)).staged == 4 for q in staged)


def assert_resources(compiled: Compiled, ctas: int) -> None:
    found = compiled.resources
    assert found.stack_bytes == 0
    assert found.smem_bytes == compiled.plan.smem_bytes
    assert found.ctas_per_sm >= compiled.plan.ctas_per_sm >= ctas
    assert wide.KERNELS[0] in compiled.binary.symbol
    assert len(compiled.binary.parameters) == len(arguments.Arguments._fields)


@pytest.mark.parametrize(
    ("arch", "tokens"),
    [*(("sm_90a", q) for q in range(2, 9)), ("sm_100a", 4), ("sm_100a", 8), ("sm_103a", 8)],
)
@pytest.mark.parametrize(("dtype", "ctas"), [("fp32", 2), ("bf16", 3)])
def test_record_residency_and_no_spills(arch: str, tokens: int, dtype: str, ctas: int) -> None:
    if (tokens, dtype) == (8, "bf16"):
        ctas = 2  # three leave too few registers for two terms
    assert_resources(
        wide.compile(problem(tokens=tokens, state_dtype=dtype), CHUNKED, Gpu(arch, 132)), ctas
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("tokens", "gate_mode"), [(4, 0), (8, 0), (6, 1), (8, 1)])
def test_three_records_per_sm(arch: str, tokens: int, gate_mode: int) -> None:
    options = replace(CHUNKED, ctas=3, gate_mode=gate_mode)
    assert_resources(wide.compile(problem(tokens=tokens), options, Gpu(arch, 132)), 3)


@pytest.mark.parametrize(
    ("arch", "tokens"), [("sm_90a", 5), ("sm_90a", 7), ("sm_100a", 3), ("sm_100a", 7)]
)
def test_three_records_of_bf16_states_per_sm(arch: str, tokens: int) -> None:
    options = replace(CHUNKED, gate_mode=1, terms=1)
    assert_resources(
        wide.compile(problem(tokens=tokens, state_dtype="bf16"), options, Gpu(arch, 132)), 3
    )


@pytest.mark.parametrize(
    "options",
    [
        replace(CHUNKED, gate_mode=1, window=16, evict=True),
        replace(CHUNKED, streamable=False),
        replace(CHUNKED, conv_weight_dtype="bf16", terms=1),
    ],
)
@pytest.mark.parametrize(("dtype", "ctas"), [("fp32", 2), ("bf16", 3)])
def test_record_choices(options: wide.Options, dtype: str, ctas: int) -> None:
    layout = "dim-first" if options.gate_mode == 1 else "window-major"
    if (options.terms, dtype) == (2, "bf16"):
        ctas = 2
    assert_resources(
        wide.compile(problem(state_dtype=dtype, conv_layout=layout), options, H200), ctas
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dtype", "ctas"), [("fp32", 3), ("bf16", 4)])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
def test_decode_residency_and_no_spills(arch: str, dtype: str, ctas: int, layout: str) -> None:
    options = wide.Options(gate_mode=1, stream_hints=layout == "dim-first")
    assert_resources(
        wide.compile(problem("decode", 1, dtype, conv_layout=layout), options, Gpu(arch, 132)), ctas
    )


@pytest.mark.parametrize(
    ("arch", "tokens"), [("sm_90a", 2), ("sm_90a", 5), ("sm_90a", 8), ("sm_103a", 8)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_spec_residency_and_no_spills(arch: str, tokens: int, dtype: str) -> None:
    assert_resources(
        wide.compile(problem("spec", tokens, dtype), wide.Options(), Gpu(arch, 132)), 2
    )


def test_sizes_and_launch_options_share_one_binary() -> None:
    first = wide.compile(problem(), CHUNKED, H200)
    second = wide.compile(
        Problem("record", 1, 96, 8), replace(CHUNKED, pdl=True, stream_hints=True), H200
    )
    assert first.binary == second.binary  # the time it took to compile is part of it
    assert (first.pdl, second.pdl) == (False, True)


@pytest.mark.parametrize("ctas", [2, 3])
def test_a_line_is_multiplied_before_the_next_is_awaited(tmp_path: Path, ctas: int) -> None:
    options = replace(CHUNKED, ctas=ctas)
    sass = sass_of(wide.compile(problem(), options, H200).binary.image, tmp_path)
    assert not re.findall(r"\b(?:STL|LDL)\b", sass)
    assert len(re.findall(r"\bLDG\.E\.128\b", sass)) == 8  # gate weights
    assert len(re.findall(r"\bLDG\.E\.64\b", sass)) == 5  # taps and bias
    # The first copies of the state follow the weights, so that these don't queue behind them.
    first_gate = sass.index("HMMA.16816.F32.BF16")
    weights = max(m.start() for m in re.finditer(r"\bLDG\.E\.(?:64|128)\b", sass))
    copies = [m.start() for m in re.finditer(r"\bLDGSTS\.E\.BYPASS(?:\.LTC128B)?\.128\b", sass)]
    assert (
        len([at for at in copies if weights < at < first_gate])
        == 4 * wide.plan(problem(), options).staged
    )
    # Products: gate 8, A and B 6; a loop of 12, one turn per line; T and C 4.
    waited = sass.rindex("DEPBAR.LE SB0, 0x", 0, sass.rindex("HMMA"))
    turn = re.search(r"@!?P\d BRA", sass[waited:])
    assert turn is not None
    end = waited + turn.start()
    assert [part.count("HMMA.16816") for part in (sass[:waited], sass[waited:end], sass[end:])] == [
        8 + 6,
        12,
        4,
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lines_cover_a_state_once(emulated: ModuleType, dtype: str) -> None:
    """Every 16 bytes of a page come to one place, and a thread reads its two rows' cells back, in
    the MMA's order."""
    m = emulated
    item_bytes = 4 if dtype == "fp32" else 2
    width = 16 // item_bytes
    P = m.plan(problem(state_dtype=dtype), m.Options("chunked"))
    source_of: dict[int, tuple[int, int]] = {}  # shared address: row, column
    for thread in range(256):
        warp, lane = simt.Int32(thread // 32), simt.Int32(thread % 32)
        for line in range(P.lines):
            copies = simt.asked_copies(
                thread, m.chunked.copy_line, simt.Int32(16384 * line + 16 * thread), simt.Int64(0), simt.Int32(line),
                warp, lane, simt.Int64(0), False, P,
            )  # fmt: skip
            for shared, address, nbytes in copies:
                assert nbytes == 16
                assert shared not in source_of
                source_of[shared] = divmod(address // item_bytes, HEAD_DIM)
                assert source_of[shared][0] // 16 == thread // 32
    assert set(source_of) == set(range(0, HEAD_DIM * HEAD_DIM * item_bytes, 16))
    assert len(set(source_of.values())) == len(source_of)

    read: list[int] = []

    def note(_kind: Any, address: Any, *_: Any, **__: Any) -> simt.Pointer:
        read.append(int(address))
        return simt.Pointer(simt.Uint32, 1024, simt.Memory(16, base=1024))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m.chunked.cute, "make_ptr", note)
        patch.setattr(m.chunked, "multiply_cell", lambda *_: None)
        for thread, cell in itertools.product(range(256), range(P.row_cells)):
            g, t = thread % 32 // 4, thread % 4
            read.clear()
            m.chunked._multiply_half(
                None, simt.Int32(cell // 2 * 16384 + 16 * thread), None, simt.Int32(cell), cell % 2,
                simt.Int32(thread % 32), P,
            )  # fmt: skip
            for side, address in enumerate(read):
                row, column = source_of[address]
                assert row == 16 * (thread // 32) + 2 * g + side
                assert column == 4 * width * cell + width * t
                # The halves of a bf16 cell, or a whole fp32 cell, meet the vectors' columns in
                # their step.
                for half in range(width // 4):
                    assert P.quad_place(column // 4 + half) == (width // 4 * cell + half, t)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lines_are_written_and_read_without_bank_conflicts(
    emulated: ModuleType, dtype: str
) -> None:
    """Eight lanes copy 128 neighbouring bytes to the same 128, and a quarter of a warp reads from
    all banks."""
    m = emulated
    P = m.plan(problem(state_dtype=dtype), m.Options("chunked"))
    lanes = [
        simt.asked_copies(
            lane, m.chunked.copy_line, simt.Int32(16 * lane), simt.Int64(0), simt.Int32(0), simt.Int32(0),
            simt.Int32(lane), simt.Int64(0), False, P,
        )
        for lane in range(32)
    ]  # fmt: skip
    for copies in zip(*lanes, strict=True):
        for first in range(0, 32, 8):
            shared, source = zip(*((s, a) for s, a, _ in copies[first : first + 8]), strict=True)
            assert len({s // 128 for s in shared}) == len({a // 128 for a in source}) == 1
            assert {s % 128 for s in shared} == set(range(0, 128, 16))
            assert all((s - a) % 64 == 0 for s, a in zip(shared, source, strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cells_of_rows_cover_a_state_once(emulated: ModuleType, dtype: str) -> None:
    """Kinds decode and spec: every 16 bytes of a page come to one cell of the thread that advances
    them."""
    m = emulated
    item_bytes = 4 if dtype == "fp32" else 2
    P = m.plan(problem("decode", 1, dtype), m.Options())
    cells, units = set(), set()
    for thread, piece in itertools.product(range(256), range(4)):
        rows = m.state_rows
        warp, lane = simt.Int32(thread // 32), simt.Int32(thread % 32)
        item = simt.Int64(0) + rows.first_cell(simt.Int32(0), warp, lane, P)
        for shared, address, nbytes in simt.asked_copies(
            thread,
            rows.ask_piece,
            simt.Int32(16 * thread),
            item,
            piece * m.PIECE_ROWS,
            simt.Int64(0),
            P,
        ):
            assert nbytes == 16
            assert shared // 16 % 256 == thread
            assert address // item_bytes // HEAD_DIM // 16 == thread // 32
            cells.add(shared)
            units.add(address)
    assert cells == units == set(range(0, HEAD_DIM * HEAD_DIM * item_bytes, 16))


def split_terms(x: torch.Tensor, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    bits = x.float().view(torch.int32)
    high = x.bfloat16().float() if rounded else (bits & -65536).view(torch.float32)
    return high.double(), (x.float() - high).bfloat16().double()


def test_precision_of_split_products() -> None:
    """State truncated, vectors rounded, two terms each, three products; and what fewer would
    give."""
    g = torch.Generator().manual_seed(1)
    S = torch.randn(64, 128, 128, generator=g) * 0.3
    x = torch.randn(64, 128, 16, generator=g) / 128**0.5
    exact = S.double() @ x.double()
    s_high, s_low = split_terms(S, rounded=False)
    x_high, x_low = split_terms(x, rounded=True)

    def error(y: torch.Tensor) -> float:
        return float((y - exact).norm() / exact.norm())

    assert error(s_high @ x_high + s_high @ x_low + s_low @ x_high) < 1e-5
    assert error(s_high @ x_high) > 1e-3  # one term each fails
    bf16 = S.bfloat16().double()
    of_bf16 = bf16 @ x.double()
    assert (
        float((bf16 @ x_high - of_bf16).norm() / of_bf16.norm()) < 4e-3 < 5e-3
    )  # one term passes for a BF16 state


@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_triangles_replace_the_substitution(tokens: int) -> None:
    """u = T r and o = y + C r, and k / Gamma stays in range, for the strongest decay that a launch
    takes."""
    g = torch.Generator().manual_seed(tokens)
    S = torch.randn(3, 128, 128, generator=g, dtype=torch.float64) * 0.3
    k, q, v = torch.randn(3, 3, tokens, 128, generator=g, dtype=torch.float64)
    k, q = reference.normalized(k), reference.normalized(q) * 128**-0.5
    lowest = chunked.MIN_LOG_GAMMA / tokens
    decay = torch.rand(3, tokens, 128, generator=g, dtype=torch.float64) * lowest
    decay[..., 0] = lowest
    beta = torch.rand(3, tokens, generator=g, dtype=torch.float64)
    gamma = decay.cumsum(-2).exp()
    assert (k / gamma).abs().max() < torch.finfo(torch.bfloat16).max / 128
    pairs = (gamma * k) @ (k / gamma).transpose(-1, -2)
    A, B = pairs.tril(-1), ((gamma * q) @ (k / gamma).transpose(-1, -2)).tril()
    T = torch.linalg.solve(
        torch.eye(tokens, dtype=torch.float64) + beta[..., None] * A, torch.diag_embed(beta)
    )
    r = v - (gamma * k) @ S.transpose(-1, -2)
    outputs, corrections = reference.recurrence(S.clone(), k, q, v, decay, beta)
    torch.testing.assert_close(T @ r, corrections, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        (gamma * q) @ S.transpose(-1, -2) + B @ T @ r, outputs, rtol=1e-9, atol=1e-9
    )


CASES: dict[str, tuple[Problem, wide.Options, dict[str, Any]]] = {
    "record 8": (problem(), CHUNKED, {}),
    "record 3, bf16, window-major": (
        problem(tokens=3, state_dtype="bf16", conv_layout="window-major"),
        replace(CHUNKED, terms=1, gate_mode=1, conv_weight_dtype="bf16"),
        {"inputs": "generic"},
    ),
    "record 5, any layout": (
        problem(tokens=5, conv_layout="window-major"),
        replace(CHUNKED, streamable=False),
        {"conv_bias": False},
    ),
    "decode": (problem("decode", 1), wide.Options(), {}),
    "decode, bf16, window-major": (
        problem("decode", 1, "bf16", conv_layout="window-major"),
        wide.Options(gate_mode=1, stream_hints=True),
        {"conv_bias": False},
    ),
    "record 4, fewer lines, longer window": (
        problem(tokens=4),
        replace(CHUNKED, ctas=3, window=10),
        {"inputs": "generic", "longer": 3},
    ),
    "record 7, fewer lines": (problem(tokens=7), replace(CHUNKED, ctas=3), {}),
    "spec 3": (problem("spec", 3), wide.Options(), {"inputs": "generic"}),
    "spec 2, bf16, window-major": (
        problem("spec", 2, "bf16", conv_layout="window-major"),
        wide.Options(gate_mode=1, conv_weight_dtype="bf16", stream_hints=True),
        {"conv_bias": False},
    ),
    "spec 5, any layout": (problem("spec", 5), wide.Options(streamable=False), {}),
}


def emulate(
    m: ModuleType, of: Problem, options: wide.Options, draw: dict[str, Any], seed: int
) -> str | None:
    """A live item and a null one, and with generic records a live one without a record, against the
    reference."""
    of = replace(of, requests=3 if draw.get("inputs") == "generic" else 2, heads=1)
    draw = dict(draw)
    longer = draw.pop("longer", 0)
    operands = make_step(of, seed=seed, device="cpu", pad=16, null_requests=(1,), **draw)
    if longer:
        slots, channels, entries = operands.conv_state.shape
        window = torch.randn(slots, channels, entries + longer).bfloat16()
        window[:, :, :entries] = operands.conv_state
        operands = replace(operands, conv_state=window)
    if options.conv_weight_dtype == "bf16":
        operands = simt.with_bf16_weights(operands)
    if operands.record_rows is not None:
        operands.record_rows[2:] = -1
    return simt.compare_step(m, of, options, operands, seed)


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: ModuleType, case: str) -> None:
    of, options, draw = CASES[case]
    assert emulate(emulated, of, options, draw, seed=len(case)) is None


def test_emulation_notices_a_missing_barrier(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.arch, "sync_threads", lambda: None)
    assert emulate(emulated, *CASES["decode"], seed=1) is not None


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    of = problem()
    compiled = wide.compile(of, replace(CHUNKED, pdl=True), H200)
    operands = make_step(of, seed=1, device="cpu", pad=16)
    wide.launch(compiled, operands, 7)
    assert recorder.grid == (6, 4, 1)
    assert (recorder.stream, recorder.pdl) == (7, True)
    assert len(recorder.values) == len(compiled.binary.parameters)
    passed = arguments.Arguments(*recorder.values)
    assert passed.projected == operands.projected.data_ptr()
    assert (passed.heads, passed.requests, passed.lower_bound, passed.scale) == (
        6,
        4,
        -5.0,
        HEAD_DIM**-0.5,
    )


def test_launch_refuses_operands_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "launcher", lambda _: Recorder())
    of = problem()
    compiled = wide.compile(of, CHUNKED, H200)
    operands = make_step(of, seed=1, device="cpu")
    wide.launch(compiled, operands, 0)
    with pytest.raises(ValueError, match="lower_bound is None"):
        wide.launch(compiled, replace(operands, lower_bound=None), 0)
    with pytest.raises(ValueError, match="too low for 8 tokens"):
        wide.launch(compiled, replace(operands, lower_bound=-8.0), 0)
    with pytest.raises(ValueError, match="state"):
        wide.launch(compiled, make_step(problem(state_dtype="bf16"), seed=1, device="cpu"), 0)
    with pytest.raises(ValueError, match="corrections"):
        wide.launch(compiled, replace(operands, corrections=operands.corrections[:, :, :4]), 0)
    with pytest.raises(ValueError, match="conv_state"):
        wide.launch(
            compiled, make_step(problem(conv_layout="window-major"), seed=1, device="cpu"), 0
        )
