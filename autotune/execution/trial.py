"""A trial as its process sees it: makes its Trainer, trains, and measures.

For a named model this module makes the Trainer; a user's own code makes its Trainer itself, and is run under the
trial's arguments until it trains. Both train under the arguments of one mapping (`training.arguments.training_plan`). A
user's loop is a function that returns another one, which does one whole optimizer step: it is timed as the Trainer's
steps are, its wait for data isn't measured, and whether a knob took effect is taken on trust.
"""

import importlib
import math
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length

from autotune.errors import AutotuneError, NoEffectError
from autotune.execution import checking, noise, user_code
from autotune.execution.checking import Reading, arguments_of, keeps_predictions
from autotune.execution.effects import EffectsProbe
from autotune.execution.environment import own_rank, remove_unused_locks, trial_device
from autotune.execution.gradients import loss_and_samples
from autotune.execution.guard import MemoryGuard
from autotune.execution.job import ENDS_VARIABLE
from autotune.execution.measure import EXTRA_DISCARDED_STEPS, Compilations, StepTimer
from autotune.execution.noise import CudaClock, HostClock
from autotune.execution.outcome import is_out_of_memory
from autotune.execution.peak_parts import PeakRecorder
from autotune.execution.step_profile import StepProfile
from autotune.execution.token_ring import Turns
from autotune.execution.user_data import RowCount, batch_size, distinct_samples, longest_of, ordered, view
from autotune.stand_in import host_values
from autotune.stand_in.device import is_rehearsal
from autotune.training.adapters import prepare_model
from autotune.training.arguments import TrainingPlan, building_device, parallel_variables, training_plan
from autotune.training.baseline import zero_of
from autotune.training.build import build_model
from autotune.training.dataset import STEPS_TO_PEAK, repeated, training_data
from autotune.training.random_weights import quick_weights
from autotune.training.recipes import StepCount, recipe_trainer
from autotune.values.budget import LossTask, ProfileTask, SoakTask
from autotune.values.hardware import detect
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Measurement, Outcome, TrialRequest, TrialStatus
from autotune.values.workload import STEP_FILE, OwnCode, OwnStep

# An fp16 scaler starts at 2^16 and halves at each overflow: it may skip that many steps before the first real one.
_SCALER_STEPS = 17


class Trial:
    """A request, its means, and the timer of its steps, which decides how many there are."""

    def __init__(
        self, request: TrialRequest, directory: Path, stopwatch: Stopwatch, guard: MemoryGuard, turns: Turns | None
    ) -> None:
        self.request, self.stopwatch, self.guard = request, stopwatch, guard
        if is_rehearsal():  # its kernels compute nothing
            host_values.install()
            host_values.assume(request.task.assumed if isinstance(request.task, SoakTask) else None)
        self.data_directory = directory.parent.parent / "data"  # tokenized rows and pickled code, of all trials
        self.device = trial_device(request.device)
        os.environ.update(parallel_variables(request.config))  # which accelerate reads, in the user's own code too
        config, limits, task = request.config, request.limits, request.task
        # All ranks together run a step; each reads every n-th of their batches.
        all_ranks = config.per_device_train_batch_size * config.parallelism.data_parallel
        self.samples_per_step = request.accumulation_steps * all_ranks
        # Short steps may need as many for the least measuring time as `Budget.when_in_turn` allows.
        measured = max(limits.measure_steps, 4000 if limits.least_time_s else 0)
        self.max_steps = limits.discarded_steps + EXTRA_DISCARDED_STEPS + measured + _SCALER_STEPS
        self.arguments = {
            "output_dir": str(directory / "trainer"),
            "gradient_accumulation_steps": request.accumulation_steps,
            "max_steps": self.max_steps,
            **arguments_of(task),
        }
        on_cpu, ends_at, ranks = request.device == "cpu", math.inf, own_rank().is_launched
        if task is None:
            # The longest samples, where they differ, aren't timed.
            if request.workload.lengths is not None or request.workload.dataset is not None:
                limits = limits.model_copy(update={"discarded_steps": max(limits.discarded_steps, STEPS_TO_PEAK)})
            # Measuring ends before the process is killed, with a moment for what follows it.
            ends_at = float(os.environ.get(ENDS_VARIABLE, math.inf)) - min(2.0, 0.1 * limits.timeout_s)
        relax = guard.relax if (on_cpu or turns) and task is None else None  # a check looks at memory to its end
        in_parts = isinstance(task, SoakTask) and task.in_parts and not on_cpu
        of_loop = getattr(request.workload.own_code, "is_loop", False)
        self.recorder = PeakRecorder(guard, of_loop=of_loop) if in_parts else None
        self._profile = StepProfile(on_cpu=on_cpu, before=guard.relax) if isinstance(task, ProfileTask) else None
        if self._profile is not None:
            relax = self._profile.start
        computed = task.micro_steps if isinstance(task, SoakTask) else None
        # Several ranks ask each other, which all of them have to do at the same steps.
        may_compile = not ranks or config.torch_compile_backend is not None
        self.timer = StepTimer(
            limits,
            request.accumulation_steps,
            request.workload.accumulation_steps(config),
            warm_up_micro_steps=computed if task else request.workload.warm_up_micro_steps(config),
            is_timed=computed is None,
            clock=HostClock() if on_cpu else CudaClock(),
            ends_at=ends_at,
            has_compiled=Compilations(ranks=ranks) if may_compile else lambda: False,
            ranks=ranks,
            stopwatch=stopwatch,
            watch=noise.watch(self.device, ranks=ranks or turns is not None),
            afterwards="closing_s" if task is None else "check_s",
            relax=relax,
            step_ended=guard.step_ended,
            retries=guard.retries,
            turns=turns,
        )

    def measurement(self, loss: float | None, effects: dict[str, str], waits: float | None) -> Measurement:
        """Return what was measured, as :meth:`StepTimer.measurement`, with the profile if there is one."""
        measured = self.timer.measurement(self.request, self.guard.peak(), loss, effects, waits)
        if self._profile is None:
            return measured
        more = self.timer.full_micro_steps / self.timer.run_micro_steps
        busy_s = self._profile.busy_s(len(measured.step_times_s), more_micro_steps=more)
        return measured.model_copy(update={"busy_s": busy_s})

    def useless(self, cause: str) -> Failure:
        return Failure(status=TrialStatus.INVALID, cause=cause, memory=self.guard.peak())

    def run_steps(self, own: OwnStep) -> Outcome:
        timer, losses = self.timer, []
        self.stopwatch.enter("model_s")
        micro_steps, file = self.request.accumulation_steps, self.data_directory / STEP_FILE
        step = user_code.step_of(own, self.request.config, micro_steps, file)
        self.stopwatch.enter("trainer_s")
        # Of a Trainer, the timer looks at the number of the step, and at whether training is to stop, alone.
        state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
        while not control.should_training_stop:
            timer.on_step_begin(None, state, control)
            try:
                loss = loss_and_samples(step())[0]
            except StopIteration:  # of an iterator over its data
                return self.useless(f"its data end after {state.global_step} steps: have the step begin them again")
            if isinstance(loss, torch.Tensor):
                loss = loss.detach() if loss.numel() == 1 else None  # read later, without its graph
            if isinstance(loss, int | float | torch.Tensor) and not isinstance(loss, bool):
                losses.append(loss)
            state.global_step += 1
            timer.on_step_end(None, state, control)
        timer.on_train_end(None, state, control)
        mean = statistics.fmean(map(float, losses)) if losses else None
        if mean is not None and not math.isfinite(mean):
            return self.useless(f"the loss became {mean}: not trainable like this")
        self.guard.check()
        return self.measurement(mean, {}, None)

    def run_named_model(self) -> Outcome:
        """Train a model that is built from its name; AutotuneError: a library refuses the configuration before."""
        hardware, per_step, recipe = detect(self.device), self.samples_per_step, self.request.workload.recipe
        probe = EffectsProbe(self.request.config, hardware)
        try:
            trainer = self._trainer_of(training_plan(self.request.config, self.request.workload, hardware), probe)
        except (ValueError, ImportError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise AutotuneError(f"{type(error).__name__}: {error}") from error
        rows, model_config = trainer.train_dataset, trainer.model.config
        if recipe is not None:
            if recipe.kind.generates:
                reading = Reading(not_evaluated="not evaluated, which would generate completions")
            elif self.request.config.precompute_ref_log_probs:
                reading = Reading(not_evaluated="not evaluated: the reference ran before training")
            else:  # on the samples that it trains on, the longest first
                reading = Reading(lambda samples: rows.select([i % len(rows) for i in range(samples)]))
            count = StepCount(trainer, recipe, per_step)
            outcome = self._trained(probe, trainer, trainer.train, reading)
            if isinstance(outcome, Failure):
                return outcome
            return outcome.model_copy(update={"effects": {**outcome.effects, "recipe": count.checked()}})
        reading = Reading(lambda samples: self.data_of(model_config, samples, longest_first=samples)[0])
        return self._trained(probe, trainer, trainer.train, reading)

    def _trainer_of(self, mapping: TrainingPlan, probe: EffectsProbe) -> Any:
        """Return the Trainer with model, data and arguments: `tuned` and `harness`, from the one mapping."""
        self.stopwatch.enter("trainer_s")
        config, to_compare = self.request.config, isinstance(self.request.task, LossTask)  # losses are compared
        if "deepspeed" in mapping.tuned:
            remove_unused_locks()
            if self.device == "cpu" and own_rank().is_launched:  # TrainingArguments leaves out what ZeRO-3 asks for
                importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
        # The data come in the order of the configuration's sampler already (`training.dataset.row_order`).
        arguments = {**mapping.tuned, **mapping.harness, **self.arguments}
        if not config.is_balanced:
            arguments["train_sampling_strategy"] = "sequential"
        workload, per_step, callbacks = self.request.workload, self.samples_per_step, [probe, self.timer]
        made = TrainingArguments(**arguments) if workload.recipe is None else None
        self.stopwatch.enter("model_s")
        with nullcontext() if to_compare else quick_weights():  # compared ones need a truly initialised model
            model = build_model(
                workload.model,
                workload.task,
                device=building_device(config, self.device, to_compare=to_compare),
                quantization=mapping.quantization,
                whole_first=to_compare,
                **mapping.model,
            )
        self.stopwatch.enter("data_s")
        samples = self.max_steps * per_step
        if made is None:
            trainer, sample_s = recipe_trainer(
                workload,
                mapping,
                arguments,
                model,
                directory=self.data_directory,
                samples=samples,
                distinct=distinct_samples(self.request, samples)[0],
                longest_first=per_step,
                callbacks=callbacks,
            )
            self.timer.added_s = sample_s * workload.samples_per_step(config)
            return trainer
        model = prepare_model(model, mapping.adapter, config)
        dataset, collator = self.data_of(model.config, samples, longest_first=per_step)
        shifted: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)

        def collated(samples: Any) -> Any:  # as by `DataCollatorForSeq2Seq`: a model gets no labels to smooth
            batch = collator(samples)
            return {**batch, "decoder_input_ids": shifted(labels=batch["labels"])}

        collate = collated if made.label_smoothing_factor and shifted is not None else collator
        self.stopwatch.enter("trainer_s")
        return _InOrder(model=model, args=made, train_dataset=dataset, data_collator=collate, callbacks=callbacks)

    def data_of(self, model_config: Any, samples: int, *, longest_first: int) -> tuple[Any, Any]:
        """Return so many samples, the longest of the first `longest_first` first, and what makes batches of them."""
        workload, directory = self.request.workload, self.data_directory
        distinct, config = distinct_samples(self.request, samples)
        dataset, collator = training_data(
            workload, model_config, samples=distinct, directory=directory, longest_first=longest_first, config=config
        )
        return repeated(dataset, samples), collator

    def run_user_code(self, code: OwnCode) -> Outcome:
        self.stopwatch.enter("trainer_s")
        request, hardware = self.request, detect(self.device)
        mapping = training_plan(request.config, request.workload, hardware)
        probe = EffectsProbe(request.config, hardware, theirs=frozenset(code.held))
        of_trial = {n: v for n, v in self.arguments.items() if n != "seed"}  # set once the code's model is made
        order = {"train_sampling_strategy": "sequential"} if code.reorders else {}
        wanted = {**mapping.overrides(request.workload), **of_trial, "dataloader_drop_last": True, **order}

        def laid(own: Any) -> dict[str, Any]:
            given, spread = {**user_code.harness(own), **wanted}, request.config.parallelism
            if is_rehearsal() and zero_of(vars(own), "deepspeed") == spread.model_dump(include={"sharding", "offload"}):
                del given["deepspeed"]  # the code's own has other buckets
            return given

        def on_train(trainer: Any, train: Callable[[], Any]) -> Outcome:
            if "pad_to_multiple_of" not in code.held:
                trainer.data_collator.pad_to_multiple_of = request.config.pad_to_multiple_of
            reading = self._made_ready(code, trainer, probe)
            rows = RowCount(trainer, request.config.per_device_train_batch_size)
            self.timer.is_whole = lambda: rows.is_whole
            outcome = self._trained(probe, trainer, train, reading)
            if code.has_rows:
                rows.check()
            asked = request.config.per_device_train_batch_size
            made = batch_size(trainer, trainer.callback_handler.train_dataloader)
            if made not in (None, asked):
                raise NoEffectError(f"a micro-batch of {asked} was asked for, but batches of {made} were made")
            return outcome

        with user_code.overlaid(laid, lambda model: user_code.fitted(model, mapping, code)):
            return user_code.run_until_training(code, self.data_directory, on_train)

    def _made_ready(self, code: OwnCode, trainer: Any, probe: EffectsProbe) -> Reading:
        if names := user_code.changed_arguments(trainer.args):
            raise NoEffectError(f"your code sets {', '.join(names)} again after it has made its Trainer")
        for callback in trainer.callback_handler.callbacks[:]:  # those that wait for evaluations or tell a tracker
            where = type(callback).__module__
            if where.startswith("transformers.integrations") or isinstance(callback, EarlyStoppingCallback):
                trainer.remove_callback(callback)
            elif not where.startswith("transformers."):  # it may copy the best checkpoint, or tell somebody of the end
                callback.on_train_end = lambda *args, **kwargs: None
        trainer.add_callback(probe)
        trainer.add_callback(self.timer)
        trainer.model_init = None  # the model that it has made already is trained, not another one
        if isinstance(self.request.task, LossTask):
            set_seed(self.request.task.seed)
        saves = user_code.own_values(trainer.args).get("save_strategy", "no") != "no"
        not_saved = None if saves else "no checkpoint was saved, as your arguments have it"
        found = trainer.eval_dataset
        sets = found if isinstance(found, dict) else {"": found}
        sized = {name: rows for name, rows in sets.items() if rows is not None and has_length(rows)}
        streams = [name or "your eval_dataset" for name, rows in sets.items() if rows is not None and name not in sized]
        streamed = f"not evaluated: {', '.join(streams)} (a stream)" if streams else None
        reading = Reading(not_evaluated=streamed, not_saved=not_saved)
        if filled := {name: rows for name, rows in sized.items() if len(rows)}:

            def longest(samples: int) -> Any:
                if not isinstance(found, dict):
                    return view(found, longest_of(found, samples))
                # The Trainer evaluates each: the longest samples may be in a small one.
                return {name: view(rows, longest_of(rows, min(samples, len(rows)))) for name, rows in filled.items()}

            kept = max(map(len, filled.values())) if keeps_predictions(trainer) else None
            reading = reading._replace(longest=longest, kept=kept)
        if code.reorders:
            samples, directory = self.max_steps * self.samples_per_step, self.data_directory
            trainer.train_dataset = ordered(self.request, trainer.train_dataset, directory, samples=samples)
        return reading

    def _trained(self, probe: EffectsProbe, trainer: Any, train: Callable[[], Any], reading: Reading) -> Outcome:
        """Train by `train` until the timer has enough, carry out the trial's check, and return what was measured."""
        request, timer, guard = self.request, self.timer, self.guard
        losses = watch_losses(trainer, timer.micro_step_ended, timer.leaves_out)
        with checking.around_training(request.task, trainer, reading):
            loss = float(train().training_loss)
        effects = probe.verify(trainer)
        if not math.isfinite(total := losses()):
            return self.useless(f"the loss became {total}: not trainable like this")
        if not timer.step_times_s():
            if (steps := trainer.state.global_step) < trainer.state.max_steps:
                reason = "a callback of your code stopped it, or its data ended"
                return self.useless(f"training ended after {steps} steps, before one was measured: {reason}")
            return self.useless(f"the loss scaler skipped the first {_SCALER_STEPS} steps and more")
        guard.check()
        found = checking.findings(request.task, trainer, reading, guard, self.recorder)
        return self.measurement(loss, effects, timer.data_wait_share()).model_copy(update=found)


def watch_losses(
    trainer: Any, ended: Callable[[], None] = lambda: None, leaves_out: Callable[[], bool] = lambda: False
) -> Callable[[], float]:
    """Call `ended` after each micro-step from now on; return what reads the sum of their losses, NaN or Inf if one is.

    The Trainer's own filter leaves such losses out of its log. The sum stays on the device, in fp32, so that nothing
    waits for it before training is over. A micro-step that is left out has the loss of the one before.
    """
    original, total = trainer.training_step, [0.0]
    loss: Any = None

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal loss
        if not leaves_out():
            loss = original(*args, **kwargs)
        ended()
        total[0] += loss.float()
        return loss

    trainer.training_step = training_step
    return lambda: float(total[0])


class _InOrder(Trainer):  # type: ignore[misc]  # transformers is untyped
    """Takes the samples of each step in the order of its data, even if its sampler balances micro-batches."""

    def _get_train_sampler(self, *args: Any) -> Any:
        sampler = super()._get_train_sampler(*args)
        if isinstance(sampler, BatchRebalanceSampler):
            sampler.shuffle = False
        return sampler
