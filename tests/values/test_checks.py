"""The checks' values: how a soak is told."""

from autotune.values.checks import Soaked


def test_a_soak_is_told_in_a_line():
    assert str(Soaked(eval_batch_size=32, checkpoint_bytes=3 << 20)) == "evaluation batch 32, checkpoint saved (3 MiB)"
    peak = Soaked(eval_batch_size=32, checkpoint_bytes=3 << 20, peak_bytes=895 << 20)
    assert str(peak) == "evaluation batch 32, checkpoint saved (3 MiB), peak memory 895 MiB"
    kept = Soaked(
        eval_batch_size=8,
        eval_accumulation_steps=1,
        predicted_samples=5000,
        predictions_bytes=3 << 30,
        checkpoint_bytes=1,
    )
    assert str(kept).startswith(
        "evaluation batch 8, predictions of 5,000 samples kept (3.00 GiB), eval_accumulation_steps 1"
    )
    assert kept.arguments == {"per_device_eval_batch_size": 8, "eval_accumulation_steps": 1}
    full = Soaked(eval_batch_size=32, checkpoint_bytes=None, not_saved="no checkpoint was saved: no room")
    assert str(full) == "evaluation batch 32; no checkpoint was saved: no room"
