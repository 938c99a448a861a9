"""One process's share of a cell: attempts until every candidate has an outcome, and the blame for
those that cost a worker.

The worker is replaced after a hang, a crash or a lost CUDA context; what it was doing at that
moment gets the blame and is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from kdabench.data.measurements import Candidate, Cell, Status
from kdabench.data.sweep import Sweep
from kdabench.measure.contest import twin_verdict, twins
from kdabench.measure.journal import Journal
from kdabench.measure.messages import CellDone, Job, Message, Outcome, Phase, RoundDone
from kdabench.measure.session import Work
from kdabench.measure.slot import Slot
from kdabench.measure.worker_process import WorkerLostError

_RULED_OUT = 1.15  # a settled loser this far behind the best isn't measured by later processes


@dataclass(frozen=True)
class _Trouble:
    """A worker was lost: what was seen, and who was busy if that is known."""

    status: Status
    reason: str
    candidate: Candidate | None
    env: str
    phase: Phase | None = None


@dataclass(frozen=True)
class Share:
    """One process's share of a cell, to be measured by the worker in the slot."""

    cell: Cell
    process: int
    work: Work
    slot: Slot

    def measure(self) -> None:
        """Bring every candidate to an outcome. A lost worker costs the one that loses it alone."""
        journal = self.work.journal
        entrants = _entrants(self.cell, self.process, self.work.sweep, journal)
        retried = False
        while True:
            candidates = self._open(entrants)
            trouble = self._attempt(candidates) if candidates else None
            if trouble is None:
                break
            self.work.tally.note(f"{trouble.reason}: {trouble.candidate or self.cell.key}")
            journal.forget_rounds(self.cell, self.process)
            if trouble.candidate is None and not retried:
                retried = True  # perhaps what an earlier cell left behind
                continue
            for guilty, proof in self._guilty(trouble, candidates).items():
                self._keep(guilty, proof.status, proof.reason, proof.env or trouble.env)
        journal.finish_cell(self.cell, self.process)
        self._report()

    def _open(self, entrants: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The entrants that have not failed so far."""
        outcomes = self.work.journal.outcomes(self.cell, self.process)
        failed = {r.candidate for r in outcomes if r.status != "ok"}
        return tuple(c for c in entrants if c not in failed)

    def _report(self) -> None:
        good = [
            r
            for r in self.work.journal.outcomes(self.cell, self.process)
            if r.status == "ok" and r.samples_us
        ]
        for measurement in good:
            verdict = twin_verdict(twins(measurement), self.work.plan)
            if verdict not in (None, "same"):
                self.work.tally.note(
                    f"{self.cell.key}: {measurement.candidate} was found {verdict} than itself"
                )
        self.work.tally.cell(self.cell, self.process, {r.candidate: r.samples_us for r in good})

    def _attempt(self, candidates: tuple[Candidate, ...]) -> _Trouble | None:
        """Measure and keep. None if all is told; else the worker is gone."""
        journal = self.work.journal
        history, first_round = journal.readings(self.cell, self.process)
        plan = replace(self.work.plan, seed=self.process)
        told = set[Candidate]()

        def keep(message: Message, env: str) -> None:
            if isinstance(message, RoundDone):
                keep_round(journal, self.cell, self.process, message)
            elif isinstance(message, Outcome):
                told.add(message.candidate)
                self._keep(message.candidate, message.status, message.reason, env, message)

        trouble = self._run(Job(self.cell, candidates, plan, history, first_round), keep)
        if trouble is None:
            for candidate in set(candidates) - told:
                env = journal.add_env(self.slot.get().env)
                self._keep(candidate, "fault", "the worker told nothing about it", env)
        return trouble

    def _run(self, job: Job, keep: Callable[[Message, str], None]) -> _Trouble | None:
        """Follow a job to its end. A fault that takes the CUDA context with it is trouble, and not
        kept."""
        active = self.slot.get()
        env = self.work.journal.add_env(active.env)
        fault: Outcome | None = None
        try:
            active.send(job)
            while not isinstance(message := active.receive(), CellDone):
                if isinstance(message, Outcome) and message.status == "fault":
                    if fault is not None:
                        keep(fault, env)
                    fault = message
                else:
                    keep(message, env)
        except WorkerLostError as lost:
            self.slot.drop()
            return _Trouble(lost.status, lost.reason, lost.began.candidate, env, lost.began.phase)
        if message.sticky:
            self.slot.drop()
            reason = "the CUDA context was lost" if fault is None else fault.reason or ""
            return _Trouble("fault", reason, None if fault is None else fault.candidate, env)
        if fault is not None:
            keep(fault, env)
        return None

    def _guilty(
        self, trouble: _Trouble, candidates: Sequence[Candidate]
    ) -> dict[Candidate, _Trouble]:
        """Whom to blame. A fault is proven by running a suspect alone in a fresh worker; a hang is
        not paid twice."""
        busy = trouble.candidate
        if busy is None:
            return dict.fromkeys(candidates, trouble)
        if trouble.status == "timeout" or trouble.phase == "compile" or len(candidates) == 1:
            return {busy: trouble}
        alone = self._alone(busy)
        if alone is not None:
            return {busy: alone}
        others = {
            c: proof for c in candidates if c != busy and (proof := self._alone(c)) is not None
        }
        note = f"{trouble.reason}; not when it was tried alone"
        return others or {busy: replace(trouble, reason=note)}

    def _alone(self, candidate: Candidate) -> _Trouble | None:
        """What goes wrong with a candidate that nothing ran before, or None."""
        self.slot.drop()
        once = replace(self.work.plan, min_rounds=1, max_rounds=1, sentinel=False)
        failed: list[_Trouble] = []

        def keep(message: Message, env: str) -> None:
            if isinstance(message, Outcome) and message.status != "ok":
                failed.append(_Trouble(message.status, message.reason or "", candidate, env))

        trouble = self._run(Job(self.cell, (candidate,), once), keep)
        return trouble or next(iter(failed), None)

    def _keep(
        self,
        candidate: Candidate,
        status: Status,
        reason: str | None,
        env: str,
        told: Outcome | None = None,
    ) -> None:
        self.work.journal.set_outcome(
            self.cell,
            self.process,
            candidate,
            status,
            reason,
            told.unique_bytes if told else 0,
            self.cell.problem.bytes_moved,
            told.code if told else "",
            env,
            dict(told.info) if told else {},
        )


def keep_round(journal: Journal, cell: Cell, process: int, done: RoundDone) -> None:
    """Write a complete round to the journal."""
    taken = [(c, x.time_us, x.sm_clock_mhz, x.throttled) for c, x in done.readings]
    journal.add_round(cell, process, done.index, taken, gpu=done.gpu)


def _entrants(cell: Cell, process: int, sweep: Sweep, journal: Journal) -> list[Candidate]:
    """The sweep's candidates, less those that an earlier process ruled out: failed, or clearly
    slower."""
    out: set[Candidate] = set()
    for earlier in range(process):
        outcomes = journal.outcomes(cell, earlier)
        times = {r.candidate: median(r.samples_us) for r in outcomes if r.samples_us}
        limit = _RULED_OUT * min(times.values(), default=0.0)
        out |= {r.candidate for r in outcomes if r.status not in ("ok", "unstable")}
        out |= {r.candidate for r in outcomes if r.reason and times.get(r.candidate, 0.0) > limit}
    return [c for c in sweep.candidates if c not in out]
