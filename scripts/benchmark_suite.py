#!/usr/bin/env python3
"""Measure the figures that the suite itself must reach (docs/measuring.md, "How good is it").

.venv/bin/python scripts/benchmark_suite.py COMMAND

Without a GPU:
    import      seconds of `import kdabench` and `kdabench --help`
    resume      seconds of the second run of a finished sweep, on recorded samples
    pipeline    seconds of fit, emit and plots of 100 000 records, and whether two runs give the
                same bytes
    kill        rounds lost in 1000 kills of a writer, and with the journal's log cut at each byte
                of its last round
    power       false verdicts and missed differences of 2 %, on recorded samples
With one, each within 90 s:
    twins       false verdicts and missed differences of 2 %, measured
    cupti       times of graphs by events against CUPTI's
    faults      a sweep with planted faults against a clean one: blame, and the other cells
    hang        seconds that a spinning kernel costs a sweep
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from kdabench.data import measurements  # noqa: E402
from kdabench.data.measurements import Candidate, Cell, Measurement  # noqa: E402
from kdabench.measure.clock import Clock, Reading  # noqa: E402
from kdabench.measure.contest import Contest, Plan, run_contest  # noqa: E402
from kdabench.measure.journal import Journal  # noqa: E402

EFFECT = 1.02
LEAST_US = 5.0


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def python(*arguments: str, cwd: Path = ROOT) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


# --- without a GPU ---


def imports(args: argparse.Namespace) -> None:
    for what in (("-c", "import kdabench"), ("-m", "kdabench", "--help")):
        best = min(seconds(lambda what=what: python(*what)) for _ in range(args.times))
        bare = min(seconds(lambda: python("-c", "pass")) for _ in range(args.times))
        print(f"{' '.join(what)}: {best:.3f} s, of these {bare:.3f} s the interpreter itself")


def resume(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as out:
        command = (
            "-m",
            "kdabench",
            "sweep",
            str(args.sweep),
            "--device",
            args.device,
            "--out",
            out,
        )
        print(f"first run of {args.sweep}: {seconds(lambda: python(*command)):.2f} s")
        print(f"second: {seconds(lambda: python(*command)):.2f} s")


def pipeline(args: argparse.Namespace) -> None:
    import synthetic

    cells = [
        Cell(kind, requests, heads, tokens)
        for kind, tokens in (
            ("decode", 1),
            ("spec", 4),
            ("record", 2),
            ("record", 4),
            ("record", 8),
        )
        for heads in (6, 12, 24, 32, 48, 64, 96)
        for requests in sorted({round(2 ** (i / 10)) for i in range(81)})
    ]
    made = list(
        synthetic.measurements(
            cells, processes=math.ceil(args.measurements / len(cells) / len(synthetic.CANDIDATES))
        )
    )
    made = made[: args.measurements]
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "dispatch.jsonl"
        measurements.dump(made, source)
        (Path(folder) / "env.json").write_text(json.dumps(synthetic.ENVS))
        print(f"{len(made)} records, {source.stat().st_size / 1e6:.0f} MB")
        for number in range(2):
            out = Path(folder) / str(number)
            begin, cpu = time.perf_counter(), time.process_time()
            first = begin, cpu
            for step, done in _pipeline(source, out):
                digests.add((step, hashlib.sha256(done).hexdigest()))
                print(
                    f"  {step}: {time.perf_counter() - begin:.2f} s, {time.process_time() - cpu:.2f} s of CPU"
                )
                begin, cpu = time.perf_counter(), time.process_time()
            print(
                f"  together: {begin - first[0]:.2f} s, {cpu - first[1]:.2f} s of CPU", flush=True
            )
    print(
        "byte-identical"
        if len({step for step, _ in digests}) == len(digests)
        else "the two runs differ"
    )


def _pipeline(source: Path, out: Path) -> Iterator[tuple[str, bytes]]:
    from kdabench.policy import emit, fit
    from kdabench.review import plot

    rows = measurements.load([source])
    yield "load", str(len(rows)).encode()
    policy, evidence = fit.fit(rows, measurements.load_envs([source]))
    yield "fit", json.dumps(evidence.to_json(), sort_keys=True, default=str).encode()
    text = emit.emit(policy, evidence)
    yield "emit", text.encode()
    written = plot.write_plots(
        rows, out, device="SYNTHETIC ONE", sms=100, policy=emit.load(text), recorded=False
    )
    yield "plots", b"".join(path.read_bytes() for path in sorted(written))


def kill(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "killed.db"
        chance, acknowledged, lost = random.Random(args.seed), -1, 0
        for _ in range(args.times):
            acknowledged = max(acknowledged, _killed_writer(path, chance.uniform(0, 0.02)))
            with Journal.open(path, "sha256:0", "?") as journal:
                upcoming = journal.history(CELL, 0)[1]
            lost += max(0, acknowledged + 1 - upcoming)
        print(
            f"{args.times} kills: {upcoming} rounds written, {lost} acknowledged rounds lost, no repair by hand"
        )
        _cut(Path(folder), args.step)


CELL = Cell("decode", 1, 12)
CANDIDATES = [Candidate.of("KdaSplit", {"split": n}) for n in (1, 2, 4)]


def _killed_writer(path: Path, after_s: float) -> int:
    """Fork a process that writes rounds, kill it, and return the last round that it said was kept;
    -1: none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with Journal.open(path, "sha256:0", "?") as journal:
            index = journal.history(CELL, 0)[1]
            while True:
                journal.add_round(
                    CELL, 0, index, [(c, 1.0 + index, 1980, False) for c in CANDIDATES]
                )
                os.write(writer, b"%d\n" % index)
                index += 1
    os.close(writer)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        told = pipe.read().rpartition("\n")[0].splitlines()
    return int(told[-1]) if told else -1


def _cut(folder: Path, step: int) -> None:
    path, whole = folder / "cut.db", folder / "whole.db"
    log = path.with_name("cut.db-wal")
    with Journal.open(path, "sha256:0", "?") as journal:
        for index in range(3):
            journal.add_round(CELL, 0, index, [(CANDIDATES[0], 1.0 + index, None, None)])
        before = log.stat().st_size
        journal.add_round(CELL, 0, 3, [(CANDIDATES[0], 4.0, None, None)])
        content = log.read_bytes()
        shutil.copy(path, whole)
    wrong = 0
    places = range(before, len(content) + 1, step)
    for at in places:
        shutil.copy(whole, path)
        log.write_bytes(content[:at])
        path.with_name("cut.db-shm").unlink(missing_ok=True)
        with Journal.open(path, "sha256:0", "?") as journal:
            wrong += journal.history(CELL, 0)[1] != (4 if at == len(content) else 3)
    print(
        f"log cut at {len(places)} places in its last {len(content) - before} bytes: {wrong} with another result"
    )


class Noise:
    """Two candidates and their truth, with the noise of a recorded pair: its own size, the shape of
    all pairs'."""

    def __init__(
        self, size: float, shape: Sequence[float], truth: Mapping[Candidate, float], seed: int
    ) -> None:
        self._size, self._shape, self._truth = size, shape, truth
        self._random = random.Random(seed)

    def begin_round(self, index: int) -> None:
        pass

    def read(self, candidate: Candidate) -> Reading:
        # Half of a pair's variance for each of the two.
        error = self._size * self._random.choice(self._shape) / math.sqrt(2)
        return Reading(self._truth[candidate] * math.exp(error))


def recorded_noise(
    rows: Sequence[Measurement],
) -> tuple[list[tuple[Cell, float, float]], list[float]]:
    """(cell, us, standard deviation of the log ratio of two readings in a round) of each recorded
    pair of a candidate with the fastest; and the errors of all pairs with 10 rounds or more in
    standard deviations."""
    shares: dict[tuple[Cell, int], list[Measurement]] = {}
    for row in rows:
        if row.status == "ok" and len(set(row.rounds)) >= 5:
            shares.setdefault((row.cell, row.process), []).append(row)
    pairs, shape = [], []
    for (cell, _), found in shares.items():
        best = min(found, key=lambda row: median(row.samples_us))
        times = dict(zip(best.rounds, best.samples_us, strict=True))
        for row in found:
            ours = dict(zip(row.rounds, row.samples_us, strict=True))
            ratios = [math.log(us / times[i]) for i, us in ours.items() if i in times]
            if row is best or len(ratios) < 5:
                continue
            size = stdev(ratios)
            pairs.append((cell, median(best.samples_us), size))
            if len(ratios) >= 10 and size > 0:
                center, scale = fmean(ratios), size * math.sqrt(1 - 1 / len(ratios))
                shape += [(ratio - center) / scale for ratio in ratios]
    return pairs, shape


def power(args: argparse.Namespace) -> None:
    """A/A and +2 % contests with the noise of what was recorded, by context and heads."""
    for name in args.files:
        pairs, shape = recorded_noise(measurements.load([args.results / name]))
        random.Random(args.seed).shuffle(pairs)
        groups: dict[tuple[str, str], list[tuple[float, bool, bool]]] = {}
        for number, (cell, us, size) in enumerate(pairs[: args.times]):
            make = partial(Noise, size, shape)
            verdicts = _verdicts(make, number)
            for heads in ("all", f"{cell.heads} heads"):
                groups.setdefault((cell.context, heads), []).append((us, *verdicts))
        for (context, heads), rows in sorted(groups.items()):
            report(f"{name}, {context}, {heads}", rows)


Verdicts = tuple[bool, bool]


def _verdicts(make: Callable[[dict[Candidate, float], int], Clock], seed: int) -> Verdicts:
    """Whether a contest finds two different that are the same, and one slower that is so by 2 %."""
    one, other = CANDIDATES[:2]
    plan = Plan(seconds=math.inf, seed=seed, sentinel=False)
    same = run_contest([one, other], make({one: 1.0, other: 1.0}, seed), plan)
    slower = run_contest([one, other], make({one: 1.0, other: EFFECT}, seed), plan)
    return bool(same.left), _found(slower, other)


def _found(contest: Contest, slower: Candidate) -> bool:
    left = contest.left.get(slower)
    return left is not None and left.why in ("settled", "hopeless")


def report(
    title: str, rows: Sequence[tuple[float, bool, bool]], differences: Sequence[float] = ()
) -> None:
    false = sum(same for _, same, _ in rows)
    large = [found for us, _, found in rows if us >= LEAST_US]
    line = f"{title}: {len(rows)} cells, {false} false verdicts ({false / max(1, len(rows)):.1%})"
    if large:
        line += f"; +2 % found in {sum(large)} of {len(large)} at >= {LEAST_US:g} us ({sum(large) / len(large):.1%})"
    if differences:
        line += f"; median |difference| {median(map(abs, differences)):.2%}"
    print(line, flush=True)


# --- with a GPU ---


class Scaled:
    """A clock on which one candidate takes longer by a factor."""

    def __init__(self, clock: Clock, slower: Candidate, factor: float) -> None:
        self._clock, self._slower, self._factor = clock, slower, factor

    def begin_round(self, index: int) -> None:
        self._clock.begin_round(index)

    def read(self, candidate: Candidate) -> Reading:
        reading = self._clock.read(candidate)
        factor = self._factor if candidate == self._slower else 1.0
        return Reading(reading.time_us * factor, reading.sm_clock_mhz, reading.throttled)


def _cells(context: Any) -> list[Cell]:
    steps = (("decode", 1), ("record", 4), ("spec", 4))
    sizes = ((12, 1), (12, 8), (12, 32), (12, 128), (96, 4), (96, 64))
    return [
        Cell(kind, requests, heads, tokens, context=context)
        for heads, requests in sizes
        for kind, tokens in steps
    ]  # type: ignore[arg-type]


def twins(args: argparse.Namespace) -> None:
    """The same kernel under two names, each with a graph of its own; then with one of them called 2
    % slower."""
    import planted

    real, twin = planted.REAL["KdaSplit"], planted.candidate("Twin")
    end = time.monotonic() + args.seconds
    for context in ("isolated", "layer"):
        rows: list[tuple[float, bool, bool]] = []
        differences = []
        half = time.monotonic() + (end - time.monotonic()) / (2 if context == "isolated" else 1)
        for number, cell in enumerate(_cells(context)):
            if time.monotonic() > half:
                print(f"out of time after {number} cells")
                break
            ready = planted.make_bench(cell)
            for candidate in (real, twin):
                ready.prepare(candidate, *ready.compile(candidate))
            clock = ready.clock(lambda candidate: None, 0.9)
            for seed in range(args.times):
                plan = Plan(seed=1000 * number + seed, sentinel=False)
                same = run_contest([real, twin], clock, plan)
                slower = run_contest([real, twin], Scaled(clock, twin, EFFECT), plan)
                us = same.time_us(real)
                rows.append((us, bool(same.left), _found(slower, twin)))
                differences.append(math.log(same.time_us(twin) / us))
        report(context, rows, differences)


def cupti(args: argparse.Namespace) -> None:
    """Per launch: by events around a graph replay, and from CUPTI's first begin to its last end of the
    same graph."""
    import planted
    import torch

    print(f"{'cell':42} {'events us':>10} {'CUPTI us':>10} {'ratio':>7} {'kernels us':>10}")
    worst = 1.0
    for cell in _cells("isolated"):
        ready = planted.make_bench(cell)
        real = planted.REAL["KdaSplit"]
        ready.prepare(real, *ready.compile(real))
        timed = ready.graphs[real]
        clock = ready.clock(lambda candidate: None, 0.9)
        clock.begin_round(0)
        events_us = median(clock.read(real).time_us for _ in range(args.times))
        spans, busy = [], []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(args.times):
                with torch.cuda.stream(ready.stream):
                    timed.graph.replay()
                torch.cuda.synchronize()
        kernels = sorted((e.start_ns(), e.duration_ns()) for e in profiler.profiler.kineto_results.events()
                         if "kda_" in e.name())  # fmt: skip
        per = timed.launches
        if len(kernels) != per * args.times:
            print(f"{cell.key}: CUPTI saw {len(kernels)} kernels of {per * args.times}")
            continue
        for first in range(0, len(kernels), per):
            some = kernels[first : first + per]
            spans.append((some[-1][0] + some[-1][1] - some[0][0]) / per / 1e3)
            busy.append(sum(length for _, length in some) / per / 1e3)
        ratio = events_us / median(spans)
        if events_us >= LEAST_US:
            worst = max(worst, ratio, 1 / ratio)
        name = f"{cell.kind} q={cell.tokens} H={cell.heads} R={cell.requests}"
        print(
            f"{name:42} {events_us:10.3f} {median(spans):10.3f} {ratio:7.4f} {median(busy):10.3f}",
            flush=True,
        )
    print(f"largest disagreement at >= {LEAST_US:g} us: {worst - 1:.2%}")


FAULTS = {
    8: ("OutOfBounds", "fault"),
    16: ("Spins", "timeout"),
    32: ("WritesNothing", "wrong"),
    64: ("Aborts", "fault"),
}
"""Requests of the cell, the fault that is planted there, and the status it must get."""


def faults(args: argparse.Namespace) -> None:
    """All faults in one sweep, each in a cell of its own, against a sweep without them."""
    import planted

    spread_out = [planted.candidate(name, requests) for requests, (name, _) in FAULTS.items()]
    results, _ = _sweeps({"clean": [], "faulty": spread_out}, args.limit)
    _judge_faults(results["clean"], results["faulty"])


def hang(args: argparse.Namespace) -> None:
    """What one spinning kernel costs a sweep."""
    import planted

    _, took = _sweeps({"clean": [], "hang": [planted.candidate("Spins", 16)]}, args.limit)
    more = took["hang"] - took["clean"]
    print(
        f"a hang under a limit of {args.limit:g} s costs {more:.1f} s: {more - args.limit:.1f} s beyond its limit"
    )


def _sweeps(
    planted_ones: Mapping[str, Sequence[Candidate]], limit_s: float
) -> tuple[dict[str, list[Measurement]], dict[str, float]]:
    """Records and seconds of sweeps over the same cells, with other candidates beside the real
    ones."""
    import planted

    from kdabench.measure import worker_process

    worker_process.LIMITS_S["check"] = limit_s
    cells = [Cell("decode", requests, 12, context="isolated") for requests in (4, *FAULTS, 128)]
    results, took = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in planted_ones.items():
            out = Path(folder) / name
            out.mkdir()
            begin = time.perf_counter()
            results[name] = planted.sweep(cells, [*planted.REAL.values(), *more], out)
            took[name] = time.perf_counter() - begin
            print(f"{name}: {took[name]:.1f} s", flush=True)
    return results, took


def _judge_faults(clean: Sequence[Measurement], faulty: Sequence[Measurement]) -> None:
    wanted = dict(FAULTS.values())
    found = {r.candidate.variant: (r.status, r.reason) for r in faulty if r.candidate.variant in wanted
             and r.status != "unsupported"}  # fmt: skip
    for variant, (status, reason) in found.items():
        print(
            f"  {variant}: {status}{'' if status == wanted[variant] else f', not {wanted[variant]}'}: {reason}"
        )
    missing = wanted.keys() - found.keys()
    others = Counter(r.status for r in faulty if r.candidate.variant not in wanted)
    print(
        f"blame right: {not missing and all(found[v][0] == wanted[v] for v in wanted)}; the others: {dict(others)}"
    )
    before = {(r.cell, r.candidate): r for r in clean}
    ratios = [
        median(r.samples_us) / median(before[r.cell, r.candidate].samples_us)
        for r in faulty
        if r.candidate.variant not in wanted and r.samples_us
    ]
    spread = sorted(abs(math.log(ratio)) for ratio in ratios)
    print(f"others against the clean sweep: {len(ratios)} medians, |difference| {median(spread):.2%} in the middle, "
          f"{spread[-1]:.2%} at most")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], **options: Any) -> None:
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        for option, default in options.items():
            given = {"nargs": "*"} if isinstance(default, list) else {}
            kind = type(default[0] if isinstance(default, list) else default)
            sub.add_argument(f"--{option}", type=kind, default=default, **given)

    command("import", imports, times=5)
    command("resume", resume, sweep=Path("sweeps/dispatch.toml"), device="recorded:nvidia-h200")
    command("pipeline", pipeline, measurements=100_000)
    command("kill", kill, times=1000, seed=1, step=1, folder=tempfile.gettempdir())
    results = ROOT / "results" / "nvidia-h200"
    command(
        "power",
        power,
        results=results,
        files=["dispatch.jsonl", "targets.jsonl"],
        times=2000,
        seed=1,
    )
    command("twins", twins, times=8, seconds=75.0)
    command("cupti", cupti, times=15)
    command("faults", faults, limit=10.0)
    command("hang", hang, limit=10.0)
    args = parser.parse_args()
    os.environ.setdefault("KDABENCH_LOCKS", tempfile.gettempdir())
    args.run(args)


if __name__ == "__main__":
    main()
