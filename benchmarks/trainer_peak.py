"""Trains a decoder of random weights with the real `transformers.Trainer` and prints the allocator's peaks, as JSON.

    python trainer_peak.py --config '{"model_type": "mistral"}' --length 4096 --batch 4

Weights in bf16, activations checkpointed. On the stand-in or on a GPU; for published readings, whose libraries are
older: runs with any transformers from 4.31.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=json.loads, required=True, help="fields of the model's config.json")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    with torch.device("cuda"):
        named = inspect.signature(transformers.PreTrainedModel.__init__).parameters
        dtype = {"dtype" if "dtype" in named else "torch_dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**options.config), attn_implementation="sdpa", **dtype
        )
    rows = [torch.randint(0, model.config.vocab_size, (options.length,)) for _ in range(2 * options.batch)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=options.batch, max_steps=2, optim="adamw_torch", disable_tqdm=True,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            report_to=[], save_strategy="no",
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        data = [{"input_ids": row, "labels": row.clone()} for row in rows]
        Trainer(model, arguments, train_dataset=data, data_collator=transformers.default_data_collator).train()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(json.dumps({"allocated_bytes": allocated, "reserved_bytes": reserved}))


if __name__ == "__main__":
    main()
