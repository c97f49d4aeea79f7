"""Rehearses an unchanged training on the stand-in for a GPU, without one: its exact memory, and whether it fits.

The libraries of the stand-in are built once below `$AUTOTUNE_HOME` and preloaded into a child process alone, so that
nothing of the user's environment changes. The child is autotune as it is on a machine with that GPU: it looks at the
code, and runs the trial of a soak: three optimizer steps on the longest samples, a checkpoint, an evaluation. A loop of
the code's own runs as it is, for some steps.

    python -m autotune.rehearsal GPU FOLDER SHA256 PARENT     # the child
"""

import itertools
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autotune import errors
from autotune.api import planned, subject_of
from autotune.cost.memory import framework_bytes
from autotune.cost.model import CostModel
from autotune.errors import AutotuneError, InfrastructureError, InputError
from autotune.estimates.report import Lever, Rehearsal
from autotune.execution.job import die_with_parent
from autotune.planning.options import SearchOptions, options_of
from autotune.planning.plan import SearchPlan
from autotune.planning.user_code import UserTrainer, too_long
from autotune.search.cost_model import cost_model
from autotune.search.run import backend_of
from autotune.space.knobs import MICRO_BATCH, changes
from autotune.stand_in.device import AMPLE_BYTES, MOST_DEVICES, UNKNOWN, variables
from autotune.storage.home import writable
from autotune.storage.run_directory import RunDirectory
from autotune.training.trainer_pickle import model_on_cpu
from autotune.value import Value, read_unchanged, sha256_of, write_value
from autotune.values.budget import SoakTask
from autotune.values.catalogue import Gpu, gpu_named, gpus
from autotune.values.config import Allowance, TrainConfig
from autotune.values.problem import Fleet
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Measurement, Memory, PeakParts, Purpose, Refusal, TrialResult, TrialStatus
from autotune.values.workload import OWN_STEPS

_LEAST_CAPABILITY = (7, 5)  # of torch's builds for CUDA 13
# A training whose memory is the same with both, where they are read for unknown whole numbers, isn't decided by them.
_ASSUMED = (0, 100)
_SURELY = 0.95  # of a GPU's memory: what is predicted to need at most that is tried
_SHARDING = "parallelism.sharding"  # in 16 bits each library rounds in other places


def rehearse(
    *,
    gpu: str,
    devices: int | str | None = None,
    script: Sequence[str] | None = None,
    trainer: Any = None,
    make_trainer: Callable[[], Any] | None = None,
) -> Rehearsal:
    """Run a training of your own on a stand-in for a GPU, and tell what memory it takes and whether it fits.

    Needs torch's build for CUDA (2.11 to 2.15), and once a C++ compiler; no GPU. Values of the model's arithmetic
    aren't computed: where a program's memory depends on them, the result's `refused` says where.

    Args:
        gpu: A name of the table of GPUs, such as 'a100-80gb'.
        devices: So many train it together, by the code's own arguments: DDP, or FSDP [1, or as its launcher says].
        script: The command line of a script, with a Trainer or a loop of its own: ``["python", "train.py", "--bf16"]``.
        trainer: A `transformers.Trainer` of your own.
        make_trainer: A function that makes such a Trainer.

    Raises:
        InputError: An argument can't be used, or the code doesn't train.
        MachineError: torch isn't a build for CUDA, or there is no compiler.
        InfrastructureError: The stand-in can't be built, or its process failed.
    """
    card = gpu_named(gpu)
    if card.capability is None or card.capability < _LEAST_CAPABILITY:
        raise InputError(f"--gpu {gpu}: torch for CUDA 13 doesn't run on it; the stand-in has NVIDIA's from T4 on")
    wanted = {"model": "", "allow": "numerics", "memory": card.memory_bytes, "devices": devices}
    options = options_of(SearchOptions, wanted)
    with model_on_cpu(trainer):
        subject = subject_of(options, script=script, trainer=trainer, make_trainer=make_trainer)
        subject.options = subject.options.model_copy(update={"nodes": None})  # all in one machine
        content = pickle.dumps(subject)
    number, *others = dict.fromkeys(subject.options.devices or (1,))  # a launcher's number is there twice
    if others or not isinstance(number, int) or number > MOST_DEVICES:
        raise InputError(f"--devices: on the stand-in there are 1 to {MOST_DEVICES}; say how many train together")
    folder, (context, _) = Path(tempfile.mkdtemp(prefix="autotune-")), framework_bytes(card.hardware())
    kept = ""
    try:
        (folder / "subject").write_bytes(content)
        of_card = variables(card, writable("stand-in"), folder / "devices", devices=number, context_bytes=context)
        given, nothing = [card.name, str(folder), sha256_of(content), str(os.getpid())], subprocess.DEVNULL
        command = [sys.executable, "-m", "autotune.rehearsal", *given]
        done = subprocess.run(command, env=os.environ | of_card, stdin=nothing, capture_output=True, errors="replace")
        answers: TypeAdapter[Rehearsal | Refusal] = TypeAdapter(Rehearsal | Refusal)
        try:
            answer = answers.validate_json((folder / "answer.json").read_bytes())
        except (OSError, ValueError):
            said = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
            raise InfrastructureError(f"the rehearsal's process failed: {said}") from None
        kept = answer.message if isinstance(answer, Refusal) else answer.refused or ""
    finally:
        if str(folder) not in kept:  # which may name a log in it
            shutil.rmtree(folder, ignore_errors=True)
    if isinstance(answer, Refusal):
        raise getattr(errors, answer.error, AutotuneError)(answer.message)
    return answer


def chance_to_fit(memory: Memory, memory_bytes: int, context_spread_bytes: float) -> float:
    """Return the chance that a peak on the stand-in fits a GPU's memory, by the spreads of allocator and context."""
    # How far the stand-in was off in reserved memory: in six published runs at most 1.9 % (tests/fakecuda/README.md).
    spread = math.hypot(0.015 * (memory.reserved_bytes or 0), context_spread_bytes)
    return 0.5 * math.erfc((memory.peak_bytes - memory_bytes) / (spread * math.sqrt(2)))


def _chance(memory: Memory, gpu: Gpu) -> float:
    return chance_to_fit(memory, gpu.memory_bytes, framework_bytes(gpu.hardware())[1])


def rehearse_on_all(**code: Any) -> list[Rehearsal]:
    """Rehearse as `rehearse` for each GPU of the table that the stand-in has, once for a compute capability.

    A capability that the code can't train on is `refused`; its error is raised if it is the first.
    """
    seen: dict[tuple[int, int], Rehearsal] = {}
    found = []
    for gpu in sorted(gpus(), key=lambda gpu: -gpu.memory_bytes):
        if gpu.capability is None or gpu.capability < _LEAST_CAPABILITY:
            continue
        if gpu.capability not in seen:
            try:
                seen[gpu.capability] = rehearse(gpu=gpu.name, **code)
            except InputError as error:  # tf32 on a T4, say
                if not seen:
                    raise
                seen[gpu.capability] = next(iter(seen.values())).model_copy(update={"refused": str(error)})
        first = seen[gpu.capability]
        chance = 0.0 if first.refused else _chance(first.peak, gpu)
        untried: dict[str, Any] = {} if gpu.memory_bytes == first.memory_bytes else {"short": None, "levers": ()}
        update = {"gpu": gpu.name, "memory_bytes": gpu.memory_bytes, "chance_to_fit": chance, **untried}
        found.append(first.model_copy(update=update))
    return found


def main(gpu: str, folder: Path, sha256: str) -> None:
    """Rehearse, on the stand-in for `gpu`, the training in `folder` of that digest, and write the answer there."""
    answer: Value
    try:
        answer = _rehearsed(pickle.loads(read_unchanged(folder / "subject", sha256)), gpu_named(gpu), folder)
    except AutotuneError as error:
        answer = Refusal(error=type(error).__name__, message=str(error))
    write_value(answer, folder / "answer.json")


def _rehearsed(subject: UserTrainer, gpu: Gpu, folder: Path) -> Rehearsal:
    with (
        RunDirectory.create(folder / "run") as directory,
        backend_of(Fleet(), directory.path, device="cuda") as backend,
    ):
        plan = planned(subject, directory, backend, lambda event: None, Stopwatch("planning"))
        numbers, assumed = itertools.count(), None

        def run(config: TrainConfig, memory_bytes: int) -> TrialResult:
            own = plan.workload.fixed_arguments.get("per_device_eval_batch_size", 8)
            # The Trainer has all micro-batches of a step on the device. The last one, after the longest, computes too.
            few, limit_s = plan.micro_steps(config) + 1, 1800.0 if assumed is None else 600.0
            task = SoakTask(eval_batch_sizes=(int(own),), in_parts=True, assumed=assumed, micro_steps=few)
            request = plan.request_of(config, Purpose.SOAK, number=next(numbers), timeout_s=limit_s, task=task)
            limits = request.limits.model_copy(update={"memory_bytes": memory_bytes})
            whole = {"limits": limits, "accumulation_steps": plan.workload.accumulation_steps(config)}
            return backend.pool.run(request.model_copy(update=whole))

        common = {"gpu": gpu.name, "memory_bytes": gpu.memory_bytes, "workload": plan.workload}
        common |= {"devices": plan.baseline.parallelism.world_size, "versions": plan.hardware.versions}
        ample, notes = run(plan.baseline, AMPLE_BYTES), list[str]()
        code = plan.workload.own_code
        assert code is not None
        if UNKNOWN in (told := _not_told(ample)) and not plan.workload.generates:
            tried = dict[int, TrialResult]()
            for assumed in _ASSUMED:
                tried[assumed] = run(plan.baseline, AMPLE_BYTES)
            one, other = (trial.measurement and trial.measurement.parts for trial in tried.values())
            if one is not None and one == other and UNKNOWN not in _not_told(tried[_ASSUMED[-1]]):
                where, both = told.rpartition(f"{UNKNOWN} ")[2], " and with ".join(map(str, _ASSUMED))
                notes.append(f"{where} reads a value that only a GPU computes: with {both} the memory is the same")
                ample = tried[_ASSUMED[-1]]
        seen = ample.measurement
        if seen is None or seen.parts is None:
            assert isinstance(ample.outcome, Failure)
            unseen = {"peak": ample.outcome.memory or Memory(), "parts": PeakParts(phases={}, alive=())}
            refused, log = ample.outcome.cause, directory.path / "trials" / "0000" / "log.txt"
            if ample.outcome.status is TrialStatus.CRASHED and log.exists():  # where in the code, its output says
                refused += f" (its output: {log.rename(folder / 'log.txt')})"
            return Rehearsal(**common, **unseen, chance_to_fit=0.0, refused=refused)
        left_out = (seen.soaked.not_evaluated, seen.soaked.not_saved) if seen.soaked is not None else ()
        notes += too_long(plan.workload, plan.facts) + [line for line in left_out if line]
        if code.is_loop:
            begins = f"a loop of your own: some {OWN_STEPS} optimizer steps ran, on batches in its own order"
            begins += ", and evaluations on two batches each" * ("evaluating" in seen.parts.phases)
            notes.append(f"{begins}; longer batches, and all that it does later, may take more")
        elif "evaluating" in seen.parts.phases and not {"eval_strategy", "do_eval"} & {*plan.workload.fixed_arguments}:
            notes.append("evaluating counts, as your Trainer has an eval_dataset; your arguments don't ask for it")
        common |= {"peak": seen.memory, "parts": seen.parts, "notes": notes}
        chance = _chance(seen.memory, gpu)
        if chance >= 0.5:
            return Rehearsal(**common, chance_to_fit=chance)
        # Near capacity the allocator gives back what it holds unused.
        tight = run(plan.baseline, gpu.memory_bytes)
        if tight.measurement is not None:
            return Rehearsal(**common, chance_to_fit=_chance(tight.measurement.memory, gpu))
        assert isinstance(tight.outcome, Failure)
        short, levers = tight.outcome.cause, list[Lever]()
        if code.is_loop:
            return Rehearsal(**common, chance_to_fit=chance, short=short, levers=None)
        if short.startswith("while evaluating"):
            short += "; a smaller per_device_eval_batch_size, or eval_accumulation_steps, takes less"
        model = cost_model(plan, backend.asker, directory.path, lambda event: None, most_s=20.0)
        for config in _lighter(plan, model, seen):
            measured = run(config, gpu.memory_bytes).measurement
            memory = None if measured is None else measured.memory
            fits = 0.0 if memory is None else _chance(memory, gpu)
            levers.append(Lever(changes=changes(config, plan), memory=memory, chance_to_fit=fits))
            if fits >= 0.5:
                break
        return Rehearsal(**common, chance_to_fit=chance, short=short, levers=levers)


def _not_told(trial: TrialResult) -> str:
    """Return why a trial doesn't tell the memory of training, or of evaluating after it; empty: it does."""
    if isinstance(trial.outcome, Failure):
        return trial.outcome.cause
    return (trial.outcome.soaked and trial.outcome.soaked.not_evaluated) or ""


def _lighter(plan: SearchPlan, model: CostModel | None, seen: Measurement) -> list[TrainConfig]:
    """Return legal configurations to try where the baseline doesn't fit: of the fewest changes the fastest first.

    Without predictions, all that isn't weights, gradients and states is taken to grow with the micro-batch.
    """
    # Whether another micro-batch has the same gradient can't be measured here for a loss of the user's own.
    of_each = {config: changed for config in plan.search_space.legal if (changed := changes(config, plan))}
    legal = [
        config
        for config, changed in of_each.items()
        if all(change.allowance is Allowance.EXACT or change.knob in (MICRO_BATCH, _SHARDING) for change in changed)
        and all(change.knob != "optim" for change in changed)  # of which the exact ones take the same
    ]
    if model is not None:
        predicted = model.predict(legal)
        needed, rates = predicted.needed_bytes.tolist(), predicted.samples_per_second.tolist()
    else:
        rows = seen.parts.alive if seen.parts is not None else ()
        fixed = sum(row.allocated_bytes for row in rows if row.kind in ("weights", "gradients", "optimizer states"))
        rates = [config.per_device_train_batch_size / plan.baseline.per_device_train_batch_size for config in legal]
        needed = [fixed + rate * (seen.memory.peak_bytes - fixed) for rate in rates]
    by_knobs: dict[tuple[str, ...], TrainConfig] = {}
    fitting = [i for i, each in enumerate(needed) if each <= _SURELY * plan.memory_bytes]
    for i in sorted(fitting, key=lambda i: (len(of_each[legal[i]]), -rates[i])):
        by_knobs.setdefault(tuple(change.knob for change in of_each[legal[i]]), legal[i])
    return list(by_knobs.values())[:3]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))
    tempfile.tempdir = sys.argv[2]  # which the parent removes
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
