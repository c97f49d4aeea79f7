"""Trainings of people's own, one by name: `python own_modules.py NAME`, and arguments of the Trainer.

Modules that no library knows, losses of their own, parts that stay frozen, a teacher. Values are random.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


def images(edge=128, channels=3):
    return {"x": torch.randn(channels, edge, edge), "labels": torch.tensor(1)}


def tokens(length=256, words=8192):
    return {"x": torch.randint(words, (length,)), "labels": torch.randint(words, (length,))}


class Block(nn.Module):
    def __init__(self, width, *, causal=True, again=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.causal, self.again = causal, again

    def run(self, x):
        rows, length, width = x.shape
        parts = self.joined(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(rows, length, width // 64, 64).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.again and self.training else self.run(x)


class Language(nn.Module):
    def __init__(self, layers=6, width=512, words=8192, length=256, **how):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, **how) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x, labels=None):
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Residual(nn.Module):
    def __init__(self, given, width, stride=1):
        super().__init__()
        self.a, self.b = nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.n, self.m = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(given, width, 1, stride) if stride > 1 or given != width else nn.Identity()

    def forward(self, x):
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x)), inplace=True))) + self.skip(x))


class Pictures(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        widths = [64, 64, 128, 256, 512]
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.body = nn.Sequential(*(Residual(a, b, 1 + (a != b)) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(512, classes)

    def forward(self, x, labels):
        logits = self.head(self.body(self.stem(x)).mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()

        def part(given, wanted):
            return nn.Sequential(nn.Conv2d(given, wanted, 3, 1, 1), nn.GroupNorm(8, wanted), nn.SiLU())

        self.down = nn.ModuleList([part(3, width), part(width, 2 * width), part(2 * width, 4 * width)])
        self.up = nn.ModuleList([part(6 * width, 2 * width), part(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2) if part is not self.down[-1] else x
        for part, other in zip(self.up, kept[1::-1], strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), other], 1))
        return self.out(x)


class Noise(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        noise = torch.randn_like(inputs["x"])
        level = torch.rand(len(noise), 1, 1, 1, device=noise.device)
        loss = F.mse_loss(model(inputs["x"] * (1 - level) + noise * level), noise)
        self.last = loss.item()
        return loss


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU())
        self.mean, self.spread = nn.Conv2d(128, 16, 1), nn.Conv2d(128, 16, 1)
        self.back = nn.Sequential(nn.ConvTranspose2d(16, 128, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(128, 3, 4, 2, 1))

    def forward(self, x, labels=None):
        h = self.down(x)
        mean, spread = self.mean(h), self.spread(h)
        found = self.back(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        return F.mse_loss(found, x) - 0.5 * (1 + spread - mean**2 - spread.exp()).mean(), found


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.read = Pictures(256), Language(2, 256, length=64)
        self.read.head = nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x, text):
        seen = self.seen.head(self.seen.body(self.seen.stem(x)).mean((2, 3)))
        read = self.read(text)["logits"].mean(1)
        alike = F.normalize(seen, dim=-1) @ F.normalize(read, dim=-1).t() * self.scale.exp()
        places = torch.arange(len(alike), device=alike.device)
        return (F.cross_entropy(alike, places) + F.cross_entropy(alike.t(), places)) / 2, alike


class Taught(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(inputs["x"])
        with torch.no_grad():
            wanted = self.teacher.to(inputs["x"].device)(inputs["x"])["logits"]
        return F.kl_div(F.log_softmax(out["logits"] / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean")


class Rows(nn.Module):
    def __init__(self, width=2048):
        super().__init__()
        layers = [nn.Linear(512, width)]
        for _ in range(4):
            layers += [nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width)]
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(width, 1)

    def forward(self, x, labels):
        found = self.out(self.layers(x)).squeeze(-1)
        return {"loss": F.smooth_l1_loss(found, labels), "found": found}


class Encoder(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.words = nn.Embedding(8192, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(width, 8)

    def forward(self, x, labels):
        found = self.out(self.layers(self.words(x), src_key_padding_mask=x == 0).mean(1))
        return F.cross_entropy(found, labels), found


class OfLibrary(nn.Module):
    def __init__(self, name, *, frozen=False):
        super().__init__()
        self.base = AutoModel.from_config(config_of(name))
        self.base.requires_grad_(not frozen)
        self.out = nn.Linear(self.base.config.hidden_size, 5)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.base(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        found = self.out((hidden * mask).sum(1) / mask.sum(1))
        return {"loss": F.cross_entropy(found, labels), "logits": found}


def config_of(name):
    small = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    if name == "llama":
        small |= {"num_key_value_heads": 4, "vocab_size": 16000}
    return AutoConfig.for_model(name, **({"n_layer": 4, "n_embd": 512, "n_head": 8} if name == "gpt2" else small))


class Alike(Trainer):
    """Pairs of texts through one encoder, compared by cosine."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first, second = (model(inputs[name])["logits"].mean(1) for name in ("x", "labels"))
        return F.cosine_embedding_loss(first, second, torch.ones(len(first), device=first.device))


class Waves(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.first = nn.Conv1d(1, width, 9, 4, 4)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2**n, dilation=2**n) for n in range(6))
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, x, labels=None):
        x = self.first(x)
        for layer in self.layers:
            value, gate = layer(x).chunk(2, 1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        found = self.out(x)
        return (found - found.detach().roll(1, -1)).pow(2).mean(), found


class Written(nn.Module):
    """Attention written out, on patches."""

    def __init__(self, width=384, edge=128, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(65, width))
        self.joined = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(6))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(6)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, x, labels):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for joined, wide in zip(self.joined, self.wide, strict=True):
            q, k, v = joined(x).unflatten(-1, (3, 6, -1)).unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
            x = x + torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
            x = x + wide(x)
        found = self.out(x[:, 0])
        return F.cross_entropy(found, labels, label_smoothing=0.1), found


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer, self.out = (
            nn.Embedding(8192, 256),
            nn.LSTM(256, 256, 2, batch_first=True),
            nn.Linear(256, 9),
        )

    def forward(self, x, labels):
        return F.cross_entropy(self.out(self.layer(self.words(x))[0]).flatten(0, 1), labels.flatten() % 9), x


class Routed(Language):
    def forward(self, x, labels=None):
        found = super().forward(x)["logits"]
        rows = (labels % 2 == 0).nonzero(as_tuple=True)
        return {"loss": F.cross_entropy(found[rows], labels[rows])}


class TaughtLlama(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, out = super().compute_loss(model, inputs, return_outputs=True)
        with torch.no_grad():
            wanted = self.teacher.to(loss.device)(input_ids=inputs["input_ids"]).logits
        return loss + F.mse_loss(out.logits, wanted)


def frozen_below(model):
    for block in model.blocks[:-2]:
        block.requires_grad_(False)
    model.words.requires_grad_(False)
    return model


def text():
    return {"input_ids": torch.randint(1, 8000, (128,)), "attention_mask": torch.ones(128, dtype=torch.long),
            "labels": torch.tensor(2)}  # fmt: skip


def sentence():
    return {**text(), "labels": torch.randint(1, 8000, (128,))}


def numbers():
    return {"x": torch.randn(512), "labels": torch.tensor(0.5)}


MADE = {
    "language": (Language, tokens, Trainer),
    "language, checkpointed by itself": (lambda: Language(again=True), tokens, Trainer),
    "language, lower half frozen": (lambda: frozen_below(Language()), tokens, Trainer),
    "language, compared by cosine": (Language, tokens, Alike),
    "language, taught": (lambda: Language(3), tokens, Taught),
    "pictures": (Pictures, images, Trainer),
    "pictures, attention written out": (Written, images, Trainer),
    "denoiser": (Denoiser, lambda: images(64), Noise),
    "variational": (Variational, images, Trainer),
    "towers": (Towers, lambda: {"x": torch.randn(3, 128, 128), "text": torch.randint(8192, (64,))}, Trainer),
    "rows of numbers": (Rows, numbers, Trainer),
    "torch's encoder": (Encoder, lambda: {**tokens(), "labels": torch.tensor(3)}, Trainer),
    "waves": (Waves, lambda: {"x": torch.randn(1, 16000), "labels": torch.tensor(0)}, Trainer),
    "around BERT": (lambda: OfLibrary("bert"), text, Trainer),
    "around BERT, frozen": (lambda: OfLibrary("bert", frozen=True), text, Trainer),
    "around GPT-2": (lambda: OfLibrary("gpt2"), text, Trainer),
    "around Llama": (lambda: OfLibrary("llama"), text, Trainer),
    "Llama, taught": (lambda: AutoModelForCausalLM.from_config(config_of("llama")), sentence, TaughtLlama),
    "LSTM": (Tagger, tokens, Trainer),
    "rows by value": (Routed, tokens, Trainer),
}


class Data(torch.utils.data.Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 256

    def __getitem__(self, index):
        torch.manual_seed(index)
        return self.sample()


if __name__ == "__main__":
    make, sample, kind = MADE[sys.argv.pop(1)]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    arguments.remove_unused_columns = False
    trainer = kind(model=make(), args=arguments, train_dataset=Data(sample))
    trainer.teacher = Language() if kind is Taught else make() if kind is TaughtLlama else None
    trainer.train()
