"""Trains a model of random weights with the real `transformers.Trainer` and prints the allocator's peaks, as JSON.

    python trainer_peak.py --config '{"model_type": "mistral"}' --length 4096 --batch 4 --checkpointing

On the stand-in or on a GPU. For published readings, whose libraries are older: runs with any transformers from 4.31.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
import time

import torch
import transformers
from transformers import AutoConfig, Trainer, TrainingArguments

HEADS = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "classification": transformers.AutoModelForSequenceClassification,
}


class Samples(torch.utils.data.Dataset):
    """A thousand samples of random tokens, all of one length."""

    def __init__(self, vocabulary: int, length: int, head: str, *, mask: bool) -> None:
        self._vocabulary, self._length, self._head, self._mask = vocabulary, length, head, mask

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self._vocabulary, (self._length,))
        sample = {"input_ids": tokens, "labels": torch.tensor(0) if self._head == "classification" else tokens.clone()}
        if self._mask:
            sample["attention_mask"] = torch.ones(self._length, dtype=torch.long)
        return sample


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    """Return the model, on the device."""
    config = AutoConfig.for_model(**options.config)
    with torch.device("cuda"):
        dtype = getattr(torch, options.dtype)
        key = (
            "dtype" if "dtype" in inspect.signature(transformers.PreTrainedModel.__init__).parameters else "torch_dtype"
        )
        model = HEADS[options.head].from_config(config, attn_implementation=options.attention, **{key: dtype})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        wanted = options.targets.split(",") if options.targets else "all-linear"
        model = get_peft_model(model, LoraConfig(r=options.lora, lora_dropout=options.dropout, target_modules=wanted))
        model.enable_input_require_grads()
    return model


def arguments(options: argparse.Namespace, folder: str) -> TrainingArguments:
    """Return what the Trainer is told."""
    return TrainingArguments(
        folder,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        max_steps=options.steps,
        bf16=options.bf16,
        fp16=options.fp16,
        optim=options.optim,
        gradient_checkpointing=options.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": options.reentrant} if options.checkpointing else None,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    """Train a few steps and print the peaks."""
    options = parse_options()
    started = time.monotonic()
    model = make_model(options)
    weights = torch.cuda.memory_allocated()
    samples = Samples(model.config.vocab_size, options.length, options.head, mask=options.mask)
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.reset_peak_memory_stats()
        Trainer(
            model,
            arguments(options, folder),
            train_dataset=samples,
            data_collator=transformers.default_data_collator,
        ).train()
    peaks = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": weights,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "duration_s": round(time.monotonic() - started, 1),
    }
    print(json.dumps(peaks))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=json.loads, required=True, help="fields of the model's config.json")
    parser.add_argument("--head", choices=HEADS, default="causal")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--fp16", action="store_true", help="mixed precision")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--reentrant", action="store_true", help="checkpointing as before torch 2.1")
    parser.add_argument("--mask", action="store_true", help="samples have an attention mask")
    parser.add_argument("--lora", type=int, default=0, help="rank")
    parser.add_argument("--dropout", type=float, default=0.0, help="of LoRA's")
    parser.add_argument(
        "--targets", default="", help="modules that LoRA adapts, with commas between; all that are linear"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
