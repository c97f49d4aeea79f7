"""All parts of a pack, in the order in which they run: what is quick and tells most comes first."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pack import configurations as table
from pack.configurations import Configuration
from pack.estimates import compare
from pack.exporting import train_exported
from pack.losses import check_losses
from pack.machine import calibrate, look_at_machine, start_launcher
from pack.part import CUDA, DATA_SHEET, TF32, Part
from pack.searches import parts_of
from pack.sharing import share_device
from pack.tf32 import preset_tf32
from pack.trials import run_configurations
from pack.visible import check_forms

DEADLINE_S = 960.0


def _trials(rows: Sequence[Configuration]) -> functools.partial[None]:
    return functools.partial(run_configurations, configurations=rows)


def parts(models: list[str]) -> list[Part]:
    """Return all parts, with the searches for `models`."""
    return [
        Part("doctor", "what the doctor finds", 10, look_at_machine),
        Part("launcher", "trials are forked from one process", 40, start_launcher),
        Part("visible", "CUDA_VISIBLE_DEVICES in every form", 15, check_forms, (CUDA,)),
        Part("precision", "fp32, tf32, bf16, fp16, pure bf16", 24, _trials(table.PRECISION)),
        Part("attention", "eager, sdpa's flash kernel, flash, flex", 24, _trials(table.ATTENTION)),
        Part("checkpointing", "every kind", 16, _trials(table.CHECKPOINTING)),
        Part("savers", "the loss in chunks, expandable segments, an emptied cache", 32, _trials(table.SAVERS)),
        Part("adapters", "LoRA, QLoRA, int8", 16, _trials(table.ADAPTERS)),
        Part("optimizers", "of torch, Adafactor, 8-bit, paged", 14, _trials(table.OPTIMIZERS)),
        Part("vision", "images by data-loader workers", 10, _trials(table.VISION)),
        Part("overflow", "fp16 that always overflows must not complete", 16, _trials(table.OVERFLOW), (CUDA,)),
        Part("liger", "Liger kernels", 24, _trials(table.LIGER), (CUDA,)),
        Part("compile", "inductor, max-autotune", 130, _trials(table.COMPILATION), (CUDA,)),
        Part("estimates", "estimates beside what trials measure", 20, compare, (DATA_SHEET,)),
        Part("tf32", "TF32 from the environment, and by a script", 32, preset_tf32, (CUDA, TF32)),
        Part("sharing", "another process holds most of the memory", 18, share_device, (CUDA,)),
        Part("losses", "losses beside the reference's, as --check-loss holds them", 20, check_losses),
        *parts_of(models),
        Part("export", "exported against measured throughput", 55, train_exported),
        Part("calibrate", "measured rates of the device", 20, calibrate, (CUDA,)),
    ]
