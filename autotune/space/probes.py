"""Shallow probes: what a configuration takes at full depth, inferred from two shallow versions of the model.

Time and memory of a step are lines in the depth of a model of equal layers, but for noise and for what fits in a cache
only while the model is shallow. So a candidate is first run at two small depths; the line through them teaches the
cost model, which then chooses whether it is worth a trial at full depth. What is inferred ranks and is never shown as
measured; only trials at full depth can win. Pure: the tuner runs what is said here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autotune.errors import InputError
from autotune.space.history import History
from autotune.values.checkpointing import KINDS
from autotune.values.config import TrainConfig, Workload
from autotune.values.model import ModelFacts, ProbeDepths
from autotune.values.statistics import half_width
from autotune.values.trial import Interval, Limits, Measurement, Memory, Purpose, TrialResult

# Devices on which deep models are probed unless the user says otherwise. On the CPU inferred times missed their aim of
# 5 % (docs/cost-model.md); on CUDA nothing was measured.
BY_DEFAULT: dict[str, bool] = {"cpu": False, "cuda": False}

# A peak is the highest of several moments, each a line in depth: one that is further below what is predicted than
# predictions are off (docs/cost-model.md) is of another moment than the full depth's peak, and tells nothing of it.
OTHER_MOMENT = 0.95

# Noise of a probe is carried along the line, so it measures for no less than this share of a trial's time.
LEAST_SHARE = 1 / 8

# Two probes are run only where they should take less than this share of a trial at full depth.
WORTHWHILE_SHARE = 0.5


def planned(asked: bool | None, facts: ModelFacts, device: str, *, exhaustive: bool) -> ProbeDepths | None:
    """Return the depths at which candidates of a search are probed; None: they aren't.

    Args:
        asked: By the user; None for the device's default.
        facts: Of the model.
        device: Kind of it.
        exhaustive: Whether all points are measured anyway.

    Raises:
        InputError: Probes were asked for and can't be had.
    """
    if asked and exhaustive:
        raise InputError("--shallow: --exhaustive measures every point at full depth; leave one of the two out")
    if asked and facts.probes is None:
        raise InputError(f"--shallow: {facts.not_probed or 'nothing is known of its layers'}; leave it out")
    wanted = BY_DEFAULT.get(device, False) if asked is None else asked
    return facts.probes if wanted and not exhaustive else None


def shortened(limits: Limits, share: float) -> Limits:
    """Return the limits of a trial for a model of `share` of the depth: about as many steps in less time."""
    return limits.model_copy(update={"measure_time_s": limits.measure_time_s * max(share, LEAST_SHARE)})


def inferred(low: TrialResult, high: TrialResult, depths: ProbeDepths, samples: int) -> TrialResult | None:
    """Return what a trial at full depth should give, None if the probes tell nothing of it.

    The interval holds the noise of both probes, carried along the line, and not what of a step is no line in depth.

    Args:
        low: The shallower probe.
        high: The other one, of the same configuration.
        depths: Theirs.
        samples: Of an optimizer step.
    """
    if low.measurement is None or high.measurement is None:
        return None
    times = [m.step_times_s for m in (low.measurement, high.measurement)]
    first_s, second_s = map(statistics.fmean, times)
    if second_s <= first_s:
        return None
    step_s = _line(first_s, second_s, depths)
    half_s = (depths.beyond * half_width(times[0])) ** 2 + ((1 + depths.beyond) * half_width(times[1])) ** 2
    half_s **= 0.5
    rate = samples / step_s
    tokens = high.measurement.tokens_per_second
    measurement = high.measurement.model_copy(
        update={
            "step_times_s": (step_s,),
            "samples_per_second": rate,
            "samples_per_second_interval": Interval(
                low=samples / (step_s + half_s), high=samples / (step_s - half_s) if half_s < step_s else float("inf")
            ),
            "tokens_per_second": None if tokens is None else tokens * rate / high.measurement.samples_per_second,
            "memory": _memory(low, high, depths),
        }
    )
    return high.model_copy(update={"outcome": measurement, "request": high.request.model_copy(update={"depths": {}})})


def _most(errors: Sequence[float]) -> str:
    return f"{max(errors, key=abs):+.1%}"


def _line(low: float, high: float, depths: ProbeDepths) -> float:
    return high + (high - low) * depths.beyond


def _memory(low: TrialResult, high: TrialResult, depths: ProbeDepths) -> Memory:
    """Return the memory at full depth, without figures where the line is of another moment than the peak there."""
    ends = [dict(result.outcome.memory or Memory()) for result in (low, high)]
    found = Memory(
        **{
            name: None if None in (ends[0][name], ends[1][name]) else round(_line(ends[0][name], ends[1][name], depths))
            for name in Memory.model_fields
        }
    )
    expected = high.request.prediction
    if found.is_known and expected is not None and found.peak_bytes < OTHER_MOMENT * expected.peak_bytes:
        return Memory()
    return found


class Probes:
    """The probes of one search.

    Args:
        depths: At which candidates are probed; None: not at all.
        workload: What is trained.
        history: The trials at full depth, read live.
        results: All trials, read live.
    """

    def __init__(
        self, depths: ProbeDepths | None, workload: Workload, history: History, results: Sequence[TrialResult]
    ) -> None:
        self._depths = depths
        self._workload = workload
        self._history = history
        self._results = results

    def next(self, config: TrainConfig) -> dict[str, int] | None:
        """Return the depth at which `config` is to be run now; None if all is known that probes can tell of it."""
        if self._depths is None or not self._is_told_by(config) or not self._pays(self._depths):
            return None
        done = self._of(config)
        if any(probe.measurement is None for probe in done):
            return None  # the full depth says better why
        return next((d for d in (self._depths.low, self._depths.high) if _at(done, d) is None), None)

    def inferred(self, config: TrainConfig) -> TrialResult | None:
        """Return what `config` should give at full depth, None before both its probes are done."""
        if self._depths is None:
            return None
        low, high = (_at(self._of(config), d) for d in (self._depths.low, self._depths.high))
        if low is None or high is None:
            return None
        return inferred(low, high, self._depths, self._workload.samples_per_step(config))

    def lesson(self, result: TrialResult) -> TrialResult | None:
        """Return what the cost model has to learn from a finished trial, None if nothing."""
        if result.request.purpose.explores:
            return result
        return self.inferred(result.request.config) if result.request.purpose is Purpose.PROBE else None

    def summary(self) -> str | None:
        """Say how far off the inferred figures were where the full depth was run too; None without probes."""
        configs = dict.fromkeys(r.request.config for r in self._results if r.request.purpose is Purpose.PROBE)
        if not configs or self._depths is None:
            return None
        many = "configurations were" if len(configs) > 1 else "configuration was"
        text = f"shallow probes: {len(configs)} {many} inferred from {self._depths}"
        pairs = [pair for config in configs if (pair := self._guess_and_truth(config)) is not None]
        times = [truth.samples_per_second / guess.samples_per_second - 1 for guess, truth in pairs]
        peaks = [g.memory.peak_bytes / truth.memory.peak_bytes - 1 for g, truth in pairs if g.memory.is_known]
        if times:
            text += f"; of {len(times)} that also ran at full depth the step time was off by up to {_most(times)}"
        if peaks:
            text += f", the peak memory of {len(peaks)} by {_most(peaks)}"
        return text

    def _guess_and_truth(self, config: TrainConfig) -> tuple[Measurement, Measurement] | None:
        """Return what was inferred and what was measured at full depth."""
        guess, known = self.inferred(config), self._history.known(config)
        if guess is None or known is None or guess.measurement is None or known.measurement is None:
            return None
        return guess.measurement, known.measurement

    def _is_told_by(self, config: TrainConfig) -> bool:
        """Whether every layer is treated alike, and a start doesn't cost as much as a trial."""
        every = 1 if config.checkpointing == "none" else KINDS[config.checkpointing].every
        return every == 1 and config.torch_compile_backend is None

    def _pays(self, depths: ProbeDepths) -> bool:
        """Whether two probes should take much less than a trial at full depth, by those that have run."""
        known = [(r, r.measurement) for r in self._history.results if r.measurement is not None]
        if not known:
            return False
        whole_s = statistics.median(r.duration_s for r, _ in known)
        start_s = min(whole_s, statistics.median(m.startup_s for _, m in known))
        share = depths.share(depths.low) + depths.share(depths.high)
        return 2 * start_s + share * (whole_s - start_s) <= WORTHWHILE_SHARE * whole_s

    def _of(self, config: TrainConfig) -> list[TrialResult]:
        return [r for r in self._results if r.request.purpose is Purpose.PROBE and r.request.config == config]


def _at(probes: Sequence[TrialResult], depths: dict[str, int]) -> TrialResult | None:
    """Return the latest probe at a depth."""
    return next((r for r in reversed(probes) if r.request.depths == depths), None)
