"""Why a prediction is off, as far as is known: by what was run, never by the row. See docs/how-it-works.md."""

from __future__ import annotations

from published.scores import Prediction


def reason(p: Prediction) -> str:
    """Return the known reason for an error of this kind of run."""
    if p.setup.origin == "other":
        return "other model code: the library's model of the same figures stands for it"
    if not p.right:
        near = p.least > 0.9 * p.setup.gpu.memory_bytes
        return "free memory lies in blocks too small to be used" if near else "software and settings only partly stated"
    if p.setup.spread.parallelism.world_size > 1:
        return "sharded: of the allocator one stream is replayed, and blocks of the others can't be used by it"
    if p.reserved > 0.97 * p.setup.gpu.memory_bytes:
        return "near the device's capacity: when the allocator gives blocks back decides"
    return "not explained"
