"""Adds the passes without gradients of post-training to the profile of its micro-step: those of a reference, mostly.

DPO and KTO run the reference's pass when the policy's activations are there already, so its temporaries come on top of
them; where completions are generated it runs before. Its weights are a copy of the model's, but with an adapter, whose
base is the reference, and where all its passes are over before training. Pure arithmetic.
"""

from __future__ import annotations

from typing import Any

from autotune.cost.extend import Extended
from autotune.cost.family import Shape
from autotune.cost.profile import Excerpt, Generation, Line, MemoryPoint, Profile, Repeat
from autotune.values.workload import RecipeKind

_NONE = Line(constant=0.0, per_sample=0.0)
_REFERENCE = "reference"


def scored(
    profile: Profile, kind: RecipeKind, saved: Line, one: Extended, points: tuple[MemoryPoint, ...], excerpt: Excerpt
) -> Profile:
    """Return the profile of a recipe.

    Args:
        profile: Of the micro-step alone.
        kind: The recipe's.
        saved: What the policy's forward pass has saved at its end.
        one: A pass without gradients.
        points: Moments that can be its peak.
        excerpt: Its storages.
    """
    family = profile.family
    work = tuple(w.model_copy(update={"count": w.count * kind.scorings}) for w in one.work)
    flops = Line(
        constant=profile.needed_flops.constant + kind.scorings * one.needed_flops.constant,
        per_sample=profile.needed_flops.per_sample + kind.scorings * one.needed_flops.per_sample,
    )
    found = {"work": profile.work + work, "needed_flops": flops}
    if family.precompute_ref_log_probs:
        return profile.model_copy(update=found)
    weights = tuple(
        group.model_copy(update={"trained": False})
        for group in profile.parameters
        if kind.reference and family.adapter is None
    )
    parameters = profile.excerpt.parameters + tuple(
        group.model_copy(update={"count": 1}) for group in weights for _ in range(group.count)
    )
    names = profile.excerpt.names + (f"{_REFERENCE}.weight",) * (len(parameters) - len(profile.excerpt.names))
    micro_step = profile.excerpt.model_copy(update={"parameters": parameters, "names": names})
    if not kind.generates:
        micro_step = _with_pass(micro_step, excerpt)
        beside = tuple(
            MemoryPoint(
                operator=f"{_REFERENCE}: {point.operator}",
                activations=saved,
                temporaries=Line(
                    constant=point.activations.constant + point.temporaries.constant,
                    per_sample=point.activations.per_sample + point.temporaries.per_sample,
                ),
                gradients=_NONE,
                fresh_gradients=_NONE,
            )
            for point in points
        )
        found |= {name: getattr(profile, name) + beside for name in ("peaks_first", "peaks_later")}
    return profile.model_copy(update={**found, "parameters": profile.parameters + weights, "excerpt": micro_step})


def generation_of(
    config: Any, shape: Shape, profile: Profile, one: Extended, points: tuple[MemoryPoint, ...]
) -> Generation:
    """Return how completions are generated, by a pass without gradients over whole samples.

    Args:
        config: Of the model.
        shape: Of the samples.
        profile: Of the micro-step alone.
        one: The pass.
        points: Moments that can be its peak.
    """
    text, family = config.get_text_config(), profile.family
    half = family.autocast is not None or family.dtype != "float32"
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return Generation(
        prompt=shape.length - shape.completion,
        completion=shape.completion,
        length=shape.length,
        work=one.work,
        peaks=points,
        cache_bytes=2.0 * text.num_hidden_layers * width * (2 if half else 4),
        weights_bytes=profile.weights_bytes,
        layers=text.num_hidden_layers,
        words=text.vocab_size,
    )


def _with_pass(micro_step: Excerpt, one: Excerpt) -> Excerpt:
    """Return an excerpt with the storages of a pass between those of the forward and of the backward pass."""
    at, length = micro_step.forward_end, one.forward_end
    storages = [
        (made + length * (made >= at), freed + length * (freed > at), *rest)
        for made, freed, *rest in micro_step.storages
    ]
    storages += [(made + at, freed + at, *rest) for made, freed, *rest in one.storages]
    moved = [r.model_copy(update={"backward": (r.backward[0] + length, r.backward[1])}) for r in micro_step.repeats]
    # Its weights are listed whole, and it has no backward pass.
    moved += [
        Repeat(forward=(r.forward[0] + at, r.forward[1]), backward=(at + length, 0), parameters=(0, 0), times=r.times)
        for r in one.repeats
    ]
    first = len(micro_step.origins)
    return micro_step.model_copy(
        update={
            "storages": tuple(storages),
            "repeats": tuple(moved),
            "workspaces": tuple(w + length * (w >= at) for w in micro_step.workspaces),
            "origins": micro_step.origins
            + tuple((f"{_REFERENCE}.{m}" if m else _REFERENCE, o) for m, o in one.origins),
            "origin": micro_step.origin + tuple(o + first for o in one.origin),
            "forward_end": at + length,
        }
    )
