"""Rehearses a loop of the user's own, as it is, for its memory: optimizer steps, an evaluation, a checkpoint.

After `OWN_STEPS` steps each pass over a `DataLoader` ends with its second batch, so that the loop goes on to evaluate
and save, for a minute at most. An error that it raises then ends it, and is told beside the memory.
"""

import os
import signal
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from autotune.errors import LoopError
from autotune.execution.outcome import first_line, is_out_of_memory
from autotune.execution.trial import Trial
from autotune.execution.user_code import reached, run_until_training
from autotune.stand_in import host_values
from autotune.values.budget import Soaked
from autotune.values.trial import Memory, Outcome
from autotune.values.workload import OWN_STEPS, OwnCode


def run_loop(trial: Trial, code: OwnCode) -> Outcome:
    timer, recorder = trial.timer, trial.recorder
    assert recorder is not None
    state, control = SimpleNamespace(global_step=0, max_steps=0), SimpleNamespace(should_training_stop=False)
    load, most_steps, failed = DataLoader.__iter__, OWN_STEPS, None

    def few(loader: Any) -> Any:
        nonlocal most_steps
        most_steps, more = 2 * OWN_STEPS, iter(range(2))  # a later epoch makes some steps more
        return takewhile(lambda _: not recorder.has_made(OWN_STEPS) or next(more, None) is not None, load(loader))

    def ended(*_: Any) -> None:
        state.global_step += 1
        timer.on_step_end(None, state, control)
        timer.on_step_begin(None, state, control)
        if not recorder.has_made(OWN_STEPS + 1):
            host_values.check()
        if recorder.has_made(OWN_STEPS):
            signal.alarm(60)

    os.environ.update(code.variables)
    signal.signal(signal.SIGALRM, reached)
    timer.on_step_begin(None, state, control)
    other = trial.useless("beside other processes it trains by Trainer.train, and ends without it where it is alone")
    with register_optimizer_step_post_hook(ended), patch.object(DataLoader, "__iter__", few):
        try:
            given = code, trial.data_directory, lambda *_: other
            return run_until_training(*given, most_steps=lambda: most_steps, saved=recorder.loop_saved)
        except LoopError:
            pass
        except Exception as error:
            if not recorder.has_made(OWN_STEPS) or is_out_of_memory(error):
                raise
            failed = first_line(error)
        finally:
            signal.alarm(0)
    timer.on_train_end(None, state, control)
    if not timer.step_times_s():
        return trial.useless("its loop makes one optimizer step: the next ones may take more, which isn't seen")
    if not trial.guard.peak().allocated_bytes:
        return trial.useless("it trains without the GPU: perhaps an option chooses its device")
    trial.guard.check()
    recorder.loop_turned()
    parts, reason = recorder.parts(), host_values.unknown() or failed
    not_seen = reason and f"after {OWN_STEPS} optimizer steps it was seen up to an error: {reason}"
    found = {"memory": Memory.worst_of(list(parts.phases.values())), "parts": parts}
    found |= {"soaked": Soaked(eval_batch_size=None, checkpoint_bytes=None, not_evaluated=not_seen)}
    return trial.measurement(None, {}, None).model_copy(update=found)
