"""The dispatcher without a GPU: choices, messages, reloads; stock interpreted, CuTe launches
recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_kernels import arguments, stock, variants
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, make_commit, make_step
from kda_kernels.policies import nvidia_h200
from kda_kernels.problem import Problem
from kda_kernels.serving import prepared
from kda_kernels.serving.commits import CommitContext
from kda_kernels.serving.layer import Caches, LayerWeights
from kda_kernels.serving.prepared import Choice, DefaultPolicy, PreparedKda
from kda_kernels.variants import commit, split

H200 = Gpu("sm_90a", 132)
cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton runs compiled here: see test_gpu_prepared.py"
)


class Only(DefaultPolicy):
    """A policy that ranks the given choices."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = choices

    def ranked(self, *step: object, streamable: bool = True) -> tuple[Choice, ...]:
        return self.choices


STOCK = Only(Choice("stock", {"pdl": False, "value_tile": 64}))


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Binaries are compiled here, not taken from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_KERNELS_CACHE", str(tmp_path_factory.mktemp("cubin")))
        yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    variants.compile_once.cache_clear()
    prepared._warned.clear()
    yield
    variants.compile_once.cache_clear()


def layer(o: StepOperands) -> LayerWeights:
    """The weights of operands as a model keeps them."""
    weight = o.conv_weight.transpose(1, 2).reshape(-1, 1, 4).contiguous()
    return LayerWeights(
        weight,
        o.conv_bias,
        o.f_b,
        o.A_log.view(1, 1, -1, 1),
        o.dt_bias,
        o.norm_weight.bfloat16(),
        o.lower_bound,
    )


def caches(o: StepOperands) -> Caches:
    return Caches(o.state, o.conv_state, o.corrections, o.key_gates, o.record_rows)


def rounded(o: StepOperands) -> StepOperands:
    """With a norm weight that BF16 holds."""
    return replace(o, norm_weight=o.norm_weight.bfloat16().float())


def meta(
    heads: int, tokens: int = 8, requests: int = 32, records: bool = True, **changes: Any
) -> Caches:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    made = Caches(
        empty(9, heads, 128, 128), empty(9, 384 * heads, tokens + 2, dtype=torch.bfloat16)
    )
    if records:
        made = replace(
            made,
            corrections=empty(9, heads, tokens, 128),
            key_gates=empty(9, heads, tokens, 256, dtype=torch.bfloat16),
            record_rows=empty(requests, dtype=torch.int32),
        )
    return replace(made, **changes)


def make(heads: int = 2, table: Any = None, **options: Any) -> PreparedKda:
    weights = layer(make_step(Problem("decode", 1, heads), seed=0, device="cpu"))
    layout = options.pop("conv_layout", "dim-first")
    pitch = Problem("decode", 1, heads).pitch
    return PreparedKda(
        replace(weights, **options), table or {4: (pitch, None), (4, 3): (pitch, None)}, layout
    )


@pytest.mark.parametrize("records", [True, False])
def test_prepare_takes_the_policys_choice(records: bool) -> None:
    pitch = Problem("decode", 1, 12).pitch
    keys = (1, 8, (2, 4), (32, 8))
    kda = make(12, dict.fromkeys(keys, (pitch, None)))
    rows = kda.prepare(meta(12, records=records), H200, nvidia_h200)
    assert [row.key for row in rows] == list(keys)
    for row in rows:
        requests, tokens = row.key if isinstance(row.key, tuple) else (row.key, 1)
        kind = "decode" if tokens == 1 else "record" if records else "spec"
        choice = nvidia_h200.choose(12, requests, tokens, kind)
        assert row.variant == choice.variant
        assert dict(choice.options).items() <= row.options.items()
        assert row.options["window"] == 10
        assert nvidia_h200.explain(12, requests, tokens, kind).rule in row.reason
        step = kda._steps[row.key]
        assert isinstance(step.compiled, variants.load(row.variant).Compiled)
        assert (step.compiled.binary.arch, step.compiled.plan.kind, step.compiled.plan.tokens) == (
            "sm_90a", kind, tokens,
        )  # fmt: skip
        assert step.unchained.pdl is False
        assert step.unchained.binary is step.compiled.binary


def test_layers_share_what_is_compiled() -> None:
    one, two = make(), make()
    for kda in (one, two):
        kda.prepare(meta(2), H200, DefaultPolicy())
    assert one._steps[4].compiled is two._steps[4].compiled


def test_the_tables_of_a_policy_are_taken_as_they_are() -> None:
    kda = make(
        6,
        {
            key: found
            for key, found in nvidia_h200.POLICIES[6].items()
            if key in ((2, 1), (12, 1), (12, 4))
        },
    )
    rows = kda.prepare(meta(6), H200, nvidia_h200)
    assert [row.key for row in rows] == [2, 12, (12, 4)]
    assert [row.options["gate_mode"] for row in rows] == [
        nvidia_h200.POLICIES[6][k][1] for k in ((2, 1), (12, 1), (12, 4))
    ]


def test_gate_mode_of_the_key_overrides_the_policys() -> None:
    kda = make(2, {4: (1168, 1), (4, 3): (1168, 0)})
    rows = kda.prepare(meta(2), H200, DefaultPolicy())
    assert [row.options["gate_mode"] for row in rows] == [1, 0]


def test_falls_through_what_is_unsupported() -> None:
    policy = Only(
        Choice("KdaNext", {}),
        Choice("KdaWS", {"gate_mode": 2}),
        Choice("KdaSplit", {"split": 3}),
        Choice("KdaSplit", {"split": 2, "threads": 128}),
        Choice("stock", {"pdl": False}),
    )
    kda = make(2, {4: (1168, None)})
    (row,) = kda.prepare(meta(2), H200, policy)
    assert (row.variant, row.options["split"]) == ("KdaSplit", 2)
    for part in (
        "KdaNext: not in",
        "KdaWS: gate_mode=2",
        "KdaSplit: split=3 is not",
        "default (",
    ):
        assert part in row.reason
    with pytest.raises(
        ValueError, match=r"key 4: no variant takes it; KdaNext: not in this version"
    ):
        kda.prepare(meta(2), H200, Only(policy.choices[0]))
    assert list(kda._steps) == [4]  # a failed call changes nothing


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"lower_bound": None}, {}, "the gate is unbounded"),
        ({}, {"conv_state": torch.empty(9, 768, 10, device="meta")}, "window is torch.float32"),
    ],
)
def test_what_only_stock_takes(
    options: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    rows = make(2, **options).prepare(meta(2, **changes), H200, DefaultPolicy())
    assert {row.variant for row in rows} == {"stock"}
    assert all(reason in row.reason for row in rows)


@pytest.mark.parametrize(
    ("entries", "pitch", "major", "streamable"),
    [
        (10, 1168, False, True),
        (17, 1168, False, False),
        (10, 1170, False, False),
        (17, 1168, True, True),
    ],
)
def test_streamable(entries: int, pitch: int, major: bool, streamable: bool) -> None:
    window = torch.empty(9, entries, 768, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    if not major:
        window = window.contiguous()
    kda = make(2, {4: (pitch, None)}, conv_layout="window-major" if major else "dim-first")
    (row,) = kda.prepare(meta(2, conv_state=window), H200, DefaultPolicy())
    assert row.options["streamable"] is streamable
    assert row.options["window"] == (entries if streamable and not major else None)


def test_a_variant_that_needs_a_streamable_step() -> None:
    policy = Only(Choice("KdaWS", {}), Choice("stock", {}))
    assert make(2, {4: (1168, None)}).prepare(meta(2), H200, policy)[0].variant == "KdaWS"
    (row,) = make(2, {4: (1170, None)}).prepare(meta(2), H200, policy)
    assert (row.variant, "KdaWS: the step is not streamable" in row.reason) == ("stock", True)


def test_a_gate_that_one_variant_cannot_compute_is_another_ones(recorder: Recorder) -> None:
    """It was refused by `launch` alone: `prepare` took KdaWide, and each `run` raised."""
    policy = Only(
        Choice("KdaWide", {"form": "chunked"}), Choice("KdaSplit", {"split": 2, "threads": 128})
    )
    problem = Problem("record", 96, 2, 8, lower_bound=-8.0)
    o = make_step(problem, seed=1, device="cpu")
    assert o.lower_bound == -8.0
    kda = PreparedKda(layer(o), {(96, 8): (problem.pitch, None)})
    (row,) = kda.prepare(caches(o), H200, policy)
    assert row.variant == "KdaSplit"
    assert "KdaWide: lower_bound=-8.0 is too low for 8 tokens" in row.reason
    kda.run(o.projected, o.out, caches(o), o.slots, tokens=8, stream=7)
    ((_, operands, _),) = recorder.launches
    assert operands.lower_bound == -8.0
    mild = replace(o, lower_bound=-5.0)
    (row,) = PreparedKda(layer(mild), {(96, 8): (problem.pitch, None)}).prepare(
        caches(mild), H200, policy
    )
    assert row.variant == "KdaWide"


def test_every_variant_is_asked_with_the_bound_of_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = variants.load, []

    def stand_in(name: str) -> Any:
        def unsupported(problem: Problem, options: Any, gpu: Gpu) -> str | None:
            asked.append((name, problem.lower_bound))
            return None if name == "stock" else "not today"

        return SimpleNamespace(
            Options=real(name).Options, unsupported=unsupported, compile=real(name).compile
        )

    monkeypatch.setattr(variants, "load", stand_in)
    policy = Only(*(Choice(name, {}) for name in ("KdaWS", "KdaSplit", "stock")))
    for bound in (-8.0, None):
        (row,) = make(2, {4: (1168, None)}, lower_bound=bound).prepare(meta(2), H200, policy)
        assert row.variant == "stock"
    assert asked == [
        (name, bound) for bound in (-8.0, None) for name in ("KdaWS", "KdaSplit", "stock")
    ]


def test_one_warning_without_a_policy_for_the_device() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kda in (make(), make()):
            rows = kda.prepare(meta(2), H200)
            assert {(row.variant, row.options["split"]) for row in rows} == {("KdaSplit", 1)}
    assert [str(w.message) for w in caught] == [
        "no policy for an unnamed device (sm_90a, 132 SMs): KdaSplit's default schedule serves all steps"
    ]
    assert caught[0].filename.endswith("test_prepared.py")


def test_the_policy_of_a_device_is_found() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared.find_policy(H200, "NVIDIA H200") is nvidia_h200
    with pytest.warns(UserWarning, match=r"no policy for NVIDIA H100 \(sm_90a, 132 SMs\)"):
        assert isinstance(prepared.find_policy(H200, "NVIDIA H100"), DefaultPolicy)
    with pytest.warns(UserWarning, match="sm_103a"):
        prepared.find_policy(Gpu("sm_103a", 132), "NVIDIA H200")


def test_a_reload_refills_in_place() -> None:
    kda = make()
    derived: list[Any] = [kda._conv_weight, kda._conv_bias, kda._norm_weight]
    before = [(t.data_ptr(), t.clone()) for t in derived]
    for tensor in (kda.weights.conv_weight, kda.weights.conv_bias, kda.weights.norm_weight):
        tensor.add_(1)
    kda.process_weights_after_loading()
    for (address, old), tensor, now in zip(
        before, derived, (kda._conv_weight, kda._conv_bias, kda._norm_weight), strict=True
    ):
        assert now is tensor
        assert now.data_ptr() == address
        assert not torch.equal(now, old)
    assert torch.equal(kda._conv_weight, kda.weights.conv_weight.view(3, 256, 4).transpose(1, 2))
    assert kda._norm_weight.dtype == torch.float32


def test_bf16_weights_stay_bf16_only_together() -> None:
    kda = make()
    both = replace(kda.weights, conv_weight=kda.weights.conv_weight.bfloat16())
    assert PreparedKda(both, {4: (1168, None)})._conv_weight.dtype == torch.float32
    both = replace(both, conv_bias=None)
    kda = PreparedKda(both, {4: (1168, None)})
    assert kda._conv_weight.dtype == torch.bfloat16
    assert kda.prepare(meta(2), H200, DefaultPolicy())[0].options["conv_weight_dtype"] == "bf16"


PENDING = torch.empty(9, dtype=torch.int32, device="meta")
BF16_STATE = torch.empty(9, 2, 128, 128, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: make(2, {4: (1153, None)}),
            "key 4: row pitch 1153 is below the 1154 columns used",
        ),
        (lambda: make(2, {(4, 9): (1168, None)}), "tokens=9"),
        (lambda: make(2, {4: (1168, 0), (4, 1): (1168, 1)}), r"key \(4, 1\): given twice"),
        (lambda: make(2, f_b=torch.zeros(128, 128)), "f_b: shape"),
        (lambda: make(2, conv_weight=torch.zeros(768, 4)), "conv_weight"),
        (
            lambda: make().prepare(meta(2, pending=torch.zeros(9)), H200, STOCK),
            "pending: torch.float32 is not",
        ),
        (
            lambda: make().prepare(meta(2, pending=PENDING[:4]), H200, STOCK),
            "pending: 4 entries for 9 record rows",
        ),
        (
            lambda: make().prepare(meta(2, records=False, pending=PENDING), H200, STOCK),
            "only where records are kept",
        ),
        (
            lambda: make().prepare(meta(2, state=BF16_STATE, pending=PENDING), H200, STOCK),
            "only with an FP32 state",
        ),
        (
            lambda: make(lower_bound=None).prepare(meta(2, pending=PENDING), H200, STOCK),
            "and a bounded gate",
        ),
        (lambda: make().prepare(meta(2, key_gates=None), H200, STOCK), "go together"),
        (
            lambda: make().prepare(meta(2, tokens=2), H200, STOCK),
            "conv_state: 4 entries; 3 tokens need 5",
        ),
        (
            lambda: make().prepare(meta(2, requests=3), H200, STOCK),
            r"records: 8 tokens, 3 rows; the keys need 3, 4",
        ),
        (lambda: make().prepare(meta(3), H200, STOCK), "state: shape"),
        (
            lambda: make(conv_layout="window-major").prepare(meta(2), H200, STOCK),
            "are not window-major",
        ),
    ],
)
def test_what_is_refused(change: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


PROBLEMS = [
    Problem("decode", 3, 2),
    Problem("spec", 3, 2, 2),
    Problem("record", 3, 2, 3, conv_layout="window-major"),
]


@cpu_only
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.kind)
@pytest.mark.parametrize("sliced", [False, True])
def test_stock_end_to_end(problem: Problem, sliced: bool) -> None:
    o = rounded(make_step(problem, seed=1, device="cpu", null_requests=(1,)))
    key = (problem.requests, problem.tokens) if problem.tokens > 1 else problem.requests
    kda = PreparedKda(layer(o), {key: (problem.pitch, None)}, problem.conv_layout)
    assert [row.variant for row in kda.prepare(caches(o), H200, STOCK)] == ["stock"]
    scratch = kda._steps[key].compiled.scratch
    before = dict(scratch)
    assert len(before) == 1
    slots = o.slots
    if sliced:
        table = torch.full((problem.requests, 7), -3, dtype=torch.int32)
        columns = slots.view(problem.requests, -1)
        table[:, 2 : 2 + columns.shape[1]] = columns
        slots = table[:, 2 : 2 + columns.shape[1]]
        slots = slots[:, 0] if problem.kind != "spec" else slots
        assert not slots.is_contiguous()
    expected = reference.step(problem, o)
    compare.poison(o)
    kda.run(o.projected, o.out, caches(o), slots, o.accepted, problem.tokens)
    assert compare.check_step(problem, o, expected) is None
    assert scratch == before


class Recorder(SimpleNamespace):
    """Stands in for a CuTe variant's module: the real choices, and launches written down."""

    def __init__(self, module: Any) -> None:
        self.launches: list[tuple[Any, Any, Any]] = []
        super().__init__(
            Options=module.Options,
            unsupported=module.unsupported,
            compile=module.compile,
            launch=lambda *arguments: self.launches.append(arguments),
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    real, made = variants.load, Recorder(split)
    monkeypatch.setattr(variants, "load", lambda name: made if name == "KdaSplit" else real(name))
    return made


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.kind)
def test_launches_of_the_cute_path(problem: Problem, recorder: Recorder) -> None:
    o = make_step(problem, seed=1, device="cpu")
    key = (problem.requests, problem.tokens) if problem.tokens > 1 else problem.requests
    kda = PreparedKda(
        layer(o), {key: (problem.pitch, None), 9: (problem.pitch, None)}, problem.conv_layout
    )
    made = caches(o)
    if made.record_rows is not None:
        made = replace(
            made, record_rows=torch.cat((made.record_rows, torch.full((6,), -1, dtype=torch.int32)))
        )
    kda.prepare(made, H200, Only(Choice("KdaSplit", {"pdl": True})))
    kda.run(o.projected, o.out, made, o.slots, o.accepted, problem.tokens, stream=7)
    ((compiled, operands, stream),) = recorder.launches
    step = kda._steps[key]
    assert compiled is step.compiled
    assert compiled.pdl
    assert stream == 7
    for name in ("projected", "out", "state", "conv_state", "slots", "f_b", "dt_bias", "A_log", "accepted",
                 "corrections", "key_gates"):  # fmt: skip
        mine, theirs = getattr(operands, name), getattr(o, name)
        assert (mine is None) is (theirs is None)
        assert mine is None or (mine.data_ptr(), mine.shape) == (theirs.data_ptr(), theirs.shape)
    assert torch.equal(operands.conv_weight, o.conv_weight)
    assert operands.conv_weight is kda._conv_weight
    assert operands.norm_weight is kda._norm_weight
    if made.record_rows is not None:
        assert operands.record_rows.data_ptr() == made.record_rows.data_ptr()
        assert operands.record_rows.shape == (3,)
    arguments.check("KdaSplit", compiled.plan, operands)  # what the kernel itself asks for
    table = torch.zeros(problem.requests, 12, dtype=torch.int32)
    columns = o.slots.view(problem.requests, -1)
    view = table[:, : columns.shape[1]]
    view.copy_(columns)
    kda.run(o.projected, o.out, made, view, o.accepted, problem.tokens, stream=8)
    compiled, operands, stream = recorder.launches[1]
    # With PDL the kernel could read its slots before the copy is visible.
    assert compiled is step.unchained
    assert not compiled.pdl
    assert operands.slots is step.slots
    assert torch.equal(operands.slots, o.slots)
    assert stream == 8


FLUSHING = Only(Choice("stock", {"value_tile": 64}, True))


Deferring = tuple[Problem, StepOperands, PreparedKda, Caches]


@pytest.fixture
def deferring(monkeypatch: pytest.MonkeyPatch) -> Deferring:
    """A layer with tokens pending, prepared to flush them by stock."""
    monkeypatch.setattr(commit, "unsupported", lambda *_: "not today")
    tokens = 3
    problem = Problem("replay", 4, 2, tokens, pending="mix")
    o = rounded(make_step(problem, seed=2, device="cpu", null_requests=(1,)))
    kda = PreparedKda(layer(o), {(4, tokens): (problem.pitch, None), 4: (problem.pitch, None)})
    made = replace(caches(o), pending=o.pending)
    assert [row.flush for row in kda.prepare(made, H200, FLUSHING)] == [True, True]
    return problem, o, kda, made


@cpu_only
def test_a_verify_that_flushes_equals_a_replay(deferring: Deferring) -> None:
    problem, o, kda, made = deferring
    expected = reference.step(problem, o)
    compare.poison(o)
    kda.run(o.projected, o.out, made, o.slots, tokens=3)
    assert compare.check_step(problem, o, expected) is None
    assert o.pending is not None
    assert int(o.pending.sum()) == sum(n for b, n in enumerate(problem.pending_counts) if b != 1)


@cpu_only
def test_a_decode_flushes_first(deferring: Deferring) -> None:
    problem, o, kda, made = deferring
    folded = reference.step(problem, o)
    decode, rows = Problem("decode", 4, 2), o.projected[:4].contiguous()
    out = torch.empty(4, 256, dtype=torch.bfloat16)
    window = o.conv_state.clone()
    for b, n in enumerate(problem.pending_counts):
        if b != 1 and n:
            slot = o.slots[b, 0]
            window[slot, :, :3] = o.conv_state[slot, :, n - 1 : n + 2]
    step = replace(
        o, projected=rows, out=out, slots=o.slots[:, 0], state=folded.state.float(), conv_state=window,
        corrections=None, key_gates=None, record_rows=None, pending=None,
    )  # fmt: skip
    expected = reference.step(decode, step)
    kda.run(rows, out, made, o.slots[:, 0])
    assert (
        compare.check_step(decode, replace(step, state=o.state, conv_state=o.conv_state), expected)
        is None
    )


@cpu_only
def test_nothing_is_flushed_where_nothing_is_pending(deferring: Deferring) -> None:
    problem, o, kda, made = deferring
    record = Problem("record", 4, 2, problem.tokens)
    plain = replace(o, pending=None)
    expected = reference.step(record, plain)
    kda.run(o.projected, o.out, made, o.slots, tokens=3, deferred=False)
    assert compare.check_step(record, plain, expected) is None


def test_other_caches_than_those_prepared(deferring: Deferring) -> None:
    _, o, kda, made = deferring
    with pytest.raises(ValueError, match="states are not those"):
        kda.run(o.projected, o.out, replace(made, state=o.state.clone()), o.slots, tokens=3)
    with pytest.raises(ValueError, match="pending is missing"):
        kda.run(o.projected, o.out, replace(made, pending=None), o.slots, tokens=3)


def test_a_key_that_was_not_prepared(recorder: Recorder) -> None:
    kda = make()
    o = make_step(Problem("decode", 4, 2), seed=0, device="cpu")
    with pytest.raises(KeyError, match="key 4 was not prepared; prepared: none"):
        kda.run(o.projected, o.out, caches(o), o.slots)
    kda.prepare(meta(2), H200, DefaultPolicy())
    with pytest.raises(KeyError, match=r"key 3 was not prepared; prepared: 4, \(4, 3\)"):
        kda.run(o.projected, o.out, caches(o), o.slots[:3])
    with pytest.raises(KeyError, match=r"key \(4, 2\) was not prepared"):
        kda.run(o.projected, o.out, caches(o), o.slots, tokens=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": torch.zeros(4, 1184, dtype=torch.bfloat16)}, "row pitch 1184 is not the 1168 of key 4"),
        ({"projected": torch.zeros(3, 1168, dtype=torch.bfloat16)}, r"\(3, 1168\) is not \[4, >= 1154\]"),
        ({"out": torch.zeros(4, 128, dtype=torch.bfloat16)}, "out: shape"),
        ({"slots": torch.ones(4)}, "slots: torch.float32"),
        ({"slots": torch.ones(4, 2, dtype=torch.int32)}, r"slots: torch.int32 \(4, 2\) is not int32 \(4,\)"),
        ({"slots": torch.ones(4, dtype=torch.int32, device="meta")}, "slots: on meta, but key 4 was prepared on cpu"),
        ({"accepted": torch.ones(4, dtype=torch.int32)}, "accepted: given for key 4, kind decode"),
        ({"slots": torch.ones(4, dtype=torch.int32), "tokens": 3, "caches": meta(2, records=False),
          "projected": torch.zeros(12, 1168, dtype=torch.bfloat16), "out": torch.zeros(12, 256, dtype=torch.bfloat16)},
         r"caches: key \(4, 3\) was prepared with records"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(change: dict[str, Any], message: str, recorder: Recorder) -> None:
    kda = make()
    o = make_step(Problem("decode", 4, 2), seed=0, device="cpu")
    made = meta(2)
    kda.prepare(replace(made, state=torch.empty(9, 2, 128, 128)), H200, DefaultPolicy())
    call: dict[str, Any] = {
        "projected": o.projected,
        "out": o.out,
        "caches": made,
        "slots": o.slots,
    }
    with pytest.raises(ValueError, match=message):
        kda.run(**(call | change))
    assert recorder.launches == []


def committed(layers: int = 2, align: bool = False, **sizes: Any) -> Any:
    problem = Problem(
        "commit",
        **{"requests": 3, "heads": 2, "tokens": 3, "layers": layers, "pending": "mix", **sizes},
    )
    o = make_commit(problem, seed=3, device="cpu", align=align, null_requests=(1,))
    heads = problem.heads
    weights = [
        replace(make(heads).weights, A_log=A.clone(), dt_bias=bias.reshape(-1).clone())
        for A, bias in zip(o.A_log, o.dt_bias, strict=True)
    ]
    window = torch.zeros(1, 384 * heads, 5, dtype=torch.bfloat16)
    kept = [
        Caches(s, window, c, k, o.record_rows)
        for s, c, k in zip(o.states, o.corrections, o.key_gates, strict=True)
    ]
    return o, weights, kept


@cpu_only
@pytest.mark.parametrize("align", [False, True])
def test_commits_of_all_layers_by_stock(align: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "unsupported", lambda *_: "not today")
    o, weights, kept = committed(align=align)
    context = CommitContext(weights, kept, H200, align)
    expected = [reference.commit(o, index) for index in range(2)]
    compare.poison(o)
    context.commit(
        o.source, o.length, o.destination, o.record_rows, o.boundary_length, o.boundary_slot
    )
    for index in range(2):
        assert compare.check_commit(o, expected[index], index) is None
    weights[1].A_log.add_(1)
    address = context._operands.A_log.data_ptr()
    context.process_weights_after_loading()
    assert context._operands.A_log.data_ptr() == address
    assert torch.equal(context._operands.A_log[1], o.A_log[1] + 1)


@pytest.mark.parametrize(
    ("layers", "requests", "source"),
    [(2, 3, "registers"), (2, 101, "bulk"), (2, 1101, "ring"), (2, 0, None)],
)
def test_the_form_of_a_commit_goes_by_pages(
    layers: int, requests: int, source: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(commit, "launch", lambda *arguments: launches.append(arguments))
    o, weights, kept = committed(layers)
    context = CommitContext(weights, kept, H200)
    plan = [torch.zeros(requests, dtype=torch.int32) for _ in range(4)]
    source_slots, length, destination, rows = plan
    context.commit(source_slots, length, destination, rows, stream=5)
    if source is None:
        assert launches == []
        return
    ((compiled, operands, stream),) = launches
    assert (compiled.options.source, compiled.options.align, stream) == (source, False, 5)
    assert [operands.source, operands.length, operands.destination, operands.record_rows] == plan
    assert torch.equal(operands.state_table, o.state_table)
    assert torch.equal(operands.key_gates_table, o.key_gates_table)
    assert torch.equal(operands.A_log, o.A_log)
    assert torch.equal(operands.dt_bias, o.dt_bias)


def test_commits_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "launch", lambda *_: pytest.fail("launched"))
    _, weights, kept = committed()
    plain = CommitContext(weights, kept, H200)
    plan: Any = [torch.zeros(3, dtype=torch.int32) for _ in range(6)]
    with pytest.raises(ValueError, match="boundary_length: given"):
        plain.commit(*plan)
    with pytest.raises(ValueError, match="boundary_length: missing"):
        CommitContext(weights, kept, H200, align=True).commit(*plan[:4])
    with pytest.raises(ValueError, match="length: strides"):
        plain.commit(plan[0], torch.zeros(6, dtype=torch.int32)[::2], *plan[2:4])
    with pytest.raises(ValueError, match=r"destination: torch\.int64"):
        plain.commit(plan[0], plan[1], plan[2].long(), plan[3])
    for change, message in (
        ((weights[:1], kept), "1 weights and 2 caches"),
        (([weights[0], replace(weights[1], lower_bound=None)], kept), "lower_bound"),
        ((weights, [kept[0], replace(kept[1], corrections=None)]), "keeps no records"),
        ((weights, [kept[0], replace(kept[1], state=kept[1].state.bfloat16())]), "layers differ"),
    ):
        with pytest.raises(ValueError, match=message):
            CommitContext(change[0], change[1], H200)


def test_stock_serves_commits_only_where_the_kernel_cannot() -> None:
    _, weights, kept = committed()
    assert all(module is commit for _, module, _ in CommitContext(weights, kept, H200)._forms)
    assert stock.Options() == prepared._options_of("stock", {"pdl": False}, {"window": 3})
    with pytest.raises(ValueError, match="stock has no option 'pdl'"):
        prepared._options_of("stock", {"pdl": True}, {})
