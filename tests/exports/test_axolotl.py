"""axolotl's file, read by its own schema where axolotl is installed (docs/exports.md says how)."""

from __future__ import annotations

import pytest
import yaml
from exporting import ANSWERS, document, drafted, ranks

pytestmark = pytest.mark.filterwarnings("default")  # the imports of others


@pytest.mark.parametrize("name", list(ANSWERS))
def test_axolotl_reads_its_file(name):
    pytest.importorskip("axolotl.utils.schemas.config")
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args

    written = document("axolotl", **ANSWERS[name])
    for plugin in written.get("plugins", []):
        PluginManager.get_instance().register(plugin)
    _, schema = merge_input_args()
    read = schema(**written)
    assert not set(written) - set(schema.model_fields)  # what it doesn't know, it lets pass
    assert read.attn_implementation == written["attn_implementation"]
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (4, 4 // ranks(name))
    assert read.sequence_len == 128
    assert bool(read.sample_packing) is False
    assert not read.lora_mlp_kernel


def test_a_share_of_steps_to_warm_up_over_is_one_for_axolotl():
    document = yaml.safe_load(drafted("axolotl", own={"warmup_steps": 0.125}).files["axolotl.yaml"])
    assert document["warmup_ratio"] == 0.125
    assert "warmup_steps" not in document
