"""What a ranking leaves out is said, with the reason."""

from factories import make_config, make_gpu, make_space

from autotune.estimates.ranking import ranking_notes
from autotune.values.config import Allowance

PARAMETERS = {
    "precision": ["bf16", "fp32", "pure_bf16"],
    "tf32": [True, False],
    "optim": ["adamw_torch_fused", "adafactor"],
    "adapter": [None, "lora"],
    "dataloader_num_workers": [0, 2],
}
BASE = make_config()
BF16 = make_config(precision="bf16", tf32=True)


def notes(*best, **fields) -> list[str]:
    return list(ranking_notes(make_space(PARAMETERS, baseline=BASE, **fields), best))


def test_values_that_are_not_allowed_are_named_together():
    beyond = "changes the method of the training, which --allow optimizer does not admit"
    found = notes(BASE, BF16, hardware=make_gpu(), allowance=Allowance.OPTIMIZER)
    assert f"not ranked: --precision pure_bf16, --adapter lora: {beyond}" in found


def test_values_that_are_not_possible_are_named_with_what_is_lacking():
    found = notes(BASE, hardware=make_gpu(name="Tesla T4", capability=(7, 5)))
    lacking = "Tesla T4 has no bf16 (compute capability 8.0 or newer)"
    assert f"not ranked: --precision bf16, --precision pure_bf16: {lacking}" in found
    assert "not ranked: --tf32: Tesla T4 has no tf32 (Ampere or newer)" in found


def test_values_that_only_came_out_behind_are_named():
    found = notes(BASE, hardware=make_gpu(), allowance=Allowance.OPTIMIZER)
    assert found[-1] == ("predicted too, and behind these or too large: --precision bf16, --tf32, --optim adafactor")


def test_where_all_is_shown_there_is_nothing_to_say():
    adafactor = make_config(precision="bf16", tf32=True, optim="adafactor")
    assert notes(BASE, adafactor, make_config(precision="pure_bf16", adapter={}), hardware=make_gpu()) == []
