"""Optuna's samplers, held to the points of a space that have not been taken.

Of what Optuna suggests the nearest open point is taken, so no trial is spent on a combination that
can't run, or twice on the same. Each trial's random numbers are drawn from the seed, the study's
name and the number of finished trials: a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from kdabench.tune.space import Space

Kind = Literal["transfer", "tpe", "gp", "random", "exhaustive"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STARTUP = 4
"""Finished trials before a model is asked; random points until then."""
_FIXED = "fixed_params"  # where Optuna keeps what a queued trial is to be


class PointSampler(BaseSampler):
    """advise: of some places the one that a model of other cells picks, or None; for the kind
    `transfer`."""

    def __init__(
        self,
        space: Space,
        kind: Kind,
        seed: int,
        advise: Callable[[list[int]], int | None] = lambda places: None,
    ) -> None:
        self._space, self._kind, self._seed, self._advise = space, kind, seed, advise

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return dict(self._space.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if _FIXED in trial.system_attrs:
            return {}
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        places = sorted(set(range(len(self._space.points))) - taken(self._space, others))
        finished = sum(t.state.is_finished() for t in others)
        seed = hashlib.sha256(f"{self._seed}:{study.study_name}:{finished}".encode()).digest()
        return dict(
            self._space.params[
                self._pick(study, trial, places, finished, int.from_bytes(seed[:4], "big"))
            ]
        )

    def _pick(
        self, study: Study, trial: FrozenTrial, places: list[int], finished: int, seed: int
    ) -> int:
        if self._kind == "exhaustive":
            return places[0]
        advised = self._advise(places) if self._kind == "transfer" else None
        if advised is not None:
            return advised
        if self._kind in ("tpe", "gp") and finished >= STARTUP:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                model = _model(self._kind, seed)
                suggested = model.sample_relative(study, trial, dict(self._space.distributions))
            if suggested:
                return self._space.nearest(suggested, places)
        return random.Random(seed).choice(places)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise AssertionError(f"{param_name} is no field of the space")


def _model(kind: Kind, seed: int) -> BaseSampler:
    if kind == "gp":
        return GPSampler(seed=seed, n_startup_trials=1)
    return TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=False)


def taken(space: Space, trials: Iterable[FrozenTrial]) -> set[int]:
    """Places of the points that trials have had, have, or wait for."""
    found = set[int]()
    for trial in trials:
        params = (
            trial.system_attrs.get(_FIXED, {})
            if trial.state == TrialState.WAITING
            else trial.params
        )
        place = space.place(params) if params.keys() >= space.values.keys() else None
        found |= set() if place is None else {place}
    return found
