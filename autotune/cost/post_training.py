"""Post-training in the trace of a micro-step: the head that TRL puts on a decoder, and further passes.

The head, log-probabilities of the next tokens without the logits of all of them, is as `ChunkedLogProbFunction` of TRL
1.16 (trl/kernels/chunked_logprob.py): products of tiles of 4,096 tokens and 32,768 words, once more in the backward
pass. On CUDA a kernel folds a tile in place, and only completions are scored; on the CPU torch's operators make further
tensors of a tile's size. The passes without gradients are mostly those of a reference, a copy of the model unless there
is an adapter. DPO and KTO run them when the policy's activations are there already, GRPO before.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from autotune.cost.family import Shape
from autotune.cost.profile import NORMALISATION, REFERENCE, Completions, Line, Profile, Storages, Work
from autotune.cost.tape import Recorder
from autotune.training.loss import base_model
from autotune.values.workload import RecipeKind

_TOKENS, _WORDS = 4096, 32768  # TOKEN_CHUNK_SIZE, and _CHUNKED_LOGPROB_CHUNK_SIZE of trl/trainer/utils.py


@contextlib.contextmanager
def log_probs_head(model: Any, recorder: Recorder, *, on_cuda: bool, dtype: torch.dtype, scored: int) -> Iterator[None]:
    """Have a decoder return `loss`, the mean of its log-probabilities, and never its logits.

    `on_cuda`: with Triton; `dtype`: of the products; `scored`: tokens of a row whose log-probabilities count.
    """
    base = base_model(model)

    def forward(labels: Any = None, **inputs: Any) -> dict[str, torch.Tensor]:
        hidden = base.base_model(**inputs).last_hidden_state[:, :-1]
        rows, length, width = hidden.shape
        if on_cuda:
            positions = torch.arange(rows * length, device=hidden.device)[: rows * min(scored, length)]
            hidden = hidden[positions // length, positions % length]
        else:
            hidden = hidden.reshape(-1, width)
        head = base.get_output_embeddings()
        log_probs = _LogProbs.apply(hidden, head.weight, _Head(recorder, on_cuda, dtype))  # type: ignore[no-untyped-call]
        return {"loss": -log_probs.sum() / log_probs.numel()}

    with mock.patch.object(base, "forward", forward):
        yield


@dataclass(frozen=True)
class _Head:
    recorder: Recorder
    on_cuda: bool
    dtype: torch.dtype

    def tiles(self, hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield products of hidden states with a part of the vocabulary, in one buffer, and that part."""
        tokens, words = min(len(hidden), _TOKENS), min(len(weight), _WORDS)
        wide = _WORDS if self.on_cuda else words  # pages of a CPU's buffer that nothing is written to aren't there
        buffer = hidden.new_empty((tokens, wide), dtype=self.dtype)
        rows = hidden[:tokens].to(self.dtype)
        for start in range(0, len(weight), words):
            part = weight[start : start + words].to(self.dtype)
            tile = buffer[:, : len(part)]
            self.product("mm", hidden, part, rows, tile)
            yield tile, part

    def product(self, name: str, hidden: torch.Tensor, part: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Write down a product of all hidden states with a part of the vocabulary."""
        self.recorder.note_kernel(name, 2.0 * hidden.numel() * len(part), *tensors, part)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: _Head) -> torch.Tensor:
        statistics = hidden.new_empty((7, len(hidden)), dtype=torch.float32)
        for tile, _ in head.tiles(hidden, weight):
            if head.on_cuda:
                head.recorder.note_kernel("log_probs", 0.0, tile, kind=NORMALISATION)
                continue
            z = tile.float() * 1.0 * 1.0
            exponents = torch.exp(z - 1.0)
            statistics[0, : len(z)] += exponents.sum(-1)
            statistics[1, : len(z)] += (exponents * z).sum(-1)
            del z, exponents
        normaliser, result = statistics[0] + 1.0, statistics[0] - 1.0
        ctx.save_for_backward(hidden, weight, normaliser)
        ctx.head = head
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (hidden, weight, _), head = ctx.saved_tensors, ctx.head
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        head.recorder.recomputing = True
        for tile, part in head.tiles(hidden, weight):
            head.recorder.recomputing = False
            if head.on_cuda:
                head.recorder.note_kernel("log_probs_backward", 0.0, tile, kind=NORMALISATION)
            else:
                _fold_backward(tile)
            for needed in (of_hidden, of_weight):
                if needed is not None:
                    halves = () if head.on_cuda else (tile.float(), part.float())
                    head.product("addmm", hidden, part, tile, needed)
                    del halves
            head.recorder.recomputing = True
        head.recorder.recomputing = False
        pairs = ((of_hidden, hidden), (of_weight, weight))
        return (*(None if found is None else found.to(given.dtype) for found, given in pairs), None)


def _fold_backward(tile: torch.Tensor) -> None:
    """Run the operators that make the gradient of a tile on the CPU: `_backward_tile`."""
    y = tile.float() * 1.0
    z = y * 1.0
    log_p = z - 1.0
    p = torch.exp(log_p)
    gradient = torch.zeros_like(z)
    is_target = torch.arange(tile.shape[1], device=z.device) == z.new_empty((len(z), 1))
    gradient += 1.0 * (is_target.float() - p)
    gradient = gradient * 1.0
    tile.copy_(gradient * 1.0)


def scored(profile: Profile, kind: RecipeKind, work: tuple[Work, ...], needed: Line, one: Storages) -> Profile:
    """Return the profile of a recipe, from that of the micro-step alone and one pass without gradients."""
    again = tuple(w.model_copy(update={"count": w.count * kind.scorings}) for w in work)
    flops = Line(
        constant=profile.needed_flops.constant + kind.scorings * needed.constant,
        per_sample=profile.needed_flops.per_sample + kind.scorings * needed.per_sample,
    )
    found: dict[str, Any] = {"work": profile.work + again, "needed_flops": flops}
    if profile.family.precompute_ref_log_probs:
        return profile.model_copy(update=found)
    is_copied = kind.reference and profile.family.adapter is None
    weights = tuple(g.model_copy(update={"trained": False}) for g in profile.parameters if is_copied)
    copies = [len(profile.parameters) + at for at, group in enumerate(weights) for _ in range(group.count)]
    found |= {"parameters": profile.parameters + weights, "order": (*profile.order, *copies)}
    found["names"] = profile.names + (f"{REFERENCE}.weight",) * len(copies)
    if not kind.generates:  # the pass comes between the forward and the backward pass
        step, at, length = profile.storages, profile.storages.forward_end, one.forward_end
        rows, more = step.rows.copy(), one.rows.copy()
        rows[:, 0] += length * (rows[:, 0] >= at)
        rows[:, 1] += length * (rows[:, 1] > at)
        more[:, :2] = np.minimum(more[:, :2], length) + at
        more[:, 6] += len(step.origins)
        found["storages"] = Storages.of(
            np.concatenate([rows, more]),
            forward_end=at + length,
            workspaces=tuple(w + length * (w >= at) for w in step.workspaces),
            origins=step.origins + tuple((f"{REFERENCE}.{m}" if m else REFERENCE, o) for m, o in one.origins),
        )
    return profile.model_copy(update=found)


def completions_of(
    config: Any, shape: Shape, profile: Profile, work: tuple[Work, ...], storages: Storages
) -> Completions:
    """Return how completions are generated, by work and storages of a pass without gradients over whole samples."""
    text = config.get_text_config()
    return Completions(
        prompt=shape.length - shape.completion,
        completion=shape.completion,
        length=shape.length,
        work=work,
        storages=storages,
        cache_bytes=1.0 * cached_elements(text) * (2 if profile.family.half else 4),
        caches=caches_of(text, shape.length),
        weights_bytes=profile.weights_bytes,
        words=text.vocab_size,
    )


def caches_of(text: Any, length: int) -> tuple[tuple[int, int], ...]:
    """Return how many layers cache up to how many tokens of `length`, as transformers' `DynamicCache` has it."""
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers
    kept: Counter[int] = Counter()
    for kind in kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)]:
        if "sliding" in kind or kind == "chunked_attention":
            kept[min(length, window or length)] += 1
        elif kind not in ("linear_attention", "conv", "mamba", "moe", "mlp"):  # whose state is fixed, if any
            kept[length] += 1
    return tuple((layers, most) for most, layers in kept.items())


def cached_elements(text: Any) -> int:
    """Return the elements of a token's keys and values, as a layer caches them; 0 of a model without attention."""
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0
    if getattr(text, "kv_lora_rank", None):  # DeepSeek's, which transformers 5.24 caches compressed
        return int(text.kv_lora_rank + text.qk_rope_head_dim)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * (getattr(text, "num_key_value_heads", None) or heads) * width)
