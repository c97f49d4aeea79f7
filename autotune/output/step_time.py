"""Where the time of a training step goes, and which knob would shrink the largest parts, as rows and lines of text."""

import re
from collections.abc import Callable, Mapping

from autotune.units import show_rate
from autotune.values.config import TrainConfig
from autotune.values.result import ResultData, StepTime
from autotune.values.trial import StepPart, StepParts

_LARGER = "a larger micro-batch or "
# The share of a step from which on a part is worth a word, the word, and which configurations could still follow it.
_ADVICE: dict[StepPart, tuple[float, str, Callable[[TrainConfig], bool]]] = {
    "host": (0.25, f"{_LARGER}compiling leaves it less to do", lambda c: c.torch_compile_backend is None),
    "data": (0.1, "more dataloader workers load data meanwhile", lambda c: True),
    "other devices": (0.15, f"{_LARGER}less sharding waits less", lambda c: True),
    "optimizer": (0.15, "a fused or 8-bit optimizer steps faster", lambda c: not re.search("fused|8bit|4bit", c.optim)),
    "attention": (0.3, "a fused attention kernel is faster", lambda c: c.attn_implementation == "eager"),
    "element-wise": (0.35, "compiling fuses element-wise operators", lambda c: c.torch_compile_backend is None),
}


def step_lines(result: ResultData) -> list[str]:
    """Return where a step of the winner spends its time, the largest parts first, and what would shrink one of them."""
    if (step := result.best.step) is None:
        return []
    largest = sorted(step.shares.items(), key=lambda part: -part[1])
    lines = [f"a step's time goes to: {parts_line(step.shares)} ({step.source})"]
    config, idle = result.best.config, step.shares.get("host", 0.0) + step.shares.get("data", 0.0)
    advised = [(part, s) for part, s in largest if part in _ADVICE and s >= _ADVICE[part][0]]
    # The winner left behind what the baseline has.
    able = [(part, s) for part, s in advised if all(map(_ADVICE[part][2], (config, result.baseline.config)))]
    if able:
        part, share = able[0]
        words = _ADVICE[part][1]
        if result.workload.global_batch_size is not None and result.workload.accumulation_steps(config) == 1:
            words = words.removeprefix(_LARGER)
        busy = f"the GPU is busy for {1 - idle:.0%} of a step: the host can't keep up; "
        is_idle = part == "host" and not result.hardware.is_cpu
        lines.append((busy if is_idle else f"{share:.0%} of a step is {part}: ") + words)
    return lines


def parts_line(shares: StepParts) -> str:
    """Return the parts of a step that are not small, the largest first."""
    largest = sorted(shares.items(), key=lambda part: -part[1])
    return ", ".join(f"{share:.0%} {part}" for part, share in largest if share >= 0.03)


def step_rows(steps: Mapping[str, StepTime]) -> list[tuple[str, ...]]:
    """Return a heading and rows with the seconds and shares of each part, a column a side; nothing if none is known."""
    if not steps:
        return []
    most = {part: max(s.shares.get(part, 0.0) for s in steps.values()) for s in steps.values() for part in s.shares}
    heading = ("", *(f"{side}, {step.source}" for side, step in steps.items()))
    rows = []
    for part in sorted(most, key=lambda p: -most[p]):
        of_each = ((step.seconds, step.shares.get(part)) for step in steps.values())
        rows.append((part, *(f"{show_rate(s * share)} s, {share:.0%}" if share else "–" for s, share in of_each)))
    return [heading, *rows, ("a step", *(f"{show_rate(step.seconds)} s" for step in steps.values()))]
