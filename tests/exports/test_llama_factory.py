"""LLaMA-Factory's file, read by its own parser where it is installed (docs/exports.md says how)."""

from __future__ import annotations

import pytest
from exporting import ANSWERS, CPU, document, ranks

pytestmark = pytest.mark.filterwarnings("default")  # the imports of others


@pytest.mark.parametrize("name", list(ANSWERS))
def test_llama_factory_reads_its_file(name, tmp_path, monkeypatch):
    parser = pytest.importorskip("llamafactory.hparams.parser")
    written = document("llama-factory", **{**ANSWERS[name], "tf32": False}, hardware=CPU)  # which a GPU alone has
    monkeypatch.chdir(tmp_path)
    model, data, training, method, _ = parser._parse_train_args(written)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4 // ranks(name))
    assert data.cutoff_len == 128
    assert model.disable_gradient_checkpointing == ("checkpointing" not in ANSWERS[name])
    assert method.finetuning_type == ("lora" if "adapter" in ANSWERS[name] else "full")
