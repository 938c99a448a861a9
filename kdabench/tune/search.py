"""Search of schedules by Optuna, ask-and-tell: a study per cell and variant, a trial per candidate.

Every study lives in one SQLite file, so a search can be killed anywhere and goes on where it was,
and Optuna's dashboard can show it. A trial races its candidate against the study's best so far, in
one small contest; its value is the best's time multiplied by the ratio found, so that drift between
trials cancels. In the end the best of each study are measured again, interleaved with the variant's
default, in fresh processes.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from kdabench.data.measurements import Candidate, Cell
from kdabench.measure.contest import Contest, Plan, log_ratio_interval
from kdabench.measure.locks import hold
from kdabench.tune.heats import Bench, Heat
from kdabench.tune.sampler import Kind, PointSampler, taken
from kdabench.tune.space import Space, apart, cell_title
from kdabench.tune.transfer import Transfer

WARM_STARTS = 3
"""Neighbouring cells whose winners are tried, at most."""
_DIGEST = 8  # characters of the space's digest in a study's name
_ROUNDS = 1_000_000  # above any round's index


@dataclass(frozen=True)
class Task:
    """What one study is about."""

    cell: Cell
    space: Space

    @cached_property
    def name(self) -> str:
        """Of the study. Another space is another study."""
        return f"{self.space.variant} {cell_title(self.cell)} [{self.space.digest[:_DIGEST]}]"


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    trials       of each study, at most
    share        of a space's points, at most
    prune        a candidate this many times slower than the best after its first round is pruned
    warm         what wins in the nearest cells is tried before the sampler is asked
    finalists    best candidates of a study that are measured again
    processes    fresh processes for that
    """

    trials: int = 50
    sampler: Kind = "transfer"
    seed: int = 0
    prune: float = 1.5
    warm: bool = False
    finalists: int = 3
    processes: int = 3
    share: float = 1.0

    def limit(self, space: Space) -> int:
        """Trials of a study; one at least."""
        return min(self.trials, max(1, int(self.share * len(space.points))))

    @property
    def plan(self) -> Plan:
        """Of a trial's contest."""
        return Plan(max_rounds=20, hopeless=self.prune, sentinel=False)


@dataclass(frozen=True)
class SearchEvent:
    """Progress. done and total count trials, of all studies; `best` and time_us are those of the
    study."""

    kind: Literal["plan", "trial"]
    done: int
    total: int
    task: Task | None = None
    best: Candidate | None = None
    time_us: float | None = None


SearchListener = Callable[[SearchEvent], None]


@dataclass(frozen=True)
class StudyVerdict:
    """A study's winner in the re-measurement, against the default.

    gain, low, high   log of the default's time over the winner's, and its confidence interval; None
                      without a default
    verdict  faster or slower than the default by more than the tie band, same: by less; unclear;
             default: it won itself
    """

    winner: Candidate
    time_us: float
    default_us: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Literal["faster", "slower", "same", "unclear", "default", "alone"] = "alone"


@dataclass
class StudyOutcome:
    """A study as it stands. `verdict` is None before the re-measurement, and if nothing worked."""

    task: Task
    trials: list[FrozenTrial]
    verdict: StudyVerdict | None = None

    def count(self, state: TrialState) -> int:
        return sum(t.state == state for t in self.trials)

    @property
    def finished(self) -> list[FrozenTrial]:
        return [t for t in self.trials if t.state.is_finished()]

    @property
    def best(self) -> FrozenTrial | None:
        return best_of(self.trials)

    @property
    def readings(self) -> int:
        return sum(t.user_attrs.get("heat", {}).get("readings", 0) for t in self.trials)

    def best_so_far(self) -> list[float]:
        """After each finished trial the lowest value; inf before the first."""
        path, best = [], float("inf")
        for trial in self.finished:
            if trial.state == TrialState.COMPLETE and trial.value is not None:
                best = min(best, trial.value)
            path.append(best)
        return path


@dataclass
class SearchSummary:
    """What a search came to, so far."""

    storage: str
    outcomes: list[StudyOutcome] = field(default_factory=list)
    interrupted: bool = False

    @property
    def without_winner(self) -> list[Task]:
        """Studies in which every candidate that was tried failed."""
        return [o.task for o in self.outcomes if o.finished and o.best is None]


def best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The completed trial of lowest value, of equal ones the first."""
    done = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None]
    return min(done, key=lambda t: (t.value, t.number), default=None)


def value_of(trial: FrozenTrial) -> float | None:
    """Microseconds; of a pruned trial those of its first round. None if it has no time."""
    if trial.state == TrialState.PRUNED:
        return trial.intermediate_values.get(0)
    return trial.value if trial.state == TrialState.COMPLETE else None


class _Connection(sqlite3.Connection):
    """Commits survive a kill of the process, as ever, but do not wait for the disk one by one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.execute("PRAGMA journal_mode=WAL")
        self.execute("PRAGMA synchronous=NORMAL")


@contextmanager
def open_storage(path: Path) -> Iterator[RDBStorage]:
    """Optuna's storage in a SQLite file, with one writer. Raises JournalBusy."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = hold(path)
    try:
        storage = RDBStorage(f"sqlite:///{path}", {"connect_args": {"factory": _Connection}})
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    finally:
        os.close(lock)


def run(
    tasks: Sequence[Task],
    bench: Bench,
    storage: BaseStorage,
    options: SearchOptions,
    *,
    budget_s: float | None = None,
    listener: SearchListener = lambda event: None,
    where: str = "",
) -> SearchSummary:
    """Search all that is left of `tasks`, then measure the best again. After KeyboardInterrupt:
    what there is.

    All studies have their first trial before any has its second. budget_s: no trial begins after
    this many seconds; the re-measurement comes on top.
    """
    summary = SearchSummary(where)
    deadline = None if budget_s is None else time.monotonic() + budget_s
    try:
        searches = _searches(tasks, bench, storage, options)
        summary.outcomes = [search.outcome for search in searches]
        progress = _TrialCount(searches, listener)
        for round_ in range(max((search.limit for search in searches), default=0)):
            for search in searches:
                if search.finished > round_ or search.finished >= search.limit:
                    continue
                if deadline is not None and time.monotonic() >= deadline:
                    break
                search.step(_neighbours(search.task, summary.outcomes) if options.warm else [])
                progress.trial(search.outcome)
        _confirm(searches, bench, options)
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary


class _TrialCount:
    """Counts finished trials and tells the listener."""

    def __init__(self, searches: Sequence[_Search], listener: SearchListener) -> None:
        self._listener = listener
        self._done = sum(search.finished for search in searches)
        self._total = sum(max(search.limit, search.finished) for search in searches)
        listener(SearchEvent("plan", self._done, self._total))

    def trial(self, outcome: StudyOutcome) -> None:
        self._done += 1
        best = outcome.best
        candidate = None if best is None else candidate_of(outcome.task.space, best)
        value = None if best is None else best.value
        self._listener(
            SearchEvent("trial", self._done, self._total, outcome.task, candidate, value)
        )


def _searches(
    tasks: Sequence[Task], bench: Bench, storage: BaseStorage, options: SearchOptions
) -> list[_Search]:
    found = []
    for variant in dict.fromkeys(task.space.variant for task in tasks):
        ours = [task for task in tasks if task.space.variant == variant]
        model = Transfer([task.cell for task in ours], [task.space for task in ours])
        found += [
            _Search(task, bench, storage, options, model, place) for place, task in enumerate(ours)
        ]
    return found


def candidate_of(space: Space, trial: FrozenTrial) -> Candidate:
    place = space.place(trial.params)
    assert place is not None, f"{trial.params} is no point of the study's space"
    return space.points[place].candidate


def _neighbours(task: Task, outcomes: Sequence[StudyOutcome]) -> list[int]:
    """Places in the task's space of what won in the nearest cells, the nearest first."""
    found: list[tuple[float, int]] = []
    for outcome in outcomes:
        distance, best = apart(task.cell, outcome.task.cell), outcome.best
        if (
            outcome.task.space.variant == task.space.variant
            and distance is not None
            and best is not None
        ):
            place = task.space.place_of(candidate_of(outcome.task.space, best))
            if place is not None:
                found.append((distance, place))
    return list(dict.fromkeys(place for _, place in sorted(found)))[:WARM_STARTS]


class _Search:
    """One study. What a killed search was at is queued again as it is opened.

    model, place  of the variant over all cells, and this study's cell in it
    """

    def __init__(
        self,
        task: Task,
        bench: Bench,
        storage: BaseStorage,
        options: SearchOptions,
        model: Transfer,
        place: int,
    ) -> None:
        self.task, self._bench, self._options = task, bench, options
        self._model, self._place = model, place
        space = task.space
        sampler = PointSampler(
            space, options.sampler, options.seed, lambda places: model.pick(place, places)
        )
        self.study = optuna.create_study(
            storage=storage, study_name=task.name, sampler=sampler, load_if_exists=True
        )
        fixed = {
            name: value
            for name, value in space.points[0].options.items()
            if name not in space.values
        }
        for name, value in {"cell": task.cell.key, "the same in all": fixed}.items():
            if self.study.user_attrs.get(name) != value:
                self.study.set_user_attr(name, value)
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        self.outcome = StudyOutcome(task, [])
        self._refresh()

    def _refresh(self) -> None:
        self.outcome.trials = self.study.get_trials(deepcopy=False)
        found = {
            self.task.space.place(t.params): value
            for t in self.outcome.trials
            if (value := value_of(t))
        }
        self._model.tell(
            self._place, {place: value for place, value in found.items() if place is not None}
        )

    @property
    def finished(self) -> int:
        return len(self.outcome.finished)

    @property
    def limit(self) -> int:
        return self._options.limit(self.task.space)

    def step(self, first: Sequence[int]) -> None:
        """One more trial: what is queued, else the first of some places that was not taken, else
        what is sampled."""
        space, trials = self.task.space, self.outcome.trials
        if not any(t.state == TrialState.WAITING for t in trials):
            untaken = [place for place in first if place not in taken(space, trials)]
            if untaken:
                self.study.enqueue_trial(dict(space.params[untaken[0]]))
        self._measure(self.study.ask(space.distributions), self.outcome.best)
        self._refresh()

    def _measure(self, trial: Trial, best: FrozenTrial | None) -> None:
        place = self.task.space.place(trial.params)
        assert place is not None
        candidate = self.task.space.points[place].candidate
        reference = None if best is None else candidate_of(self.task.space, best)
        heat = self._bench.heat(
            self.task.cell,
            [candidate] if reference is None else [candidate, reference],
            self._options.plan,
        )
        trial.set_user_attr("heat", _facts(candidate, reference, heat))
        if candidate in heat.failed:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        if best is None or reference is None or reference in heat.failed:
            value = heat.time_us(candidate)
        else:
            value = (best.value or 0.0) * heat.ratio(candidate, reference)
        left = heat.contest.left.get(candidate)
        if left is not None and left.why == "hopeless":
            trial.report(value, 0)
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, value)

    def again(self, process: int, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """The samples of one process of the re-measurement, measured unless they are kept."""
        key, names = f"measured again {process}", [str(c) for c in candidates]
        kept: dict[str, Any] | None = self.study.user_attrs.get(key)
        if kept is None or kept["candidates"] != names:
            heat = self._bench.heat(self.task.cell, candidates, Plan(), process)
            contest = heat.contest
            timed = [
                c if c in contest.samples and c not in heat.failed else None for c in candidates
            ]
            kept = {
                "candidates": names,
                "samples_us": [[] if c is None else contest.samples[c] for c in timed],
                "rounds": [[] if c is None else contest.rounds[c] for c in timed],
            }
            self.study.set_user_attr(key, kept)
        return kept


def _facts(candidate: Candidate, reference: Candidate | None, heat: Heat) -> dict[str, Any]:
    left = heat.contest.left.get(candidate)
    status, reason = heat.failed.get(candidate, ("ok", None if left is None else str(left)))
    facts: dict[str, Any] = {
        "candidate": str(candidate),
        "status": status,
        "reason": reason,
        "readings": heat.readings,
        "samples_us": heat.contest.samples.get(candidate, []),
    }
    if reference is not None:
        facts |= {"against": str(reference), "against_us": heat.contest.samples.get(reference, [])}
    return facts


def _confirm(searches: Sequence[_Search], bench: Bench, options: SearchOptions) -> None:
    """Measure each study's best again, interleaved with the default, in fresh processes; then
    judge."""
    entrants = [_finalists(search.outcome, options) for search in searches]
    samples: list[list[dict[str, Any]]] = [[] for _ in searches]
    for process in range(options.processes):
        bench.fresh()
        for search, candidates, kept in zip(searches, entrants, samples, strict=True):
            if candidates:
                kept.append(search.again(process, candidates))
    for search, candidates, kept in zip(searches, entrants, samples, strict=True):
        default = search.task.space.default
        search.outcome.verdict = _judge(
            candidates, kept, None if default is None else default.candidate
        )


def _finalists(outcome: StudyOutcome, options: SearchOptions) -> list[Candidate]:
    """The best candidates of a study, best first, and last the default unless it is one of them or
    failed."""
    space = outcome.task.space
    done = [t for t in outcome.trials if t.state == TrialState.COMPLETE and t.value is not None]
    best = sorted(done, key=lambda t: (t.value, t.number))[: options.finalists]
    found = [candidate_of(space, trial) for trial in best]
    failed = {candidate_of(space, t) for t in outcome.trials if t.state == TrialState.FAIL}
    if found and space.default is not None and space.default.candidate not in {*found, *failed}:
        found.append(space.default.candidate)
    return found


def _judge(
    candidates: Sequence[Candidate],
    processes: Sequence[Mapping[str, Any]],
    default: Candidate | None,
) -> StudyVerdict | None:
    """The fastest over all processes against the default."""
    pooled = Contest({c: [] for c in candidates}, {c: [] for c in candidates})
    for number, process in enumerate(processes):
        for candidate, samples, rounds in zip(
            candidates, process["samples_us"], process["rounds"], strict=True
        ):
            pooled.samples[candidate] += samples
            pooled.rounds[candidate] += [number * _ROUNDS + index for index in rounds]
    timed = [c for c in candidates if pooled.samples[c]]
    if not timed:
        return None
    winner = pooled.fastest(timed)
    if default not in timed:
        return StudyVerdict(winner, pooled.time_us(winner))
    if winner == default:
        return StudyVerdict(
            winner, pooled.time_us(winner), pooled.time_us(winner), 0.0, verdict="default"
        )
    plan = Plan()
    low, high = log_ratio_interval(pooled, default, winner, plan.z)
    gain = math.log(pooled.time_us(default) / pooled.time_us(winner))
    known = math.isfinite(low)
    if known:
        gain = (low + high) / 2
    verdict: Literal["faster", "slower", "same", "unclear"] = "unclear"
    if low > plan.tie or (not known and gain > math.log(plan.hopeless)):
        verdict = "faster"
    elif high < -plan.tie:
        verdict = "slower"
    elif -plan.tie < low and high < plan.tie:
        verdict = "same"
    ends = (low, high) if known else (None, None)
    return StudyVerdict(
        winner, pooled.time_us(winner), pooled.time_us(default), gain, ends[0], ends[1], verdict
    )
