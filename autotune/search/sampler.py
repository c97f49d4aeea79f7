"""The search as an Optuna sampler, which proposes the configuration of the next trial.

A :class:`CostModelSampler` serves one study, which maximises samples per second over the parameters of its space;
`examples/own_study.py` shows the loop. It proposes, in this order:

1. the baseline, or if that can't fit the configuration with the least predicted memory;
2. the winner of earlier searches, if the lasting record has any (see `earlier`);
3. the configuration with the highest worth by the cost model, until none is worth a trial (see `candidates`);
4. if the cost model can't predict all of the space: a neighbour of the leader (see `candidates`), then a sample of
   Optuna's TPE, and if TPE draws nothing new, any untried configuration.

Running trials are assumed to return their predictions ("kriging believer": Ginsbourger, Le Riche and Carraro, "Kriging
is well-suited to parallelize optimization", 2010); one that has been running for twice the time limit of a trial is
taken for dead. Parameters that aren't of the space are drawn by TPE.
"""

import contextlib
import copy
import datetime
import functools
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan, SearchState
from autotune.search.candidates import SAME_FAILURES, Candidates, ProgramTracer, common_cause, proposals
from autotune.search.earlier import EarlierSearches
from autotune.space.knobs import changes
from autotune.space.space import Point, loading_of
from autotune.storage.writer import TrialConverter
from autotune.values.config import TrainConfig
from autotune.values.trial import Prediction, TrialResult

PATIENCE_DRAWS = 60  # of TPE, which may be tried or refused, before any untried configuration is taken instead

# The configuration of the next trial, and whether a draw of TPE that is new comes first; None: none is worth a trial.
_Choice = tuple[TrainConfig, bool] | None


class CostModelSampler(BaseSampler):
    """Proposes the configurations of a search to a study that maximises samples per second.

    A trial's value is samples per second, its constraint "memory" the peak divided by the budget, less 1. One that ran
    out of memory is pruned, with a positive constraint. `tell` hands over a whole `TrialResult`. Without a cost
    model nothing is predicted.

    Attributes:
        state: The trials that the sampler has learned from, and the refused configurations.
        space: The search space; its parameters are those of the study.
        conclusion: Why no configuration is worth a trial any more; None if simply all were tried.
        left_s: Seconds that a trial may take; one that compiles for longer isn't proposed.
    """

    def __init__(
        self,
        plan: SearchPlan,
        model: CostModel | None = None,
        *,
        earlier: EarlierSearches | None = None,
        trace: ProgramTracer | None = None,
    ) -> None:
        self.space = plan.search_space
        self._plan = plan
        self._earlier = earlier or EarlierSearches(plan)
        self._converter = TrialConverter(plan)
        self.left_s = math.inf
        self.state = SearchState(plan)
        self.conclusion: str | None = None
        self._history = self.state.history
        self._candidates = Candidates(model, plan, trace) if model is not None else None
        self._learned: set[int] = set()  # numbers of the study's trials
        self._observed = 0  # calls of `observe`; with the pending trials, the key of `_found`
        self._found: tuple[object, _Choice] | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._tpe = TPESampler(
                seed=plan.workload.seed, multivariate=True, group=True, n_startup_trials=6, constant_liar=True
            )

    def is_done(self, study: Study) -> bool:
        """Whether no trial is worthwhile until a running one ends."""
        return self._next(study) is None

    def suggest(self, trial: Trial) -> TrainConfig:
        """Return the configuration of a trial, after suggesting its parameters."""
        point: Point = {}
        for dimension in self.space.dimensions:
            if self.space.is_active(dimension, point):
                point[dimension.name] = trial.suggest_categorical(dimension.name, dimension.choices)
        return self._converter.config(point)

    def foreseen(self, most: int) -> list[TrainConfig]:
        """Return the configurations of the first trials, at most `most`, if each measures its prediction."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=self)
        found: list[TrainConfig] = []
        while len(found) < most and not self.is_done(study):
            found.append(self.suggest(study.ask()))
        return found

    def tell(self, study: Study, trial: Trial, result: TrialResult) -> None:
        frozen = self._converter.frozen(result)
        for name, value in frozen.user_attrs.items():
            trial.set_user_attr(name, value)
        for name, value in frozen.constraints.items():
            trial.set_constraint(name, value)
        study.tell(trial, values=frozen.value, state=frozen.state)
        self.learn(study)

    def add(self, study: Study, result: TrialResult) -> None:
        study.add_trial(self._converter.frozen(result))
        self.learn(study)

    def learn(self, study: Study) -> None:
        """Learn from the trials of the study that have finished since the last call."""
        finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        for trial in study.get_trials(deepcopy=False, states=finished):
            if trial.number in self._learned:
                continue
            self._learned.add(trial.number)
            if self._converter.is_ours(trial):
                with contextlib.suppress(ValueError):  # of values that somebody enqueued and that contradict each other
                    result = self._converter.result(trial)
                    self.state.take_in(result)
                    self.observe(result)

    def observe(self, *results: TrialResult) -> None:
        """Correct the cost model by trials, without adding them to the state of the search."""
        self._observed += 1
        if self._candidates is not None:
            self._candidates.observe(*results)

    def prediction(self, config: TrainConfig) -> Prediction | None:
        return self._candidates.prediction(config) if self._candidates is not None else None

    def count_beyond_memory(self) -> int:
        return self._candidates.count_beyond_memory() if self._candidates is not None else 0

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all parameters of the space: a configuration is proposed as a whole."""
        if study.directions != [StudyDirection.MAXIMIZE]:
            raise ValueError('CostModelSampler maximises samples per second: create_study(direction="maximize")')
        return dict(self._converter.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        choice = self._next(study, trial.number)
        if choice is None:
            return self._drawn(study, trial)
        config, may_be_drawn = choice
        pending = self._pending(study, trial.number)
        for _ in range(PATIENCE_DRAWS if may_be_drawn else 0):
            point = self._drawn(study, trial)
            if self._is_open(self._converter.config(point), pending):
                return point
        return self.space.choices_of(config)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value drawn by TPE for a parameter that isn't in this space."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self._tpe.reseed_rng()

    def _next(self, study: Study, asked: int | None = None) -> _Choice:
        """Return the choice of the next trial, cached until a trial ends or begins."""
        self.learn(study)
        pending = self._pending(study, asked)
        known = (self._observed, frozenset(pending))
        if self._found is None or self._found[0] != known:
            self.conclusion = None
            self._found = known, self._chosen(pending)
        return self._found[1]

    def _chosen(self, pending: Sequence[TrainConfig]) -> _Choice:
        baseline, has_begun = self._plan.baseline, True
        if self._history.known(baseline) is None:
            if baseline not in pending:
                return baseline, False
            has_begun = self._candidates is not None and self._earlier.count == 0
        if has_begun:
            if (cause := common_cause(self._history)) is not None:
                self.conclusion = f"no trial completes, and {SAME_FAILURES} failed alike: {cause}"
                return None
            first = [self._plan.against, self._earlier.winner]
            if self._candidates is not None and self._history.best() is None and self._plan.too_large(baseline):
                first.insert(0, self._candidates.lightest)
            config = next((c for c in first if c is not None and self._is_open(c, pending)), None)
            if config is None:
                config = self._on_other_devices(pending) or self._by_prediction(pending)
            if config is None and not self._ends(pending):
                steps = map(self.space.config, proposals(self.space, self._history))
                config = next((config for config in steps if self._is_open(config, pending)), None)
            if config is not None:
                return config, False
        if self._history.best() is None or self._ends(pending):
            return None
        left = (config for config in self._in_any_order if config not in self.state.refused)
        return next(((config, True) for config in left if self._is_open(config, pending)), None)

    def _on_other_devices(self, pending: Sequence[TrainConfig]) -> TrainConfig | None:
        """Return a configuration for a number of devices of which none has run; None: all have, or there is one number.

        It is the fastest by prediction, or the baseline's on so many devices. A number is given up after two failures.
        """
        sizes = self._plan.world_sizes
        begun = [r.request.config.parallelism.world_size for r in self._history.ranking()]
        begun += [config.parallelism.world_size for config in pending]
        failed = [r.request.config.parallelism.world_size for r in self.state.results if r.measurement is None]
        for size in sorted(sizes) if len(sizes) > 1 else ():
            if size in begun or failed.count(size) >= 2:
                continue
            own = [config for config in self.space.legal if config.parallelism.world_size == size]
            rates = [0.0] * len(own) if self._candidates is None else self._candidates.rates(own)
            by_rate = sorted(
                zip(rates, own, strict=True),
                key=lambda row: (math.isnan(row[0]), -row[0], len(changes(row[1], self._plan))),
            )
            if (found := next((config for _, config in by_rate if self._is_open(config, pending)), None)) is not None:
                return found
        return None

    def _by_prediction(self, pending: Sequence[TrainConfig]) -> TrainConfig | None:
        """Return the next configuration by the cost model, if all running trials return their predictions."""
        if self._candidates is None:
            return None
        candidates, history = self._candidates, self._history
        rates = zip(pending, candidates.rates(pending), strict=True)
        assumed = [self._converter.assumed(config, rate) for config, rate in rates if not math.isnan(rate)]
        if assumed:
            candidates, history = copy.copy(candidates), history.with_results(assumed)
            candidates.observe(*assumed)
        is_open = functools.partial(self._is_open, pending=pending)
        return candidates.next(history, is_open, known=self._earlier.count, left_s=self.left_s)

    def _ends(self, pending: Sequence[TrainConfig]) -> bool:
        """Whether the cost model predicts all of the space, and so has found that no trial is worthwhile."""
        candidates, has_begun = self._candidates, bool(pending) or self._history.best() is not None
        if candidates is None or not candidates.has_all_predictions or not has_begun:
            return False
        is_open = functools.partial(self._is_open, pending=pending)
        self.conclusion = candidates.conclusion(self._history, is_open, self.left_s)
        return True

    def left_out(self) -> str:
        """Return which configurations are left untried where trials end although some are worth one."""
        if self._candidates is None:
            return "with configurations untried"
        return self._candidates.left_out(self._history, functools.partial(self._is_open, pending=()))

    def _is_open(self, config: TrainConfig, pending: Sequence[TrainConfig]) -> bool:
        """Whether `config` is neither tried, running nor refused; a refusal is added to `state.refused`."""
        if self._history.known(config) is not None or config in pending:
            return False
        if config in (self._plan.baseline, self._plan.against, self._earlier.winner):
            return True
        if not self._history.results and loading_of(config) != loading_of(self.space.legal[0]):
            return False  # no trial has shown yet whether a step waits for its data
        reason = self.space.refusal(config) or self._plan.too_large(config) or self._history.refusal(config)
        reason = reason or self._earlier.refusal(config, self._history.best())
        reason = reason or (self._candidates.refusal(config) if self._candidates is not None else None)
        if reason is not None:
            self.state.refused[config] = reason
        return reason is None

    @functools.cached_property
    def _in_any_order(self) -> list[TrainConfig]:
        configs = list(dict.fromkeys((self._plan.baseline, *self.space.legal)))  # other loadings: with the leader alone
        random.Random(self._plan.workload.seed).shuffle(configs)
        return configs

    def _drawn(self, study: Study, trial: FrozenTrial) -> Point:
        """Return a whole point drawn by TPE, which may be tried or refused."""
        ours, point = self._converter.distributions, Point()
        found = self._tpe.sample_relative(study, trial, self._tpe.infer_relative_search_space(study, trial))
        for dimension in self.space.dimensions:
            if self.space.is_active(dimension, point):
                name = dimension.name
                if name not in found:
                    found[name] = self._tpe.sample_independent(study, trial, name, ours[name])
                point[name] = found[name]
        return point

    def _pending(self, study: Study, asked: int | None) -> list[TrainConfig]:
        """Return the configurations of the running trials, except that of trial number `asked`."""
        dead_before = datetime.datetime.now() - datetime.timedelta(seconds=2 * self._plan.budget.trial_timeout_s)
        pending = []
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            is_dead = trial.datetime_start is None or trial.datetime_start < dead_before
            if trial.number != asked and not is_dead and self._converter.is_ours(trial):
                with contextlib.suppress(ValueError):  # as in `learn`
                    pending.append(self._converter.config(trial.params))
        return pending
