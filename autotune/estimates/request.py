"""The request of an estimate: the user's options made into a device, a workload and configurations.

Options that can't be used are refused by an InputError, before the model is traced. Notes say what was assumed.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import ValidationError

from autotune.errors import InputError
from autotune.estimates.report import Device
from autotune.planning import workload as workloads
from autotune.planning.options import EstimateOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import baseline_of
from autotune.space.file import load_space
from autotune.space.knobs import make_config, make_point, refused
from autotune.storage.home import rates_of
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.budget import Budget, Effort
from autotune.values.catalogue import Gpu, device_of_memory, gpu_named, gpu_of
from autotune.values.config import Allowance, Scalar, TrainConfig
from autotune.values.estimate import Rates
from autotune.values.hardware import detect
from autotune.values.model import FLASH_PACKAGES, ModelFacts
from autotune.values.techniques import OPTIMIZERS
from autotune.values.workload import Workload

# GPU whose rates order the configurations where only the memory of a device is known.
_REFERENCE_GPU = "a100-80gb"

# Knobs that say how several devices share a training.
WAY = {f"parallelism.{name}" for name in ("sharding", "tensor_parallel", "sequence_parallel")}


class Target(Value):
    """The device of an estimate with its rates; `notes` say what was assumed."""

    device: Device
    rates: Rates
    notes: tuple[str, ...]

    def with_packages(self, point: Mapping[str, Scalar]) -> Self:
        """Return it with the packages that `point` needs taken as installed, unless it is this machine's device."""
        hardware = self.device.hardware
        optimizer = OPTIMIZERS.get(str(point.get("optim")))
        several = str(point.get("parallelism.world_size", 1)) != "1"
        wanted = {
            # Several devices without a given sharding are compared under all shardings, ZeRO among them.
            "deepspeed" if str(point.get("parallelism.sharding", "zero" * several)).startswith("zero") else None,
            FLASH_PACKAGES.get(str(point.get("attn_implementation"))),
            optimizer.package if optimizer is not None else None,
        }
        missing = sorted(name for name in wanted if name is not None and name not in hardware.versions)
        if not missing or hardware.driver is not None or hardware.is_cpu:
            return self
        installed = hardware.model_copy(update={"versions": {**dict.fromkeys(missing, "assumed"), **hardware.versions}})
        device = self.device.model_copy(update={"hardware": installed})
        notes = (*self.notes, *(f"{name} taken as installed" for name in missing))
        return self.model_copy(update={"device": device, "notes": notes})


def check(options: EstimateOptions) -> None:
    workloads.check_recipe(options)
    if options.gpu is not None and options.device != "auto":
        raise InputError(f"--device {options.device}: is of this machine, --gpu {options.gpu} of the table; drop one")
    if options.gpu == "all" and options.memory_bytes is not None:
        raise InputError("--memory: with --gpu all each device has its own")
    if options.fix and options.allow is not None:
        raise InputError(f"--allow {options.allow}: is for a ranking; a given configuration is estimated as it is")
    if options.nodes is not None and options.devices == 1:
        raise InputError(f"--nodes {options.nodes}: is of several devices (--devices)")
    if options.network_gb_s is not None and nodes_of(options.devices, options.nodes) == 1:
        raise InputError(f"--network-gb-s {options.network_gb_s}: is of several nodes (--devices N --nodes M)")
    if options.host_memory_bytes is not None and options.devices == 1 and not options.fix:
        raise InputError("--host-memory: is of several devices, or of a configuration (--fix offload=...)")
    if options.devices > 1 and options.gpu == "all":
        raise InputError(f"--devices {options.devices}: they are of one kind; --gpu NAME instead of all")
    if options.recipe and options.evaluation is not None:
        raise InputError(f"--eval-batch, --eval-samples: the evaluation of --recipe {options.recipe} isn't predicted")
    is_one = options.fix and options.gpu != "all" and (options.devices == 1 or WAY & options.point.keys())
    if options.explain and not is_one:
        raise InputError("--explain: is of one configuration, such as --fix micro-batch=4")


def nodes_of(devices: int, nodes: int | None) -> int:
    """Return the number of nodes that hold `devices`: `nodes`, by default nodes of eight devices each."""
    count = nodes or -(-devices // 8)  # as in NVIDIA's DGX and HGX systems and most rented ones
    if devices % count:
        raise InputError(f"--nodes {count}{' (of eight)' * (nodes is None)}: does not divide the {devices} devices")
    return count


def target_of(options: EstimateOptions) -> Target:
    """Return the device to estimate for: of the table, a GPU of which only the memory is given, or this machine's."""
    if options.gpu is not None:
        return table_target(gpu_named(options.gpu), options.memory_bytes)
    if options.memory_bytes is not None and options.device == "auto":
        hardware = device_of_memory(options.memory_bytes)
        device = Device(name="a GPU", hardware=hardware, memory_bytes=options.memory_bytes, rates=None)
        order = "" if options.fix else f"; the order is that on {_REFERENCE_GPU}"
        note = f"only the memory of the device is known, so no speed{order} (--gpu NAME)"
        return Target(device=device, rates=rates_of(gpu_named(_REFERENCE_GPU).hardware()), notes=(note,))
    hardware = detect(options.device).model_copy(update={"count": None})  # `--devices` sets how many, not this machine
    # Processes on a CPU share its memory.
    each = options.devices // nodes_of(options.devices, options.nodes) if hardware.is_cpu else 1
    memory_bytes = options.memory_bytes or hardware.default_budget_bytes // each
    if memory_bytes * each > hardware.memory_bytes:
        there = show_memory(hardware.memory_bytes // each)
        raise InputError(f"--memory {show_memory(memory_bytes)}: {hardware.name} has {there}")
    rates = rates_of(hardware)
    notes = [f"this machine's {hardware.name} (--gpu NAME for another)"]
    if options.memory_bytes is None:
        notes.append(f"memory {show_memory(memory_bytes)}: what is free now less a margin (--memory)")
    notes.append(f"rates by {rates.source}{'; operators as measured on this device' * (rates.timings is not None)}")
    name = gpu.name if (gpu := gpu_of(hardware.name)) else hardware.name
    device = Device(name=name, hardware=hardware, memory_bytes=memory_bytes, rates=rates.source)
    return Target(device=device, rates=rates, notes=tuple(notes))


def table_target(gpu: Gpu, memory_bytes: int | None = None) -> Target:
    """Return a device of the table, with all of its memory or `memory_bytes` of it."""
    if memory_bytes is not None and memory_bytes > gpu.memory_bytes:
        raise InputError(f"--memory {show_memory(memory_bytes)}: {gpu.name} has {show_memory(gpu.memory_bytes)}")
    hardware = gpu.hardware()
    rates = rates_of(hardware)
    device = Device(name=gpu.name, hardware=hardware, memory_bytes=memory_bytes or gpu.memory_bytes, rates=rates.source)
    note = f"{gpu.name} as its data sheet has it, nothing else on it, with the software of this machine"
    return Target(device=device, rates=rates, notes=(note,))


def workload_of(options: EstimateOptions, kind: str) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload on a kind of device ('cuda', 'cpu'), and a line for each default that was chosen."""
    notes: list[str] = []
    workload = workloads.workload_of(options, kind, notes)
    # With fewer than 8 samples a step on each of several devices, communication would dominate; all have as many.
    usual = -(-workloads.DEFAULT_GLOBAL_BATCH[kind] // (8 * options.devices)) * 8 * options.devices
    workload = workloads.with_batch(workload, workloads.global_batch_of(options, usual, notes), notes)
    return workload, tuple(notes)


def plan_of(workload: Workload, device: Device, facts: ModelFacts, allowance: Allowance) -> SearchPlan:
    """Return a plan with the space of a ranking: the usual one without choices that hardly change a prediction."""
    # Each choice takes time to trace. So attention and experts are computed as by default (by fused kernels, if there
    # are any), fp16 is left out where the device has bf16, and of each field of an adapter only the first choice stays.
    hardware = device.hardware
    space = load_space("cpu" if hardware.is_cpu else "default")
    parameters = {name: p for name, p in space.parameters.items() if not name.endswith("_implementation")}
    for name, parameter in parameters.items():
        if name.startswith("adapter.") and parameter.choices != "lattice":
            parameters[name] = parameter.model_copy(update={"choices": parameter.choices[:1]})
        elif name == "precision" and hardware.has_bf16:
            kept = tuple(choice for choice in parameter.choices if choice != "fp16")
            parameters[name] = parameter.model_copy(update={"choices": kept})
    return SearchPlan(
        workload=workload,
        facts=facts,
        hardware=hardware,
        memory_bytes=device.memory_bytes,
        budget=Budget.of(Effort.QUICK),
        allowance=allowance,
        space=space.model_copy(update={"parameters": parameters}),
        baseline=baseline_of(workload, facts, hardware),
        notes=(),
    )


def config_of(plan: SearchPlan, point: Mapping[str, Scalar]) -> TrainConfig:
    try:
        config = make_config({**make_point(plan.baseline), **point})
    except ValidationError as error:
        raise refused(error) from None
    if (backend := config.torch_compile_backend) not in (None, "inductor"):
        raise InputError(f"--fix compile={backend}: nothing is predicted for it; only for inductor")
    return config
