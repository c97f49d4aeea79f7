"""Which share of a device vLLM may take where it generates beside the training: TRL's `use_vllm` with `colocate`.

vLLM takes its share at the start, for weights in 16 bits and for keys and values. With sleep mode it gives both back
while weights are trained (TRL 1.16 has it sleep at level 2), so that the share has to leave room for the weights and
optimizer states alone. What vLLM computes with comes out of its share too, so the completions told are the most.
"""

from autotune.cost.profile import REFERENCE, Profile
from autotune.units import show_memory
from autotune.values.estimate import MemoryBreakdown


def vllm_note(memory: MemoryBreakdown, profile: Profile, device_bytes: int, completions: int) -> str | None:
    """Return which shares leave the training its room; None: its recipe generates nothing, or no keys are kept.

    `memory`: of the training that generates by transformers; `completions`: of a step.
    """
    how = profile.generation
    if how is None or not how.cached_bytes(1):
        return None
    trains = max(phase.allocated_bytes for phase in memory.phases if phase.name != "generation")
    beyond = memory.device_peak_bytes - memory.allocated_peak_bytes
    rests = memory.weights_bytes + memory.optimizer_state_bytes + beyond
    named = zip(profile.names, profile.made, strict=True)
    elements = sum(group.elements for name, group in named if not group.adapter and not name.startswith(REFERENCE))
    weights, wide = 2 * elements, 1 if profile.family.half else 2
    cached = how.cached_bytes(how.prompt + how.completion) / wide

    def share(taken: float) -> str | None:
        rounded = int(100 * (1 - taken / device_bytes)) / 100
        at_once = int((rounded * device_bytes - weights) / cached)
        if at_once < 1:
            return None
        held = f"all {completions:,}" if at_once >= completions else f"at most {at_once:,} of {completions:,}"
        return f"up to {rounded:.2f}, which holds {held} completions at once"

    beside, asleep = share(trains + beyond), share(rests)
    sleeping = f"with vllm_enable_sleep_mode {asleep}" if asleep else "nor with vllm_enable_sleep_mode"
    told = f"{beside}; {sleeping}" if beside else f"no share fits beside the training; {sleeping}"
    return f"vllm_gpu_memory_utilization, vLLM's weights taking {show_memory(weights)}: {told}"
