"""Records what the device does in some steps, by torch.profiler, and sums it up by kinds of work.

On a GPU each kernel counts by its name, those within an optimizer's step apart; of collectives the time that no other
kernel hides. On a CPU each operator counts without those that it calls. A profiled step takes longer on the host, so
the device's work alone is taken from it: the host's part is what the measured step has beside it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from autotune.values.trial import StepPart, StepParts

_KINDS: tuple[tuple[StepPart, re.Pattern[str]], ...] = (
    ("other devices", re.compile(r"^(nccl|gloo|c10d)")),
    ("attention", re.compile(r"attention|flash|fmha|(?<!log_)(?<!log)softmax(?!_nll)", re.IGNORECASE)),
    ("matrix products", re.compile(r"gemm|gemv|nvjet|cutlass|xmma|conv(?!ert)|::(add)?b?(add)?mm|matmul|linear", re.I)),
)
_OPTIMIZER = "Optimizer.step"  # begins the name of the range in which torch's optimizers step


class StepProfile:
    """The profile of a trial's measured steps, from `start`, which calls `before`, until `busy_s` is asked for."""

    def __init__(self, *, on_cpu: bool, before: Callable[[], None]) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not on_cpu)])
        self._on_cpu, self._before = on_cpu, before

    def start(self) -> None:
        self._before()
        try:
            self._profile.start()
        except RuntimeError:  # a driver that doesn't tell what runs
            self._profile = None

    def busy_s(self, steps: int, *, more_micro_steps: float) -> StepParts | None:
        """Return the seconds of one of `steps`, of `more_micro_steps` times those that ran; None: nothing was seen."""
        if self._profile is None:
            return None
        self._profile.stop()
        parts = (of_cpu if self._on_cpu else of_gpu)(self._profile.events())
        once = ("optimizer", "other devices")
        scaled = {part: s / steps * (1 if part in once else more_micro_steps) for part, s in parts.items()}
        return scaled or None


def of_gpu(events: Iterable[Any]) -> StepParts:
    seen = [event for event in events if event.device_type == DeviceType.CUDA]
    steps = [e.time_range for e in seen if e.is_user_annotation and e.name.startswith(_OPTIMIZER)]
    parts, spans = defaultdict[StepPart, float](float), defaultdict[bool, list[tuple[float, float]]](list)
    for event in (e for e in seen if not e.is_user_annotation):
        span = event.time_range
        kind = kind_of(event.name)
        if kind != "other devices" and any(step.start <= span.start < step.end for step in steps):
            kind = "optimizer"
        spans[kind == "other devices"].append((span.start, span.end))
        parts[kind] += (span.end - span.start) / 1e6
    # Kernels of several streams may run at once; of collectives only the time counts in which nothing else ran.
    computing = _covered(spans[False])
    waiting = _covered(spans[False] + spans[True]) - computing
    summed = sum(s for part, s in parts.items() if part != "other devices")
    found: StepParts = {p: s * computing / summed for p, s in parts.items() if p != "other devices"}
    return {**found, **({"other devices": waiting} if waiting else {})}


def of_cpu(events: Iterable[Any]) -> StepParts:
    parts = defaultdict[StepPart, float](float)
    for event in events:
        within = event
        while within is not None and not within.name.startswith(_OPTIMIZER):
            within = within.cpu_parent
        if within is not None or ("::" in event.name and not event.name.startswith("autograd::")):
            parts["optimizer" if within is not None else kind_of(event.name)] += event.self_cpu_time_total / 1e6
    return dict(parts)


def kind_of(name: str) -> StepPart:
    return next((kind for kind, names in _KINDS if names.search(name)), "element-wise")


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that spans, in microseconds, cover together."""
    covered, end = 0.0, -1.0
    for begin, until in sorted(spans):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered / 1e6
