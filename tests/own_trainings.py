"""Trainings of a user's own, as tests need them: scripts that are written into a directory, and makers of Trainers."""

import pickle
from pathlib import Path
from textwrap import dedent
from typing import Any

from autotune.value import write_value
from autotune.values.trial import Description, Inquiry, Refusal
from autotune.values.workload import OwnCode

# A module with a loss of its own, in a plain Trainer subclass: nothing of it is known to transformers.
MODULE = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, features, labels=None):
        return self.out(torch.relu(self.hidden(features)))


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows=64):
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(rows, 16, generator=generator)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"features": self.features[index], "labels": int(self.features[index].sum() > 0)}


class NetTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["features"])
        loss = nn.functional.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss
"""

SCRIPT = (
    MODULE
    + """
import sys
from transformers import HfArgumentParser

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print("arguments:", sys.argv[1:])
args.remove_unused_columns = False
trainer = NetTrainer(model=Net(), args=args, train_dataset=Rows(), eval_dataset=Rows(8))
trainer.train()
print("trained to step", trainer.state.global_step)
"""
)

# A tiny Llama on texts of different lengths, padded batch by batch, by a script as people write them.
LLAMA_SCRIPT = """
import random
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, HfArgumentParser, TrainingArguments, set_seed

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
draw = random.Random(0)
rows = [[draw.randrange(3, 128) for _ in range(draw.randrange(4, 48))] for _ in range(96)]
dataset = Dataset.from_dict({"input_ids": rows, "text": ["unused"] * len(rows)})


def collate(samples):
    longest = max(len(s["input_ids"]) for s in samples)
    ids = torch.tensor([s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples])
    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


trainer = Trainer(
    model=LlamaForCausalLM(config), args=args, train_dataset=dataset, eval_dataset=dataset.select(range(8)),
    data_collator=collate,
)
trainer.train()
trainer.save_model()
"""


def write(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(dedent(text))
    return path


def script(directory: Path, text: str, *arguments: str, name: str = "train.py") -> OwnCode:
    """Write a script; return the code that a search has of it."""
    write(directory, text, name)
    return OwnCode(kind="script", shown=name, command=(name, *arguments), directory=str(directory))


def quiet_arguments(folder: Path, **fields: Any) -> Any:
    """Return the arguments of a training on the CPU that keeps and tells nothing."""
    from transformers import TrainingArguments

    usual = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(str(folder), **{**usual, "dataloader_pin_memory": False, **fields})


def looked_at(request: Inquiry, folder: Path) -> Description | Refusal:
    """Have this process answer as a search's child would, in a folder of its own."""
    from autotune.execution.describe import run_describe

    folder.mkdir(exist_ok=True)
    write_value(request, folder / "request.json")
    run_describe(folder)
    text = (folder / "description.json").read_text()
    return Refusal.model_validate_json(text) if '"message"' in text else Description.model_validate_json(text)


class _Planted:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (open, (str(self._path), "w"))


def planted(path: Path) -> bytes:
    """Return a pickle as an attacker makes it: loading it is enough to make the file `path`."""
    return pickle.dumps(_Planted(path))
