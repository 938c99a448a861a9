"""The stock chain under Triton's interpreter against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kda_kernels import stock
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, address_table, make_commit, make_step
from kda_kernels.problem import Problem
from support.naive import naive

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton runs compiled here: see test_gpu_stock.py"
)

GPU = Gpu("sm_90a", 132)
SPEC = stock.Options(value_tile=64, num_warps=4)  # the interpreter pays per program


def check(problem: Problem, operands: StepOperands, options: stock.Options = SPEC) -> None:
    expected = reference.step(problem, operands)
    compare.poison(operands)
    stock.launch(stock.compile(problem, options, GPU), operands, None)
    assert compare.check_step(problem, operands, expected) is None


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (Problem("decode", 4, 3), {"inputs": "generic", "conv_bias": False}),
        (
            Problem("decode", 3, 1, state_dtype="bf16", conv_layout="window-major"),
            {"lower_bound": None},
        ),
        (Problem("spec", 5, 3, 3), {"inputs": "generic"}),
        (Problem("spec", 3, 2, 2, state_dtype="bf16", conv_layout="window-major"), {}),
        (
            Problem("record", 5, 3, 3, conv_layout="window-major"),
            {"inputs": "generic", "lower_bound": None},
        ),
        (Problem("record", 3, 1, 8, state_dtype="bf16"), {}),
        (Problem("record", 3, 2, 2), {"conv_bias": False}),
    ],
    ids=lambda x: (
        f"{x.kind}{x.tokens}-{x.state_dtype}-{x.conv_layout}" if isinstance(x, Problem) else ""
    ),
)
def test_steps(problem: Problem, options: dict[str, object]) -> None:
    operands = make_step(problem, seed=1, device="cpu", pad=16, null_requests=(1,), **options)
    check(problem, operands)


@pytest.mark.parametrize(
    "options", [stock.Options(), stock.Options(8, 1), stock.Options(128, 8)], ids=str
)
def test_every_value_tile(options: stock.Options) -> None:
    problem = Problem("record", 2, 2, 2)
    check(problem, make_step(problem, seed=2, device="cpu"), options)


def test_spec_continues_from_every_accepted_count() -> None:
    problem = Problem("spec", 5, 1, 4)
    operands = make_step(problem, seed=3, device="cpu", inputs="generic")
    operands.accepted.copy_(torch.tensor([1, 2, 3, 4, 2]))
    operands.slots[1, 3] = 0  # not stored
    operands.slots[2, 2] = 0  # the accepted one: a null request
    operands.slots[4, 0] = 0  # the window's: a null request too
    check(problem, operands)


def test_more_accepted_than_tokens_counts_as_all_of_them() -> None:
    problem = Problem("spec", 3, 1, 4)
    operands = make_step(problem, seed=3, device="cpu", inputs="generic")
    operands.accepted.copy_(torch.tensor([4, 5, 1 << 30]))
    all_accepted = replace(operands, accepted=torch.full((3,), 4, dtype=torch.int32))
    assert torch.equal(
        reference.step(problem, operands).state, reference.step(problem, all_accepted).state
    )
    check(problem, operands)


def test_bf16_weights_and_an_fp32_padded_window() -> None:
    problem = Problem("record", 3, 2, 2)
    operands = make_step(problem, seed=4, device="cpu", null_requests=(0,))
    flat = torch.randn(4, 3 * 256 * 7 + 5)
    check(problem, replace(
        operands, conv_weight=operands.conv_weight.bfloat16(), conv_bias=operands.conv_bias.bfloat16(),
        conv_state=flat.as_strided((4, 3 * 256, 7), (flat.stride(0), 7, 1))))  # fmt: skip


def test_slots_and_rows_of_larger_tables() -> None:
    """Strided slot tables, spare entries of records, spare columns of the projection."""
    problem = Problem("record", 3, 2, 2)
    operands = make_step(problem, seed=5, device="cpu")
    table = torch.full((3, 5), -7, dtype=torch.int32)
    table[:, :1] = operands.slots
    wide = torch.randn(6, operands.projected.shape[1] + 32).bfloat16()
    check(problem, replace(
        operands, slots=table[:, :1], projected=wide[:, : operands.projected.shape[1]],
        record_rows=torch.tensor([4, -1, 1], dtype=torch.int32), corrections=torch.randn(5, 2, 4, 128),
        key_gates=torch.randn(5, 2, 4, 256).bfloat16()))  # fmt: skip


@pytest.mark.parametrize("kind", ["spec", "record"])
def test_ragged_windows(kind: str) -> None:
    problem = Problem(kind, 5, 2, 3)
    operands = make_step(problem, seed=6, device="cpu", pad=16, null_requests=(2,))
    lengths = [3, 0, 2, 1, 2]
    starts = [0, 3, 3, 5, 6]
    packed = replace(
        operands, projected=operands.projected[:10], out=torch.full((10, 256), 3.0).bfloat16()
    )
    out, state, window, corrections, key_gates = naive(kind, packed, starts, lengths)
    scratch = stock.Scratch.allocate(10, 256, torch.device("cpu"))
    stock.step(
        packed, scratch, 3, SPEC, query_start_loc=torch.tensor([*starts, 8], dtype=torch.int32)
    )
    # Rows 8 and 9 belong to no request.
    assert (packed.out[8:] == 3).all()
    torch.testing.assert_close(packed.out[:8].double(), out[:8], rtol=2e-2, atol=2e-2)
    assert not packed.out[3:5].any()
    torch.testing.assert_close(packed.state.double(), state, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed.conv_state.double(), window)
    if corrections is not None:
        torch.testing.assert_close(packed.corrections.double(), corrections, rtol=1e-3, atol=1e-3)
        assert torch.equal(packed.key_gates.double(), key_gates)


def test_an_absent_record_changes_no_record() -> None:
    problem = Problem("record", 2, 1, 2)
    operands = make_step(problem, seed=7, device="cpu")
    # Row -1 of the records would be row 0 of these.
    u, k = torch.full((3, 1, 2, 128), 5.0), torch.full((3, 1, 2, 256), 5.0).bfloat16()
    rows = torch.tensor([-1, 0], dtype=torch.int32)
    check(problem, replace(operands, record_rows=rows, corrections=u[1:], key_gates=k[1:]))
    assert (u[0] == 5).all()
    assert (k[0] == 5).all()


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (Problem("commit", 4, 3, 3, layers=2, pending="mix"), {"align": True, "inputs": "generic"}),
        (Problem("commit", 4, 1, 3, layers=2, state_dtype="bf16"), {"align": True}),
        (Problem("commit", 3, 2, 8, state_dtype="bf16", pending="mix"), {}),
        (Problem("flush", 5, 2, 5, layers=3, pending="mix"), {}),
    ],
    ids=lambda x: f"{x.kind}-{x.state_dtype}" if isinstance(x, Problem) else "",
)
def test_commit(problem: Problem, options: dict[str, object]) -> None:
    operands = make_commit(problem, seed=8, device="cpu", pad=16, null_requests=(1,), **options)
    if operands.boundary_length is not None:
        operands.boundary_length[0] = operands.length[0]
    for records in (*operands.corrections, *operands.key_gates):
        for row, n in zip(operands.record_rows.tolist(), operands.length.tolist(), strict=True):
            records[row, :, n:] = torch.nan
    expected = [reference.commit(operands, layer) for layer in range(problem.layers)]
    compare.poison(operands)
    stock.launch(stock.compile(problem, SPEC, GPU), operands, None)
    for layer in range(problem.layers):
        assert compare.check_commit(operands, expected[layer], layer) is None


@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
def test_roll_window(layout: str) -> None:
    windows = []
    for layer in range(2):
        window = torch.randn(9, 300, 6, generator=torch.Generator().manual_seed(layer)).bfloat16()
        windows.append(
            window if layout == "dim-first" else window.transpose(1, 2).contiguous().transpose(1, 2)
        )
    source = torch.tensor([1, 2, 0, 3, 4, 5], dtype=torch.int32)
    destination = torch.tensor([1, 6, 7, -1, 4, 5], dtype=torch.int32)
    length = torch.tensor([3, 2, 2, 2, 0, 1], dtype=torch.int32)
    boundary_length = torch.tensor([2, 1, 1, 1, 1, 2], dtype=torch.int32)
    boundary_slot = torch.tensor([7, 0, 8, 8, 8, 8], dtype=torch.int32)
    want = [window.clone() for window in windows]
    for window, old in zip(want, windows, strict=True):
        window[1, :, :3] = old[1, :, 2:5]
        window[7, :, :3] = old[1, :, 1:4]
        window[6, :, :3] = old[2, :, 1:4]
    table = address_table(tuple(windows))
    stock.roll_window(windows, table, source, length, destination, boundary_length, boundary_slot)
    for got, expected in zip(windows, want, strict=True):
        assert torch.equal(got, expected)


def test_eager_commit_equals_continuing_with_the_accepted_count() -> None:
    """record, commit and roll, then a step from offset 0; against spec, which starts at the
    accepted entry."""
    problem = Problem("record", 2, 1, 3)
    operands = make_step(problem, seed=9, device="cpu")
    stock.launch(stock.compile(problem, SPEC, GPU), operands, None)
    slots = operands.slots[:, 0].contiguous()
    accepted = torch.tensor([2, 3], dtype=torch.int32)
    before = operands.conv_state.clone()
    stock.roll_window(
        [operands.conv_state], address_table((operands.conv_state,)), slots, accepted, slots
    )
    for b in range(2):
        n = int(accepted[b])
        assert torch.equal(
            operands.conv_state[slots[b].long(), :, :3], before[slots[b].long(), :, n - 1 : n + 2]
        )


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int32])
def test_defer(dtype: torch.dtype | None) -> None:
    length = torch.tensor([3, 2, 4, 1, 0], dtype=torch.int32)
    pending = torch.full((6,), 9, dtype=torch.int32)
    rows = torch.tensor([5, 0, -1, 3, 2], dtype=torch.int32)
    slots = torch.tensor([[8], [7], [6], [0], [5]], dtype=torch.int32)
    eager = None if dtype is None else torch.tensor([0, 1, 0, 0, 0]).to(dtype)
    stock.defer(length, pending, rows, slots, eager)
    assert length.tolist() == [0, 0 if dtype is None else 2, 4, 1, 0]
    assert pending.tolist() == [2 if dtype is None else 0, 9, 0, 9, 9, 3]


def test_flush_plan() -> None:
    pending = torch.tensor([3, 9, -2, 1, 2], dtype=torch.int32)
    rows = torch.tensor([1, 2, 0, -1, 4], dtype=torch.int32)
    slots = torch.tensor([4, 3, 0, 2, 1], dtype=torch.int32)
    source, length, destination = (torch.full((5,), 77, dtype=torch.int32) for _ in range(3))
    stock.flush_plan(pending, rows, slots, source, length, destination, 4)
    assert length.tolist() == [4, 0, 0, 0, 2]
    assert source.tolist() == destination.tolist() == slots.tolist()
    assert pending.tolist() == [3, 9, -2, 1, 2]


def test_deferred_steps_equal_eager_ones() -> None:
    """record, defer, flush plan, fold and roll: the same checkpoint and window as an eager
    commit."""
    problem = Problem("record", 3, 1, 3)
    operands = make_step(problem, seed=10, device="cpu", null_requests=(1,))
    stock.launch(stock.compile(problem, SPEC, GPU), operands, None)
    accepted = torch.tensor([2, 1, 3], dtype=torch.int32)
    replayed = Problem("replay", 3, 1, 3, pending="mix")
    pending = torch.zeros(3, dtype=torch.int32)
    next_inputs = make_step(problem, seed=11, device="cpu").projected
    deferred = replace(operands, projected=next_inputs, pending=pending)
    slots = operands.slots[:, 0].contiguous()
    stock.defer(accepted, pending, operands.record_rows, slots)
    assert accepted.tolist() == [0, 1, 0]
    expected = reference.step(replayed, deferred)

    commit = make_commit(Problem("flush", 3, 1, 3), seed=0, device="cpu")
    plan = replace(
        commit, states=(operands.state,), corrections=(operands.corrections,), key_gates=(operands.key_gates,),
        state_table=address_table((operands.state,)), corrections_table=address_table((operands.corrections,)),
        key_gates_table=address_table((operands.key_gates,)), A_log=operands.A_log[None],
        dt_bias=operands.dt_bias.view(1, 1, 128), record_rows=operands.record_rows)  # fmt: skip
    stock.flush_plan(
        pending, operands.record_rows, slots, plan.source, plan.length, plan.destination, 3
    )
    stock.fold(plan, SPEC)
    stock.roll_window([operands.conv_state], address_table((operands.conv_state,)), plan.source, plan.length,
                      plan.destination)  # fmt: skip
    stock.launch(stock.compile(problem, SPEC, GPU), replace(operands, projected=next_inputs), None)
    assert compare.check_step(replayed, deferred, expected) is None


def test_launch_allocates_scratch_once() -> None:
    problem = Problem("decode", 2, 1)
    compiled = stock.compile(problem, SPEC, GPU)
    assert not compiled.scratch
    for seed in (0, 1):
        stock.launch(compiled, make_step(problem, seed=seed, device="cpu"), None)
        (scratch,) = compiled.scratch.values()
        if seed == 0:
            first = scratch
    assert scratch is first


def test_no_tokens_return_at_once() -> None:
    problem = Problem("record", 2, 1, 2)
    operands = make_step(problem, seed=0, device="cpu")
    before = operands.conv_state.clone()
    empty = replace(operands, projected=operands.projected[:0], out=operands.out[:0])
    stock.step(empty, stock.Scratch.allocate(0, 128, torch.device("cpu")), 2)
    assert torch.equal(operands.conv_state, before)


def strided(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("projected", lambda t: t[:5], "5 rows are not 3 requests x 2 tokens"),
        ("projected", lambda t: t[:, :600], "600 columns"),
        ("projected", lambda t: t.float(), "torch.float32 is not torch.bfloat16"),
        ("projected", strided, "not dense"),
        ("conv_weight", lambda t: t[:2], r"shape \[2, 4, 128\] is not \[3, 4, any\]"),
        ("conv_weight", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "not dense"),
        ("conv_bias", lambda t: t[:128], "shape"),
        ("conv_state", lambda t: t[..., :3], "3 entries"),
        ("conv_state", lambda t: t[:, :128], "shape"),
        ("conv_state", strided, "neither channels nor entries"),
        ("f_b", lambda t: t[:, :64], "shape"),
        ("A_log", lambda t: t.double(), "torch.float64"),
        ("dt_bias", lambda t: t[:100], "shape"),
        ("state", lambda t: t.transpose(2, 3), "not dense"),
        ("state", lambda t: t[:, :, :64], "shape"),
        ("slots", lambda t: t.long(), "torch.int64"),
        ("slots", lambda t: t[:2], "projected: 6 rows are not 2"),
        ("norm_weight", lambda t: t.bfloat16(), "torch.bfloat16 is not torch.float32"),
        ("out", lambda t: t[:4], "shape"),
        ("corrections", lambda t: t[:, :, :1], "a record holds 1 tokens, not 2"),
        ("corrections", lambda t: None, "go together"),
        ("key_gates", lambda t: t[..., :128], "shape"),
        ("record_rows", lambda t: t[:1], "shape"),
        ("pending", lambda t: torch.zeros(3, dtype=torch.int32), "replays nothing"),
        ("accepted", lambda t: torch.ones(3, dtype=torch.int32), "slots has 1 columns"),
    ],
)  # fmt: skip
def test_bad_operands_are_named(name: str, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    problem = Problem("record", 3, 1, 2)
    operands = make_step(problem, seed=0, device="cpu")
    bad = replace(operands, **{name: spoil(getattr(operands, name))})
    with pytest.raises(ValueError, match=message) as error:
        stock.step(bad, stock.Scratch.allocate(6, 128, torch.device("cpu")), 2)
    if name in (
        "conv_weight",
        "conv_state",
        "f_b",
        "A_log",
        "dt_bias",
        "state",
        "norm_weight",
        "key_gates",
        "pending",
    ):
        assert str(error.value).startswith(name)


def test_ragged_capacity() -> None:
    operands = make_step(Problem("record", 3, 1, 2), seed=0, device="cpu")
    with pytest.raises(ValueError, match="exceed the capacity of 2 requests x 2 tokens"):
        stock.step(
            replace(operands, slots=operands.slots[:2]), stock.Scratch.allocate(6, 128, torch.device("cpu")), 2,
            query_start_loc=torch.tensor([0, 2, 4], dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda o: {"states": o.states[:0]}, "no layers"),
        (lambda o: {"states": (o.states[0], o.states[1].bfloat16())}, "states: torch.bfloat16"),
        (lambda o: {"key_gates": o.key_gates[:1]}, "key_gates: 1 layers"),
        (lambda o: {"boundary_length": o.length}, "go together"),
        (lambda o: {"state_table": o.state_table[:1]}, "state_table"),
        (lambda o: {"length": o.length.long()}, "length: torch.int64"),
        (lambda o: {"A_log": o.A_log[:1]}, "A_log"),
        (lambda o: {"lower_bound": 0.5}, "negative"),
        (lambda o: {"states": tuple(torch.zeros(7, 16384 + 8)[:, :16384].view(7, 1, 128, 128) for _ in range(2))},
         "multiples of 16"),
    ],
)  # fmt: skip
def test_bad_commits_are_named(changes, message: str) -> None:  # type: ignore[no-untyped-def]
    operands = make_commit(Problem("commit", 3, 1, 2, layers=2), seed=0, device="cpu")
    with pytest.raises(ValueError, match=message):
        stock.fold(replace(operands, **changes(operands)))


def test_launch_takes_the_operands_of_its_kind() -> None:
    decode = make_step(Problem("decode", 1, 1), seed=0, device="cpu")
    with pytest.raises(ValueError, match="kind commit does not take StepOperands"):
        stock.launch(stock.compile(Problem("commit", 1, 1, 2), SPEC, GPU), decode, None)
    with pytest.raises(ValueError, match="stream=7"):
        stock.launch(stock.compile(Problem("decode", 1, 1), SPEC, GPU), decode, 7)


@pytest.mark.parametrize(
    ("problem", "options", "reason"),
    [
        (Problem("replay", 1, 1, 2, pending=1), stock.Options(), "kind replay"),
        (Problem("decode", 1, 1), stock.Options(value_tile=24), "value_tile=24"),
        (Problem("decode", 1, 1), stock.Options(num_warps=3), "num_warps=3"),
        (
            Problem("decode", 1, 1),
            stock.Options(value_tile=128, num_warps=1),
            "elements per thread",
        ),
    ],
)
def test_unsupported(problem: Problem, options: stock.Options, reason: str) -> None:
    assert reason in (stock.unsupported(problem, options, GPU) or "")
    with pytest.raises(ValueError, match=reason):
        stock.compile(problem, options, GPU)


@pytest.mark.parametrize("kind", ["decode", "spec", "record", "commit", "flush"])
def test_supported(kind: str) -> None:
    assert (
        stock.unsupported(Problem(kind, 3, 2, 1 if kind == "decode" else 8), stock.Options(), GPU)
        is None
    )


CROSS_COMPILE = """
import sys
import torch, triton
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from kda_kernels import stock
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import address_table, make_commit, make_step
from kda_kernels.problem import Problem
from support.naive import naive

class Driver:
    # All that Triton asks of a driver in order to compile.
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
launch, compiled = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    compiled.append(kernel.metadata.name)
    assert kernel.metadata.shared <= 8192, (kernel.metadata.name, kernel.metadata.shared)
    assert ".local" not in kernel.asm["ptx"], kernel.metadata.name

JITFunction.run = compile_only
gpu = Gpu("sm_90a", 132)
for problem in (Problem("decode", 1, 1), Problem("spec", 2, 1, 3, state_dtype="bf16"),
                Problem("record", 2, 2, 4, conv_layout="window-major")):
    operands = make_step(problem, seed=0, device="cpu", lower_bound=None if problem.kind == "spec" else -5.0)
    stock.launch(stock.compile(problem, stock.Options(), gpu), operands, None)
starts = torch.tensor([0, 4, 6], dtype=torch.int32)
stock.step(operands, stock.Scratch.allocate(8, 256, torch.device("cpu")), 4, query_start_loc=starts)
for align in (False, True):
    commit = make_commit(Problem("commit", 2, 1, 3, state_dtype="bf16" if align else "fp32"), seed=0, device="cpu",
                         align=align)
    stock.fold(commit)
    window = (operands.conv_state,)
    stock.roll_window(window, address_table(window), commit.source, commit.length, commit.destination,
                      commit.boundary_length, commit.boundary_slot)
stock.defer(commit.length, commit.source, commit.record_rows, commit.source, starts[:2] > 0)
stock.flush_plan(commit.source, commit.record_rows, commit.source, commit.source, commit.length, commit.destination, 3)
print(*sorted(set(compiled)))
"""


@pytest.mark.parametrize("arch", [90, 100])
def test_every_kernel_compiles_without_a_gpu(arch: int) -> None:
    """Through the real calls, so that each kernel's specializations are those of its launches."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(
        [*map(str, (root, root / "kernels", root / "tests")), environment.get("PYTHONPATH", "")]
    )
    run = subprocess.run([sys.executable, "-c", CROSS_COMPILE, str(arch)], env=environment, capture_output=True,
                         text=True, timeout=300)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["stock_convolution", "stock_defer", "stock_flush_plan", "stock_fold", "stock_norm",
                                  "stock_roll_window", "stock_verify"]  # fmt: skip
