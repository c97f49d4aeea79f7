"""Makes the routers of a mixture of experts uneven for one trial, and counts which experts the tokens go to.

Routers with random weights share tokens out almost evenly; trained ones don't, and the busiest expert sets the pace and
the memory of some implementations. A constant vector is added to a router's input, which its weights turn into a bias
of the logits that falls with the logarithm of an expert's rank, as in Zipf's law. No code of the model is replaced,
and training goes on through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import NoEffectError
from autotune.training.facts import experts_of
from autotune.values.checks import Routed


@contextmanager
def skewed_routing(model: nn.Module, forward: Callable[[], Any]) -> Iterator[Callable[[], Routed]]:
    """Route unevenly in here; yields a function that measures how unevenly, of the batch that `forward` runs.

    Raises NoEffectError if no router is found, or the experts get as even a share as before.
    """
    experts, routers = experts_of(model.config), routers_of(model)
    spreads: dict[nn.Module, float] = {}

    def note(router: nn.Module, args: tuple[Any, ...]) -> None:
        inputs, weights = args[0].detach().float(), _weights(router)
        spreads[router] = float((inputs.reshape(-1, weights.shape[1]) @ weights.T).std(dim=0).mean())

    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(router.register_forward_pre_hook(note))
        even = busiest_share(model, forward)
    with ExitStack() as stack:
        for number, router in enumerate(routers):
            ranks = torch.roll(torch.arange(1, experts + 1, dtype=torch.float32), number % experts)
            shifted = _shifted(router, spreads.get(router, 0.0), ranks)
            stack.enter_context(router.register_forward_pre_hook(shifted))

        def routed() -> Routed:
            share = busiest_share(model, forward)
            if share <= even:
                raise NoEffectError(f"the busiest expert gets {share:.0%} of the tokens, with even routing {even:.0%}")
            return Routed(busiest_share=share, even_busiest_share=even)

        yield routed


def _shifted(router: nn.Module, spread: float, ranks: Tensor) -> Callable[..., tuple[Any, ...]]:
    """Return a hook that shifts a router's input so that its logits fall with the experts' ranks.

    `spread` is the standard deviation of its logits over the tokens, by which the bias is scaled.
    """
    weights = _weights(router)
    bias = -spread * ranks.to(weights.device).log()
    shift = torch.linalg.pinv(weights) @ (bias - bias.mean())

    def add(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] + shift.to(args[0].dtype), *args[1:])

    return add


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose weights hold a row for each expert, or raise NoEffectError if there are none."""
    experts = experts_of(model.config)
    layers = [module for name, module in model.named_modules() if _is_router(name, module, experts)]
    if not layers:
        raise NoEffectError(f"{type(model).__name__}: no layer was recognised as the router of its {experts} experts")
    return layers


def busiest_share(model: nn.Module, forward: Callable[[], Any]) -> float:
    """Return the share of the tokens that the busiest expert of a layer gets, as a mean over the layers.

    Raises NoEffectError if the model doesn't tell its experts in a known way which tokens are theirs.
    """
    experts, shares = experts_of(model.config), []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = next((a for a in (*args, *kwargs.values()) if _is_choice(a)), None)
        if chosen is not None:
            tokens = _tokens_of(chosen, experts)
            shares.append(float(tokens.max() / tokens.sum()))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "experts":
                stack.enter_context(module.register_forward_pre_hook(count, with_kwargs=True))
        forward()
    if not shares:
        raise NoEffectError(f"{type(model).__name__}: it can't be seen which experts its tokens go to")
    return sum(shares) / len(shares)


def _is_router(name: str, module: nn.Module, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    named = any(word in name.lower() for word in ("router", "gate"))
    if not named or not isinstance(weight, Tensor) or not weight.is_floating_point():  # packed bits are no weights
        return False
    return weight.ndim == 2 and weight.shape[0] == experts


def _weights(layer: nn.Module) -> Tensor:
    weights: Tensor = layer.weight.detach()  # type: ignore[operator]
    return weights.float()


def _is_choice(argument: Any) -> bool:
    return isinstance(argument, Tensor) and not argument.is_floating_point() and argument.dtype != torch.bool


def _tokens_of(chosen: Tensor, experts: int) -> Tensor:
    """Return how many tokens each expert gets, from their numbers or from a row of zeros and ones for each token."""
    if chosen.shape[-1] == experts and int(chosen.max()) <= 1 and experts > 2:
        return chosen.reshape(-1, experts).sum(dim=0).float()
    return torch.bincount(chosen.reshape(-1), minlength=experts).float()
