"""All of a model's weights on each rank, although DeepSpeed is going to split them: for losses that are compared.

Under ZeRO-3 transformers splits weights while it draws them, in an order of its own, so that they aren't those of one
device. DeepSpeed splits a whole model just as well when training begins, if there is the memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def whole_weights() -> Iterator[None]:
    """Have transformers not know of DeepSpeed while entered."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept
