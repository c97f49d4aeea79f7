"""What a running trial is taken to give until it has ended: what is predicted of it. Pure.

So the next proposal looks elsewhere: where a trial runs already nothing more is to be learned, and what it is expected
to reach is no improvement any more ("kriging believer": Ginsbourger, Le Riche and Carraro, "Kriging is well-suited to
parallelize optimization", 2010).
"""

from __future__ import annotations

from autotune.trial import Interval, Measurement, Memory, Prediction, TrialRequest, TrialResult


def believed(request: TrialRequest, prediction: Prediction | None) -> TrialResult | None:
    """Return a trial's result as predicted, None where nothing is; of memory it says nothing."""
    if prediction is None:
        return None
    rate = prediction.samples_per_second
    step_s = request.workload.samples_per_step(request.config) / rate
    measurement = Measurement(
        step_times_s=(step_s,),
        accumulation_steps=request.accumulation_steps,
        samples_per_second=rate,
        samples_per_second_interval=Interval(low=rate, high=rate),
        memory=Memory(),
        startup_s=0.0,
        first_step_s=step_s,
        data_wait_share=0.0,
        loss=0.0,
        effects={},
    )
    return TrialResult(request=request, outcome=measurement, duration_s=0.0)
