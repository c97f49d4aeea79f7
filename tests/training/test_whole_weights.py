"""Weights that are drawn whole although DeepSpeed is going to split them."""

from transformers.integrations import deepspeed

from autotune.training.random_weights import whole_weights


def test_transformers_knows_of_deepspeed_again_afterwards():
    class Configuration:
        def is_zero3(self) -> bool:
            return True

    configuration = Configuration()
    deepspeed.set_hf_deepspeed_config(configuration)
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        with whole_weights():
            assert not deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
