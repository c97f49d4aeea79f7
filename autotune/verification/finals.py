"""The finals of a search: the leaders are measured again, longer, in turn with the baseline.

This module chooses the trials and evaluates them; the tuner runs them.
"""

import math
import random
import statistics
from collections.abc import Sequence

from autotune.exports.launch_files import needs_code
from autotune.planning.plan import SearchState
from autotune.space.knobs import changes, put_back
from autotune.values.conditions import Conditions
from autotune.values.config import Precision, TrainConfig
from autotune.values.statistics import DRIFT, PARTS, Single, Speedup, Spread, expected_rates, parts_of
from autotune.values.trial import Interval, Measurement, Purpose, TrialResult
from autotune.verification.checks import Proof, ending

# Finalists have at least this share of the leader's throughput in the search.
FINALIST_SHARE = 0.9

WORTH_DECIDING = 1.02  # with a smaller lead the simpler configuration would win anyway


class Finals:
    """A search's finalists and their final trials; `takes_turns`: trials can be alive at once and compute in turn."""

    def __init__(self, state: SearchState, *, takes_turns: bool = False) -> None:
        self.state, self.plan, self.history, self.proof = state, state.plan, state.history, Proof(state)
        self._takes_turns = takes_turns
        # The number of configurations that are measured again beside the baseline, if none fails or falls.
        self.finalists = self.plan.budget.finalists

    def contenders(self) -> list[TrainConfig]:
        """Return the baseline, if it completed, and then the finalists, the fastest first."""
        # A finalist that fails is replaced by the next fastest. For a finalist that was slower than in the search, the
        # next fastest is added: its trial in the search was lucky, or the whole machine has become slower. The leader
        # as flags alone say it comes last, where it isn't the leader itself.
        again = dict.fromkeys(r.request.config for r in self.state.results if r.request.purpose.closes)
        failed = [config for config in again if self.failure(config) is not None]
        ranking = [r for r in self.history.ranking() if r.request.config not in failed]
        measured = [r.request.config for r in ranking]
        least = FINALIST_SHARE * self.history.rate(ranking[0]) if ranking else 0.0
        near = [r.request.config for r in ranking if self.history.rate(r) >= least]
        able = [config for config in near if config != self.plan.baseline]
        finalists = able[: self.finalists + sum(map(self._has_fallen, able[: self.finalists]))]
        sizes = sorted(self.plan.world_sizes) if len(self.plan.world_sizes) > 1 else ()
        finalists += [c for size in sizes for c in [c for c in measured if c.parallelism.world_size == size][:1]]
        finalists += [c for c in measured if c == self.plan.against]
        finalists = [c for c in dict.fromkeys(finalists) if c != self.plan.baseline]
        flags_alone = self.flags_alone(finalists) if self.finalists > 1 else None
        finalists += [c for c in measured if c == flags_alone and c not in finalists]
        return ([self.plan.baseline] if self.plan.baseline in measured else []) + finalists

    def flags_alone(self, leaders: Sequence[TrainConfig]) -> TrainConfig | None:
        """Return the first of `leaders` without changes that a line of code has to make; None: all or none do."""
        plan, leader = self.plan, next(iter(leaders), self.plan.baseline)
        in_code = [change.knob for change in changes(leader, plan) if needs_code(change)]
        if plan.workload.own_code is None or not in_code:
            return None
        try:
            found = put_back(leader, plan.baseline, in_code)
        except ValueError:
            return None
        return found if found != plan.baseline and plan.search_space.refusal(found) is None else None

    def _has_fallen(self, config: TrainConfig) -> bool:
        """Whether the rate of `config` over the planned rounds is below `FINALIST_SHARE` of that in the search."""
        # One that ran in turn with the baseline and is clearly faster is good enough.
        seen, times = self.state.measured(config), [m.step_times_s for m in self._measured(config)]
        if seen is None or not times or self.rounds(config) < self.plan.budget.final_rounds:
            return False
        if (lead := self._in_turn(config, self.plan.baseline)) is not None and lead.interval.low > 1.0:
            return False
        rate = self.plan.workload.samples_per_step(config) / statistics.fmean(t for steps in times for t in steps)
        return rate < FINALIST_SHARE * seen.samples_per_second

    def next_trials(self) -> list[TrainConfig]:
        """Return the next trials: several that are to run in turn, or one that runs alone; none: rounds are over."""
        contenders = self.contenders()
        waiting = [c for c in contenders if self.rounds(c) < self.plan.budget.final_rounds]
        if not waiting or contenders == [self.plan.baseline]:
            return []
        if self._may_run_in_turn(contenders):  # who comes late runs in turn with the first, which is the baseline
            return self._there_and_back(list(dict.fromkeys([contenders[0], *waiting])), 0)
        return self._next_alone(waiting)

    def _next_alone(self, waiting: Sequence[TrainConfig]) -> list[TrainConfig]:
        begun = min(map(self.rounds, waiting), default=0)
        return self._there_and_back([c for c in waiting if self.rounds(c) == begun], begun)[:1]

    def _there_and_back(self, configs: Sequence[TrainConfig], begun: int) -> list[TrainConfig]:
        """Return the configurations of round number `begun` in their order: drawn, and every other time backwards.

        So neither drift nor being first favours one. The leader's rate seeds the draw: resumed searches keep the order.
        """
        leader = self.history.best()
        seed = None if leader is None or leader.measurement is None else leader.measurement.samples_per_second

        def place(config: TrainConfig) -> float:
            return random.Random(f"{seed} {begun // 2} {config.config_id}").random()

        return sorted(configs, key=place, reverse=begun % 2 == 1)

    def simplest_of_the_fastest(self, measured: Sequence[TrainConfig]) -> tuple[TrainConfig, TrainConfig]:
        """Return the simplest of those not clearly slower than the fastest (of several the faster), and the fastest.

        Beside the baseline the simplest is one that is clearly faster than it; if none is, it is the baseline.
        """
        plan = self.plan

        def rate(config: TrainConfig) -> float:
            if (lead := self.speedup(config, plan.baseline)) is not None:
                return lead.ratio
            merged = self.merged(config)
            return plan.objective.rate(merged) if merged else 0.0

        def is_clearly_faster(config: TrainConfig, than: TrainConfig) -> bool:
            lead = self.speedup(config, than)
            return lead is not None and lead.interval.low > 1.0

        def complexity(config: TrainConfig) -> tuple[int, int, bool, bool, int]:
            """Return devices, the deepest change's rank (-1: none), code that no flag says, a loss scaler, how many."""
            changed = changes(config, plan)
            is_in_code = plan.workload.own_code is not None and any(map(needs_code, changed))
            rank, scales = max((c.allowance.rank for c in changed), default=-1), config.precision is Precision.FP16
            return config.parallelism.world_size, rank, is_in_code, scales, len(changed)

        able = list(measured)
        if plan.baseline in measured:
            able = [c for c in measured if is_clearly_faster(c, plan.baseline)] or [plan.baseline]
        leader = max(able, key=rate)
        alike = [c for c in able if not is_clearly_faster(leader, c)]
        return min(alike, key=lambda config: (*complexity(config), -rate(config))), max(measured, key=rate)

    def further(self) -> list[TrainConfig]:
        """Return trials of a further round if the planned ones left the result open and no check has begun."""
        # Open: the fastest finalist may be faster than the simplest, or the interval over the baseline is too wide.
        first = next(iter(self.series()), None)
        checks = (r for r in self.state.results if r.request.purpose.closes and r.request.purpose is not Purpose.FINAL)
        if any(first is None or r.request.number > first.request.number for r in checks):
            return []
        planned, contenders = self.plan.budget.final_rounds, self.contenders()
        # Those who came late ran in turn with the baseline, which so has more.
        counted = [c for c in contenders if c != self.plan.baseline or not self.ran_in_turn()]
        begun = max(map(self.rounds, counted), default=0)
        waiting = [c for c in contenders if self.rounds(c) < begun]
        leads = [lead for c in contenders if c != self.plan.baseline and (lead := self.speedup(c, self.plan.baseline))]
        # With a fixed two rounds, noise in one trial could hide a gain or make one up. Stopping by intermediate results
        # lowers the coverage of intervals (docs/how-it-works.md).
        if leads and not waiting and planned <= begun < 2 * planned:
            interval = max(leads, key=lambda lead: lead.ratio).interval
            best, fastest = self.simplest_of_the_fastest([c for c in contenders if self.is_measured(c)])
            lead = self.speedup(fastest, best) if fastest != best else None
            is_wide = interval.low > 1.0 and interval.high > 1.3 * interval.low
            if is_wide or (lead is not None and lead.ratio >= WORTH_DECIDING):
                waiting = contenders
        if self._may_run_in_turn(contenders) and len(waiting) > 1:
            return self._there_and_back(waiting, 1)
        return self._next_alone(waiting)

    def rounds(self, config: TrainConfig) -> int:
        """Return how many rounds a configuration has run; one trial in turn stands for all that are planned."""
        planned = self.plan.budget.final_rounds
        return sum(planned if _ran_in_turn(r) else 1 for r in self.trials(config))

    def _may_run_in_turn(self, contenders: Sequence[TrainConfig]) -> bool:
        """Whether the contenders can all be alive at once, and nothing of one computes while another is measured."""
        # If trials that were to run in turn did not, because one of them failed, all others run alone.
        measured = [m for c in contenders if (m := self.state.measured(c)) is not None and m.memory.is_known]
        together = sum(m.memory.peak_bytes for m in measured)
        fit = len(measured) == len(contenders) > 1 and together <= self.plan.hardware.default_budget_bytes
        alone = all(c.parallelism.is_single and not c.dataloader_num_workers for c in contenders)
        return self._takes_turns and fit and alone and self.ran_in_turn()

    def trials(self, config: TrainConfig) -> list[TrialResult]:
        return [r for r in self.series() if r.request.config == config]

    def series(self) -> list[TrialResult]:
        """Return the latest final trials without a trial of the search between them: only these are compared."""
        # A search that was given more time may have another series.
        latest: list[TrialResult] = []
        for result in reversed(self.state.results):
            if result.request.purpose is Purpose.FINAL:
                latest.append(result)
            elif latest and result.request.purpose.explores:
                break
        return latest[::-1]

    def ran_in_turn(self) -> bool:
        return all(map(_ran_in_turn, self.series()))

    def others_share(self) -> float | None:
        """Return the share of the machine that others took in the finals, without any in all trials; None: a little."""
        share = _share_of_others(self.series() or self.state.results)
        return share if share > 0.25 else None

    def is_measured(self, config: TrainConfig) -> bool:
        return any(r.measurement for r in self.trials(config))

    def failure(self, config: TrainConfig) -> str | None:
        """Return why `config` failed a final trial or a check, or None; a timeout is no failure."""
        finals, is_exempt = self.state.trials(config, Purpose.FINAL), config == self.plan.baseline
        if failed := [r for r in finals if r.has_failed]:
            return ending(failed[-1])
        if not is_exempt and any(r.measurement is not None and r.measurement.ran_short for r in finals):
            return "the allocator ran short of memory"
        return self.proof.refusal(config)

    def runs_short(self, config: TrainConfig) -> bool:
        """Whether the allocator ran short in the search's trial of `config`, and no final trial has completed."""
        seen = self.state.measured(config)
        return seen is not None and seen.ran_short and not self.is_measured(config)

    def measurement(self, config: TrainConfig) -> Measurement | None:
        """Return the measurement that all outputs show: its final trials as one, or else its trial of the search."""
        return self.merged(config) or self.state.measured(config)

    def trials_of(self, config: TrainConfig) -> list[TrialResult]:
        """Return the trial of the search and the final trials of `config`, completed or not."""
        return [*filter(None, [self.history.known(config)]), *self.trials(config)]

    def expected_s(self, configs: Sequence[TrainConfig] | None = None) -> float:
        """Return the expected seconds of the finals, or of trials of `configs`, in turn if they are several."""
        # With no finalist yet, one as slow as the baseline is assumed.
        budget, whole_s = self.plan.budget, 0.0
        if configs is None:
            configs = self.contenders()
            if configs == [self.plan.baseline]:
                configs = [*configs, *configs]
            if not self._may_run_in_turn(configs):
                return budget.final_rounds * sum(self.expected_s([c]) for c in configs)
        for measured in filter(None, map(self.state.measured, configs)):
            step_s = statistics.fmean(measured.step_times_s)
            if len(configs) > 1:  # all together eight times as long as one alone
                whole_s += max(1.0, 8 / len(configs)) * budget.measure_time_s + step_s
            else:
                steps_s = max(budget.when_measured_again["measure_steps"] * step_s, budget.measure_time_s / 4)
                whole_s += min(steps_s, math.ceil(budget.measure_time_s / step_s) * step_s)
        return whole_s + sum(map(self.setup_s, configs))

    def setup_s(self, config: TrainConfig) -> float:
        """Return the expected seconds of a final trial of `config` before its measured steps."""
        measured, budget = self.state.measured(config), self.plan.budget
        if measured is None:
            return 0.0
        step_s, workload = statistics.fmean(measured.step_times_s), self.plan.workload
        warm_s = step_s * workload.warm_up_micro_steps(config) / workload.accumulation_steps(config)
        first_s = measured.first_step_s - step_s
        if config.torch_compile_backend is not None and self.plan.objective.run_samples is None:
            # The share of a compiling first step that is left when its code is in inductor's cache: 0.10 to 0.16 were
            # measured on the stand-in for CUDA (GPT-2 of 8 layers, Llama, T5 and BERT of 12), 0.10 on a CPU.
            first_s *= 1 / 6
        return measured.startup_s + first_s + warm_s + budget.discarded_s + budget.discarded_steps * warm_s + 2.0

    def merged(self, config: TrainConfig) -> Measurement | None:
        """Return the final trials of `config` as one measurement: all steps, the highest memory; None without any."""
        if not (measured := self._measured(config)):
            return None
        # In the steady state finals find compiled code in its cache, so the search's trial may have had a colder start.
        starts = self.trials(config) if self.plan.objective.run_samples is not None else self.trials_of(config)
        times, samples = tuple(t for m in measured for t in m.step_times_s), self.plan.workload.samples_per_step(config)
        later = DRIFT[self.plan.hardware.kind]
        others = filter(None, (self._measured(c) for c in self.contenders() if c != config))
        sides = [[m.step_times_s for m in side] for side in (measured, *others)]
        parts = [[part for trial in side for part in parts_of(trial)] for side in sides]
        if self.ran_in_turn() and all(len(side) >= PARTS for side in parts):
            next_run = Spread.of_parts(parts).next_run(parts[0], samples, later=later)
        else:
            spread = Spread.of_trials(sides[:1], sides[1:], by_round=False)
            next_run = spread.next_run(sides[0], samples, later=later)
        return measured[-1].model_copy(
            update={
                "step_times_s": times,
                "samples_per_second": samples / statistics.fmean(times),
                "samples_per_second_interval": next_run,
                "first_step_s": max(r.measurement.first_step_s for r in starts if r.measurement),
                "memory": max((m.memory for m in measured), key=lambda m: m.peak_bytes),
                "alloc_retries": max((m.alloc_retries for m in measured if m.alloc_retries is not None), default=None),
                "warnings": tuple(dict.fromkeys(line for m in measured for line in m.warnings)),
                "conditions": Conditions.worst_of([m.conditions for m in measured if m.conditions is not None]),
            }
        )

    def speedup(self, config: TrainConfig, reference: TrainConfig) -> Speedup | None:
        """Return the throughput of `config` over that of `reference` by their final trials; None if one has none."""
        ours, theirs = self._sample_times(config), self._sample_times(reference)
        if not ours or not theirs:
            return None
        if (compared := self._in_turn(config, reference)) is not None:
            return compared
        one, other = (self._in_turn(c, self.plan.baseline) for c in (config, reference))
        if one is not None and other is not None:
            return one.over(other)
        others = [t for c in self.contenders() if c not in (config, reference) and (t := self._sample_times(c))]
        found = Speedup.of_means(theirs, ours, others)
        # Others that computed beside one side more than beside the other may be all that they differ by.
        kept, theirs_kept = (1 - min(0.99, _share_of_others(self.trials(c))) for c in (config, reference))
        low, high = min(1.0, theirs_kept / kept), max(1.0, theirs_kept / kept)
        wider = Interval(low=low * found.interval.low, high=high * found.interval.high)
        return found.model_copy(update={"interval": wider})

    def corrections(self) -> dict[TrainConfig, float]:
        """Return by which factor the rate of each configuration that was measured once compares with finals."""
        # It takes out changes of the machine's speed since, and the luck of the fastest (`expected_rates`).
        objective, baseline = self.plan.objective, self.plan.baseline
        base, singles = self.merged(baseline), {}
        for result in self.history.ranking():
            config, prediction = result.request.config, result.request.prediction
            measured, lead = self.merged(config), self.speedup(config, baseline)
            again = objective.rate(measured) if measured is not None else None
            if lead is not None and base is not None:
                again = lead.ratio * objective.rate(base)
            predicted = prediction.samples_per_second if prediction and objective.run_samples is None else 0.0
            singles[config] = Single(
                rate=math.log(self.history.rate(result)),
                again=math.log(again) if again is not None else None,
                predicted=math.log(predicted) if predicted > 0 else None,
                was_chosen=config != baseline,
                step_times_s=result.measurement.step_times_s if result.measurement is not None else (),
            )
        expected = zip(singles.items(), expected_rates(list(singles.values())), strict=True)
        return {c: math.exp(rate - single.rate) for (c, single), rate in expected if single.again is None}

    def _in_turn(self, config: TrainConfig, reference: TrainConfig) -> Speedup | None:
        """Return the speed-up by trials that ran in turn, round by round; None if there are none."""
        ours, theirs = self._turns(config), self._turns(reference)
        pairs = [list(zip(theirs[numbers], ours[numbers], strict=False)) for numbers in theirs.keys() & ours.keys()]
        return Speedup.of_pairs(pairs) if pairs else None

    def _measured(self, config: TrainConfig) -> list[Measurement]:
        """Return the final trials of `config` but those in which others took half a machine more than in another."""
        found = [(r.measurement, _share_of_others([r])) for r in self.trials(config) if r.measurement is not None]
        return [measured for measured, share in found if share <= min(taken for _, taken in found) + 0.5]

    def _sample_times(self, config: TrainConfig) -> list[list[float]]:
        """Return the seconds per sample of each measured step, a list per trial; a run's start is spread over it."""
        samples, start_s = self.plan.workload.samples_per_step(config), self._start_s(config)
        measured = [r.measurement for r in self.trials(config) if r.measurement]
        return [[t / samples + start_s for t in m.step_times_s] for m in measured]

    def _start_s(self, config: TrainConfig) -> float:  # per sample, of a run of the objective's length
        return max(map(self.plan.objective.start_s_per_sample, self._measured(config)), default=0.0)

    def _turns(self, config: TrainConfig) -> dict[tuple[int, ...], list[float]]:
        """Return the mean seconds per sample of each turn, by the numbers of the trials in turn; as `_sample_times`."""
        samples, start_s, found = self.plan.workload.samples_per_step(config), self._start_s(config), {}
        for r in self.trials(config):
            if r.measurement is not None and (size := r.measurement.steps_per_turn) is not None:
                times = r.measurement.step_times_s
                turns = (times[begin : begin + size] for begin in range(0, len(times), size))
                found[r.request.in_turn_with] = [statistics.fmean(turn) / samples + start_s for turn in turns]
        return found


def _share_of_others(trials: Sequence[TrialResult]) -> float:
    """Return the share of the machine that other processes took in the trials, as far as it matters."""
    conditions = [r.measurement.conditions for r in trials if r.measurement is not None]
    return statistics.fmean([seen.could_cost(seen.others_share) for seen in conditions if seen is not None] or [0.0])


def _ran_in_turn(result: TrialResult) -> bool:
    return result.measurement is not None and result.measurement.steps_per_turn is not None
