"""Limits of a search by its effort."""

from autotune.values.budget import Budget, Effort, Soaked


def test_more_effort_is_more_of_everything():
    quick, standard, thorough = map(Budget.of, Effort)
    for less, more in ((quick, standard), (standard, thorough)):
        assert less.max_trials < more.max_trials
        assert less.max_time_s < more.max_time_s
        assert less.relative_interval > more.relative_interval
        assert less.finalists <= more.finalists


def test_a_soak_is_told_in_a_line():
    assert str(Soaked(eval_batch_size=32, checkpoint_bytes=3 << 20)) == "evaluation batch 32, checkpoint saved (3 MiB)"
    peak = Soaked(eval_batch_size=32, checkpoint_bytes=3 << 20, peak_bytes=895 << 20)
    assert str(peak) == "evaluation batch 32, checkpoint saved (3 MiB), peak memory 895 MiB"
    predicted = {"eval_accumulation_steps": 1, "predicted_samples": 5000, "predictions_bytes": 3 << 30}
    kept, words = Soaked(eval_batch_size=8, checkpoint_bytes=1, **predicted), "predictions of 5,000 samples kept"
    assert str(kept).startswith(f"evaluation batch 8, {words} (3.00 GiB), eval_accumulation_steps 1")
    assert kept.arguments == {"per_device_eval_batch_size": 8, "eval_accumulation_steps": 1}
    full = Soaked(eval_batch_size=32, checkpoint_bytes=None, not_saved="no checkpoint was saved: no room")
    assert str(full) == "evaluation batch 32; no checkpoint was saved: no room"
