"""The optimizers of transformers' Trainer: their requirements and limits.

The table has a row for each name of `OptimizerNames` in transformers 5.23 (a test compares it with the installed
version), from its `trainer_optimizer.py` and from running each. Their memory and time are in `cost.optimizers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from autotune.errors import suggestion


@dataclass(frozen=True)
class OptimizerFacts:
    """Requirements and properties of an optimizer.

    Attributes:
        package: Distribution that it needs beside torch and transformers.
        device: "cuda" if its kernels need CUDA.
        compiles: Its step uses torch.compile, which needs a C++ compiler on a CPU.
        targets: It projects the gradients of chosen layers, which `optim_target_modules` has to name.
        updates_in_backward: It updates weights during the backward pass, so with accumulation in every micro-batch.
        class_name: Qualified name of the class that runs.
        attributes: Names and values that a trial verifies, on the instance, its first parameter group or bitsandbytes'
            arguments.
        takes_bf16: Whether it has kernels for gradients in bf16 on CUDA.
        unusable: Why it can't run anywhere; None: it can.
    """

    package: str | None = None
    device: Literal["any", "cuda"] = "any"
    compiles: bool = False
    targets: bool = False
    updates_in_backward: bool = False
    class_name: str = ""
    attributes: tuple[tuple[str, object], ...] = ()
    takes_bf16: bool = True
    unusable: str | None = None


def _torch(name: str, **attributes: object) -> OptimizerFacts:
    return OptimizerFacts(class_name=f"torch.optim.{name}", attributes=tuple(attributes.items()))


def _bitsandbytes(name: str, bits: int, *, paged: bool = False, takes_bf16: bool = True) -> OptimizerFacts:
    attributes: tuple[tuple[str, object], ...] = (("optim_bits", bits),)
    if paged:
        attributes += (("is_paged", True),)
    return OptimizerFacts(
        package="bitsandbytes",
        device="cuda" if paged else "any",
        class_name=f"bitsandbytes.optim.{name}",
        attributes=attributes,
        takes_bf16=takes_bf16,
    )


def _projected(package: str, name: str, *, layerwise: bool = False, cuda: bool = False) -> OptimizerFacts:
    return OptimizerFacts(
        package=package,
        device="cuda" if cuda else "any",
        targets=True,
        updates_in_backward=layerwise,
        class_name="transformers.trainer_pt_utils.LayerWiseDummyOptimizer" if layerwise else name,
    )


def _galore(name: str, *, layerwise: bool = False, cuda: bool = False) -> OptimizerFacts:
    return _projected("galore-torch", f"galore_torch.{name}", layerwise=layerwise, cuda=cuda)


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adafactor": OptimizerFacts(class_name="transformers.optimization.Adafactor"),
    "adagrad": _torch("adagrad.Adagrad"),
    "adalomo": OptimizerFacts(
        package="lomo-optim", device="cuda", updates_in_backward=True, class_name="lomo_optim.adalomo.AdaLomo"
    ),
    "adamw_8bit": _bitsandbytes("adamw.AdamW", 8),
    "adamw_anyprecision": OptimizerFacts(
        unusable="torchdistx, which it is from, is archived and has no build for this torch; pure_bf16 with "
        "adafactor or adamw_bnb_8bit saves as much"
    ),
    "adamw_bnb_8bit": _bitsandbytes("adamw.AdamW", 8),
    "adamw_torch": _torch("adamw.AdamW", fused=None),
    "adamw_torch_4bit": OptimizerFacts(package="torchao", compiles=True, class_name="torchao.optim.adam.AdamW4bit"),
    "adamw_torch_8bit": OptimizerFacts(package="torchao", compiles=True, class_name="torchao.optim.adam.AdamW8bit"),
    "adamw_torch_fused": _torch("adamw.AdamW", fused=True),
    "adamw_torch_npu_fused": OptimizerFacts(unusable="it needs an Ascend NPU (torch_npu)"),
    "adamw_torch_xla": OptimizerFacts(unusable="it needs an XLA device (torch_xla)"),
    "ademamix": _bitsandbytes("ademamix.AdEMAMix", 32),
    "ademamix_8bit": _bitsandbytes("ademamix.AdEMAMix", 8),
    "apollo_adamw": _projected("apollo-torch", "apollo_torch.apollo.AdamW"),
    "apollo_adamw_layerwise": _projected("apollo-torch", "apollo_torch.apollo.AdamW", layerwise=True),
    "galore_adafactor": _galore("adafactor.Adafactor"),
    "galore_adafactor_layerwise": OptimizerFacts(
        unusable="transformers gives it a learning rate and a relative step, which it refuses; galore_adafactor works"
    ),
    "galore_adamw": _galore("adamw.AdamW"),
    "galore_adamw_8bit": _galore("adamw8bit.AdamW8bit", cuda=True),
    "galore_adamw_8bit_layerwise": _galore("adamw8bit.AdamW8bit", layerwise=True, cuda=True),
    "galore_adamw_layerwise": _galore("adamw.AdamW", layerwise=True),
    "grokadamw": OptimizerFacts(package="grokadamw", class_name="grokadamw.grokadamw.GrokAdamW"),
    "lion_32bit": _bitsandbytes("lion.Lion", 32),
    "lion_8bit": _bitsandbytes("lion.Lion", 8),
    "lomo": OptimizerFacts(package="lomo-optim", updates_in_backward=True, class_name="lomo_optim.lomo.Lomo"),
    "paged_ademamix_32bit": _bitsandbytes("ademamix.AdEMAMix", 32, paged=True),
    "paged_ademamix_8bit": _bitsandbytes("ademamix.AdEMAMix", 8, paged=True),
    "paged_adamw_32bit": _bitsandbytes("adamw.AdamW", 32, paged=True),
    "paged_adamw_8bit": _bitsandbytes("adamw.AdamW", 8, paged=True),
    "paged_lion_32bit": _bitsandbytes("lion.Lion", 32, paged=True),
    "paged_lion_8bit": _bitsandbytes("lion.Lion", 8, paged=True),
    "rmsprop": _torch("rmsprop.RMSprop"),
    "rmsprop_bnb": _bitsandbytes("rmsprop.RMSprop", 32, takes_bf16=False),
    "rmsprop_bnb_32bit": _bitsandbytes("rmsprop.RMSprop", 32, takes_bf16=False),
    "rmsprop_bnb_8bit": _bitsandbytes("rmsprop.RMSprop", 8, takes_bf16=False),  # small weights have states in 32 bits
    "schedule_free_adamw": OptimizerFacts(
        package="schedulefree", class_name="schedulefree.adamw_schedulefree.AdamWScheduleFree"
    ),
    "schedule_free_radam": OptimizerFacts(
        package="schedulefree", class_name="schedulefree.radam_schedulefree.RAdamScheduleFree"
    ),
    "schedule_free_sgd": OptimizerFacts(
        package="schedulefree", class_name="schedulefree.sgd_schedulefree.SGDScheduleFree"
    ),
    "sgd": _torch("sgd.SGD"),
    "stable_adamw": OptimizerFacts(package="torch-optimi", class_name="optimi.stableadamw.StableAdamW"),
}

# Names that transformers 5 has removed, and their equivalents.
SUCCESSORS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


def _known(name: str) -> str:
    if name in SUCCESSORS:
        raise ValueError(f"{name} is gone from transformers 5; use {SUCCESSORS[name]}")
    if name not in OPTIMIZERS:
        raise ValueError(f"transformers has no optimizer {name!r}{suggestion(name, OPTIMIZERS)}")
    return name


OptimizerName = Annotated[str, AfterValidator(_known)]

# All distributions that optimizers need.
PACKAGES = tuple(sorted({facts.package for facts in OPTIMIZERS.values() if facts.package is not None}))
