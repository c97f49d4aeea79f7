"""Chooses trials: what to refuse without one, what to try next, and when to stop.

By the cost model the next trial is the untried configuration with the largest expected improvement over the leader for
each second that it is expected to take, times its chance to fit; before a trial has completed the one with the highest
predicted throughput. Each measurement corrects the model before the next choice. The search ends when the best of all
trials that it may still run is expected to improve the rate by less than `WORTHWHILE_GAIN`, by the joint posterior of
the most promising. Without the cost model `proposals` come in the order of the space, then TPE's (`sampler`).
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from autotune.cost.family import Family, family_of
from autotune.cost.model import CostModel, Predictions, below, is_compiled
from autotune.cost.profile import Profile, Vector
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import MICRO_BATCH, changes, make_point, shown_changes
from autotune.space.space import History, Point, SearchSpace, loading_of
from autotune.training.arguments import loading_bytes
from autotune.units import show_memory, show_time
from autotune.values.config import KNOBS, Scalar, TrainConfig, knob_values
from autotune.values.trial import Prediction, TrialResult, TrialStatus

WORTHWHILE_GAIN = 0.01  # a smaller one is lost in the noise, and not worth the trials that are left
_FAIR_FIT = 0.5  # the least chance to fit of a configuration that is tried after a trial has completed
ProgramTracer = Callable[[Family], Profile | None]
SAME_FAILURES = 4  # for one reason end a search in which nothing completes: the configuration is not the reason


class Candidates:
    """The cost model of one search, and its predictions for the configurations of the space, a row for each `ranked`.

    Those whose weights, gradients and states alone exceed the memory are only counted. Of those that load their data
    differently one stands for all: only with the leader are others worth a trial. Before the first of a compiled family
    is tried, `trace` returns what inductor makes of it, or None.
    """

    def __init__(self, model: CostModel, plan: SearchPlan, trace: ProgramTracer | None = None) -> None:
        self._model, self._plan, self._budget_bytes, self._trace = model, plan, plan.memory_bytes, trace
        self._usual, self._loadings = plan.affordable, plan.search_space.loadings
        self._too_large = len(plan.search_space.legal) - len(self._usual)
        self.ranked, self._compiled_s = self._usual, 0.0

    @functools.cached_property
    def _predicted(self) -> Predictions:
        return self._model.predict(self.ranked)

    @functools.cached_property
    def _rates(self) -> Vector:
        return self._over_the_run(self._predicted.samples_per_second, self.ranked)

    @functools.cached_property
    def _fits(self) -> Vector:
        return self._predicted.chance_to_fit(self._budget_bytes)

    def _over_the_run(self, rates: Vector, configs: Sequence[TrainConfig]) -> Vector:
        """Return rates that include the time of compiling, if the objective is a run of given length."""
        run_samples = self._plan.objective.run_samples
        if run_samples is None:
            return rates
        compile_s = self._compile_s * np.array([is_compiled(config) for config in configs])
        return 1.0 / (1.0 / rates + compile_s / run_samples)

    @property
    def _compile_s(self) -> float:
        layers, hardware = self._plan.facts.layers or 20, self._plan.hardware
        # 26 % off in the median, 74 % at worst, in 22 cold starts of 11 families on the stand-in for CUDA, with a core
        # or two; 9 to 16 s were measured with 4 layers and 16 cores beside an H200, 20 to 150 s on a CPU.
        on_gpu_s, on_cpu_s = 10 + 6 / hardware.cores + 1.5 * layers, 10 + (1 + 10 / hardware.cores) * layers
        return self._compiled_s or (on_cpu_s if hardware.is_cpu else on_gpu_s)

    def _trial_s(self, history: History) -> Vector:
        usual_s = max(1.0, statistics.median([r.duration_s for r in history.ranking() if r.duration_s > 0] or [1.0]))
        ended = [r for r in history.results if r.duration_s > 0]  # others are running
        compiled = [r for r in ended if is_compiled(r.request.config)]
        compile_s = max((r.duration_s for r in compiled), default=0.0)
        if not any(r.measurement for r in compiled):  # one that was ended would have taken longer
            compile_s = max(compile_s, self._compile_s)
        return usual_s + compile_s * np.array([is_compiled(config) for config in self.ranked])

    def _least_s(self, history: History) -> Vector:
        """Return the seconds that a trial of each configuration needs: as long as others, or those of all its steps."""
        plan, budget, workload = self._plan, self._plan.budget, self._plan.workload
        shares = [plan.micro_steps(c) / workload.accumulation_steps(c) for c in self.ranked]
        samples = [workload.samples_per_step(config) for config in self.ranked]
        step_s = np.multiply(shares, samples) / self._predicted.samples_per_second
        discarded = np.maximum(np.ceil(budget.discarded_s / step_s), budget.discarded_steps - 1)
        measured = np.minimum(np.ceil(budget.measure_time_s / step_s), 6)  # see `StepTimer`
        return np.fmax(self._trial_s(history), (1 + discarded + measured) * step_s)

    @property
    def has_all_predictions(self) -> bool:
        return not bool(np.isnan(self._rates).any())

    def observe(self, *results: TrialResult) -> None:
        """Correct the model by finished trials, of this search or recorded ones."""
        started = [r.measurement.cold_start_s for r in results if r.measurement and is_compiled(r.request.config)]
        self._compiled_s = max([self._compiled_s, *started])
        if (learned := self._model.observe(*results)) is not self._model:
            self._model = learned
            self._forget_predictions()

    def _forget_predictions(self) -> None:
        for outdated in ("_predicted", "_rates", "_fits"):
            self.__dict__.pop(outdated, None)

    def rates(self, configs: Sequence[TrainConfig]) -> list[float]:
        """Return the predicted samples per second of configurations; NaN: there is no prediction."""
        return self._model.predict(configs).samples_per_second.tolist() if configs else []

    def prediction(self, config: TrainConfig) -> Prediction | None:
        if (estimate := self._model.estimate(config)) is None:
            return None
        peak_bytes = max(0, estimate.memory.device_peak_bytes)
        rate, mfu, parts = estimate.samples_per_second, estimate.mfu, estimate.parts
        return Prediction(samples_per_second=rate, peak_bytes=peak_bytes, mfu=mfu, parts=parts)

    def refusal(self, config: TrainConfig) -> str | None:
        """Return how a configuration surely exceeds the memory of device or host, or None."""
        whole = loading_bytes(config, self._plan.facts.parameters), "the whole weights that each rank begins with are"
        share = self._model.share(config)
        of_rank, why = max((0.0 if share is None else share.host, "offload is"), whole)
        there = self._plan.hardware.host_memory_bytes
        if (host := of_rank * self._plan.hardware.nodes_of(config.parallelism.world_size)[1]) > there:
            return f"{why} predicted to take {show_memory(int(host))} of the host's memory; it has {show_memory(there)}"
        least = float(self._model.predict([config]).least_bytes[0])
        if least <= self._budget_bytes or math.isnan(least):
            return None
        return f"predicted to need at least {show_memory(int(least))}; the budget is {show_memory(self._budget_bytes)}"

    @functools.cached_property
    def lightest(self) -> TrainConfig | None:
        """The configuration with the least predicted memory; None if none is predicted to fit."""
        needed = self._predicted.needed_bytes
        return self.ranked[int(np.nanargmin(needed))] if (needed <= self._budget_bytes).any() else None

    def count_beyond_memory(self) -> int:
        return (self._too_large + int((self._predicted.least_bytes > self._budget_bytes).sum())) * len(self._loadings)

    @property
    def may_fit(self) -> bool:
        """Whether any configuration may fit, those without a prediction included, compiled ones as they are written."""
        compiled = np.array([is_compiled(c) for c in self.ranked], dtype=bool)
        least = np.where(compiled, self._predicted.needed_bytes, self._predicted.least_bytes)
        return not bool((least > self._budget_bytes).all())

    def next(
        self, history: History, is_open: Callable[[TrainConfig], bool], *, known: int = 0, left_s: float = math.inf
    ) -> TrainConfig | None:
        """Return the open configuration to try next; None if none is worth a trial.

        `known`: trials of earlier searches that count as run; `left_s`: seconds that a trial may take.
        """
        best = history.best()
        self._rank_loadings(None if best is None else best.request.config)
        scores, gains = self._trust(history) * np.stack(self._worth(history))
        with np.errstate(invalid="ignore"):
            possible = self._fits >= (0.1 if best is None else _FAIR_FIT)
        if best is not None and math.isfinite(left_s):
            possible &= self._least_s(history) <= left_s
        # The first two trials after the baseline run whatever is expected: predictions alone never end a search.
        is_early, gains = best is None or len(history.results) + known <= 2, np.where(possible, gains, 0.0)
        if not is_early and self._gain_of_the_rest(history, gains, is_open) < WORTHWHILE_GAIN:
            return None
        rows: list[int] = np.argsort(-scores, kind="stable").tolist()
        chosen = next((self.ranked[row] for row in rows if possible[row] and is_open(self.ranked[row])), None)
        if chosen is not None and self._traces_programs(chosen):
            return self.next(history, is_open, known=known, left_s=left_s)
        return chosen

    def _traces_programs(self, config: TrainConfig) -> bool:
        """Return whether a trace of what inductor makes of a configuration is new."""
        family = family_of(config, self._plan.hardware, self._plan.workload)
        if self._trace is None or not family.compiled or family in self._model.profiles:
            return False
        if (profile := self._trace(family)) is not None:
            self._model = self._model.with_profile(profile)
            self._forget_predictions()
        return profile is not None

    def _gain_of_the_rest(self, history: History, gains: Vector, is_open: Callable[[TrainConfig], bool]) -> float:
        """Return the gain expected of the best of all trials that may still run, of as many as make it worthwhile."""
        order = (row for row in np.argsort(-gains, kind="stable").tolist() if gains[row] > 0)
        opened, rows, expected = (row for row in order if is_open(self.ranked[row])), list[int](), 0.0
        leader, rate = self._bar(history) if history.best() is not None else (None, 0.0)
        random, chances, left = np.random.default_rng(0), self._fits * self._trust(history), self._trials_left(history)
        for most in (min(3, left), left):  # three often suffice
            rows += itertools.islice(opened, most - len(rows))
            expected = float(gains[rows].sum())
            if expected >= WORTHWHILE_GAIN and leader is not None:
                covariances = self._model.gain_spread([self.ranked[row] for row in rows], leader, together=True)
                means = np.log(self._rates[rows] / rate)
                drawn = random.multivariate_normal(means, covariances, size=1000, check_valid="ignore")
                drawn *= random.random(drawn.shape) < chances[rows]
                expected = float(np.maximum(drawn.max(axis=1), 0.0).mean())
            if expected >= WORTHWHILE_GAIN:
                break
        return expected

    def _trials_left(self, history: History) -> int:
        return max(1, self._plan.budget.max_trials + 1 - len(history.results))

    def conclusion(self, history: History, is_open: Callable[[TrainConfig], bool], left_s: float = math.inf) -> str:
        """Return which configurations are left untried when none is worth a trial, or has time for one."""
        gains, trial_s, left = self._worth(history)[1], self._least_s(history), self._trials_left(history)
        with np.errstate(invalid="ignore"):
            may_fit = self._predicted.least_bytes <= self._budget_bytes
            worthwhile, fits = gains >= self._fits * WORTHWHILE_GAIN / left, self._fits >= _FAIR_FIT
        rows = [row for row in np.flatnonzero(may_fit).tolist() if history.known(self.ranked[row]) is None]
        risky = [row for row in rows if not fits[row] and worthwhile[row]]
        late = [row for row in rows if fits[row] and worthwhile[row] and trial_s[row] > left_s]
        others = len(rows) - len(risky) - len(late)
        parts = [] if late or risky else ["nothing is left untried that fits"]
        if others:
            gains = np.where(fits & (trial_s <= left_s), self._trust(history) * gains, 0.0)
            expected = self._gain_of_the_rest(history, gains, is_open)
            more = "1 more trial is" if min(others, left) == 1 else f"{min(others, left)} more trials are"
            untried = f"{others:,} configuration{'s are' if others > 1 else ' is'} left untried"
            parts = [f"{untried}; {more} expected to gain {expected:.1%} at most"]
        if late:
            took = f"up to {show_time(max(trial_s[late]))} a trial"
            parts.append(f"{len(late):,} need{'s' * (len(late) == 1)} a longer --max-time ({took} expected)")
        if risky:
            first = max(risky, key=lambda row: float(self._rates[row]))
            fastest = shown_changes(changes(self.ranked[first], self._plan))
            why = "that may be faster were left untried, as they probably don't fit: the fastest"
            parts.append(f"{len(risky):,} {why} ({fastest}) with a chance of {self._fits[first]:.0%}")
        return "; ".join(parts)

    def left_out(self, history: History, is_open: Callable[[TrainConfig], bool]) -> str:
        """Return which configurations are left untried where trials end although some are worth one."""
        with np.errstate(invalid="ignore"):
            possible = (self._fits >= _FAIR_FIT) & (self._trust(history) == 1.0)
        rows = [row for row in np.flatnonzero(possible).tolist() if history.known(self.ranked[row]) is None]
        said, leader = f"with {len(rows):,} of the configurations that fit untried", history.best()
        promising = sorted(rows, key=lambda row: -float(self._rates[row]))
        first = next((row for row in promising if is_open(self.ranked[row])), None)
        if first is None or leader is None or math.isnan(rate := self.rates([leader.request.config])[0]):
            return said
        ratio = float(self._rates[first]) / float(self._over_the_run(np.array([rate]), [leader.request.config])[0])
        if ratio < 1 + WORTHWHILE_GAIN:
            return f"{said}; none is predicted to be faster than the leader"
        fastest = shown_changes(changes(self.ranked[first], self._plan))
        fast = f"{ratio:.2f} x as fast as" if ratio < 3 else "several times as fast as"
        return f"{said}; the most promising is predicted to be {fast} the leader: {fastest}"

    def _trust(self, history: History) -> Vector:
        """Return for each configuration, from 0 to 1, how little it shares with trials that failed alike.

        Suspect are values that all trials of one cause share and no completed trial has, or those of them that differ
        from the baseline's, if any do.
        """
        fine = {knob for result in history.ranking() for knob in _knobs(result.request.config)}
        trust = np.ones(len(self.ranked))
        for configs in failures(history).values():
            shared = set.intersection(*map(_knobs, configs)) - fine
            suspects = shared - _knobs(self._plan.baseline) or shared
            if len(configs) > 1 and suspects:
                has = [np.array([attrgetter(name)(c) == value for c in self.ranked]) for name, value in suspects]
                trust *= 1.0 - np.mean(has, axis=0)
        return trust

    def _rank_loadings(self, leader: TrainConfig | None) -> None:
        """Rank the usual configurations, also with the leader's way of loading data, and the leader with all ways."""
        ranked = self._usual
        if leader is not None and len(self._loadings) > 1:
            own = loading_of(leader)
            if ranked and ranked[0].model_copy(update=own) != ranked[0]:
                ranked = [*ranked, *(config.model_copy(update=own) for config in ranked)]
            ranked = [*ranked, *(leader.model_copy(update=loading) for loading in self._loadings)]
        if ranked != self.ranked:
            self.ranked = ranked
            self._forget_predictions()

    def _worth(self, history: History) -> tuple[Vector, Vector]:
        """Return the worth of a trial of each configuration, and its expected gain.

        With a leader, the gain is the expected improvement of the logarithm of the rate (Jones and others, "Efficient
        global optimization of expensive black-box functions", 1998), and the worth is the gain for each second that the
        trial is expected to take (Snoek, Larochelle and Adams, "Practical Bayesian optimization of machine learning
        algorithms", 2012). The leader's rate is the predicted one after its measurement, as the highest of many is
        biased upwards. Without a leader, the worth is the throughput half a standard deviation up. Either is weighed
        with the chance to fit.
        """
        # Squared, as a trial that runs out of memory is lost, and says little about other configurations.
        fits, deviations, ranking = self._fits**2, self._predicted.log_deviation, history.ranking()
        if not ranking:
            return fits * self._rates * np.exp(0.5 * deviations), np.ones(len(self.ranked))
        leader, rate = self._bar(history)
        if leader is not None:
            known = np.flatnonzero(~np.isnan(self._rates)).tolist()
            deviations = np.full(len(self.ranked), np.nan)
            deviations[known] = self._model.gain_spread([self.ranked[row] for row in known], leader)
        gains = np.log(self._rates / rate)
        scaled = gains / deviations  # in standard deviations; below, their density
        density = np.exp(-0.5 * scaled**2) / math.sqrt(2 * math.pi)
        improvement = gains * below(scaled) + deviations * density
        return fits * improvement / self._trial_s(history), self._fits * improvement

    def _bar(self, history: History) -> tuple[TrainConfig | None, float]:
        """Return the fastest completed configuration by the model, and its rate; None: it can't predict the leader."""
        ranking = history.ranking()
        configs = [r.request.config for r in ranking]
        rates = self._over_the_run(self._model.predict(configs).samples_per_second, configs)
        if np.isnan(rates[0]):
            return None, history.rate(ranking[0])
        return configs[int(np.nanargmax(rates))], float(np.nanmax(rates))


def _knobs(config: TrainConfig) -> set[tuple[str, object]]:
    return set(zip(KNOBS, knob_values(config), strict=True))


def failures(history: History, *, excused: bool = False) -> dict[str, list[TrainConfig]]:
    """Return the configurations that failed for another reason than memory, by cause, if wanted `excused` ones too."""
    found: dict[str, list[TrainConfig]] = {}
    for result in history.results:
        if result.is_excused and not excused:
            continue
        if result.outcome.kind == "failure" and result.status is not TrialStatus.OUT_OF_MEMORY:
            found.setdefault(result.outcome.cause, []).append(result.request.config)
    return found


def common_cause(history: History) -> str | None:
    """Return the cause that `SAME_FAILURES` trials have in common, if no trial has completed."""
    if history.best() is not None:
        return None
    found = failures(history, excused=True).items()
    return next((cause for cause, configs in found if len(configs) >= SAME_FAILURES), None)


def proposals(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield points to try, the most promising first; tried and refused ones are among them.

    Around the leader they are its neighbours, one knob away. Without one they depend on why trials failed: lighter
    ones, and if another reason than memory is among them, the baseline with one parameter at its first other value.
    """
    leader, causes = history.best(), failures(history)
    if leader is None and (history.shortages or not causes):
        yield from map(space.complete, _lighter(space))
    if leader is None and not causes:
        return
    origin, most = (space.baseline, 1) if leader is None else (leader.request.config, None)
    point = make_point(origin)
    # Checkpointing only saves memory, of which a leader without it has had enough.
    has_enough = leader is not None and origin.checkpointing == "none" and not history.shortages
    for dimension in space.dimensions:
        if (has_enough and dimension.name == "checkpointing") or not space.is_active(dimension, point):
            continue
        here = point.get(dimension.name)
        others: list[Scalar] = [value for value in dimension.choices if value != here]
        if dimension.name == MICRO_BATCH:  # the next sizes
            sizes, now = sorted(int(size or 1) for size in dimension.choices), int(here or 0)
            others = [*[s for s in sizes if s > now][:1], *[s for s in sizes if s < now][-1:]]
        yield from (space.complete({**point, dimension.name: value}) for value in others[:most])


def _lighter(space: SearchSpace) -> Iterator[Point]:
    """Yield points of ever less memory: the same method, then 16-bit weights, adapters, both, and quantized weights."""
    choices: dict[str, list[Scalar]] = {d.name: [c for c in d.choices if c is not None] for d in space.dimensions}
    point = make_point(space.baseline)
    if "full" in choices.get("checkpointing", ()):
        point = {**point, "checkpointing": "full"}
        yield point
    sizes = sorted(int(size or 1) for size in choices.get(MICRO_BATCH, ()))
    smaller = [size for size in sizes if size < int(point[MICRO_BATCH] or 1)]
    for size in dict.fromkeys([*smaller[len(smaller) // 2 :][:1], *smaller[:1]]):
        point = {**point, MICRO_BATCH: size}
        yield point
    light = ("adamw_bnb_8bit", "paged_adamw_8bit", "adafactor")
    optimizers: list[Scalar] = [optim for optim in light if optim in choices.get("optim", ())]
    yield from ({**point, "optim": optimizer} for optimizer in optimizers)
    ways: tuple[Point, ...] = (point,)
    if "pure_bf16" in choices.get("precision", ()):
        pure: Point = {**point, "precision": "pure_bf16"}
        yield from ({**pure, "optim": optimizer} for optimizer in optimizers or [point["optim"]])
        ways = (point, pure)
    lightest: list[Point] = [{**at, "adapter": adapter} for at in ways for adapter in choices.get("adapter", ())]
    yield from lightest
    yield from ({**at, "quantization": packed} for at in lightest for packed in choices.get("quantization", ()))
