"""Families of configurations that run the same operators, and the kernels that CUDA devices have. Without torch."""

import functools
import math
from typing import Literal, cast, get_args

from pydantic import Field

from autotune.value import Value
from autotune.values.config import Precision, Quantization, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import Task
from autotune.values.techniques import CHECKPOINTING, AnyAdapter, Checkpointing, OwnAdapter
from autotune.values.workload import RECIPES, RecipeKind, RecipeName, Workload

# CUDA devices by the attention kernels that torch has for them: compute capability 7.5 and before; 8.0; 8.6, 8.9 and
# 12.0, whose blocks have less shared memory; 9.0 and 10.0.
Generation = Literal["turing", "ampere", "small_ampere", "hopper"]

Device = Literal["cpu", "cuda"]
Half = Literal["bfloat16", "float16"]
Dtype = Literal["float32"] | Half


class Family(Value):
    """Configurations whose micro-steps run the same operators: all but micro-batch, accumulation and optimizer."""

    device: Device
    dtype: Dtype = Field(description="of the weights")
    autocast: Half | None = None
    float8: bool = Field(default=False, description="most linear layers multiply in fp8")
    checkpointing: Checkpointing = "none"
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    experts_per_token: int | None = None
    expert_capacity: int | None = None
    chunked_loss: bool = False
    liger: bool = Field(default=False, description="runs Liger's kernels")
    adapter: AnyAdapter | OwnAdapter | None = None
    quantization: Quantization | None = None
    tensor_parallel: int = Field(default=1, description="devices that share each layer's matrices")
    sequence_parallel: int = Field(default=1, description="devices that share the tokens")
    context_parallel: int = Field(default=1, description="devices that exchange keys")
    generation: Generation = Field(default="ampere", description="of a CUDA device: whose kernels and workspaces")
    precompute_ref_log_probs: bool = Field(default=False, description="of a recipe: the reference ran before training")
    compiled: bool = Field(default=False, description="inductor's programs are traced")
    clones_outputs: bool = Field(default=False, description="DDP's, of unused parameters")

    @property
    def gpu(self) -> Generation | None:
        """The generation of a CUDA device; None: it is a CPU."""
        return self.generation if self.device == "cuda" else None

    @property
    def as_written(self) -> "Family":
        return self.model_copy(update={"compiled": False})

    @property
    def half(self) -> bool:
        """Whether products are of 16 bits."""
        return self.autocast is not None or self.dtype != "float32"

    @property
    def checkpointed_every(self) -> int:
        """N where every n-th layer is checkpointed; 1 where none is."""
        return 1 if self.checkpointing == "none" else CHECKPOINTING[self.checkpointing].every

    @property
    def recomputed(self) -> float:
        """The share of the layers whose forward pass runs again in the backward pass."""
        return 0.0 if self.checkpointing == "none" else 1 / self.checkpointed_every


class Shape(Value):
    """Sizes of the inputs of one sample."""

    task: Task
    length: int = Field(description="tokens; images have the size of the config")
    target_length: int | None = None
    images: int | None = Field(default=None, description="of a sample of text")
    image_size: int | None = Field(default=None, description="edge of these in pixels")
    padded: bool = Field(default=False, description="whether batches hold padding")
    recipe: RecipeName | None = Field(default=None, description="of TRL, whose loss it is; None: the model's own")
    beta: float | None = Field(default=None, description="of a recipe that generates, the user's own; None: TRL's")
    completion: int = Field(default=0, description="of a recipe's tokens, those whose log-probabilities count")
    smoothed: bool = Field(default=False, description="the loss is the Trainer's, of smoothed labels")

    @property
    def kind(self) -> RecipeKind | None:
        return None if self.recipe is None else RECIPES[self.recipe].weighing(self.beta)


def family_of(config: TrainConfig, hardware: Hardware, workload: Workload | None = None) -> Family:
    """Return the family of a configuration on a device; `workload`: the user's own code and arguments, if any."""
    code, spread = workload.own_code if workload else None, config.parallelism
    # FSDP2 gathers weights in the 16 bits of mixed precision, DeepSpeed trains a model in them: both without autocast
    # (accelerate 1.15: `_prepare_fsdp2` doesn't call `prepare_model`; native_amp), and both keep fp32 shards as well.
    halves: dict[str, Half] = {"bf16": "bfloat16", "fp16": "float16"}
    half = halves.get(config.mixed_precision)
    dtype: Dtype = "bfloat16" if config.precision is Precision.PURE_BF16 else "float32"
    if half is not None and spread.sharding != "none":
        dtype, half = half, None
    # By default DDP looks for unused parameters unless a model without peft is checkpointed
    # (`Trainer._build_accelerator_args` of transformers 5.23).
    if (looks := spread.ddp_find_unused_parameters) is None:
        looks = config.checkpointing == "none" or config.adapter is not None
    is_static = workload is not None and bool(workload.fixed_arguments.get("ddp_static_graph"))
    is_ddp = spread.sharding == "none" and spread.data_parallel > 1 and not is_static
    # Untraceable: inductor's programs with packed weights, offloaded activations, DDP's buckets or a step of one's own.
    is_plain = spread.is_single and config.quantization is None and config.checkpointing != "offload"
    is_plain &= workload is None or (workload.recipe is None and code is None)
    is_traced = is_plain and not hardware.is_cpu and config.activation_memory_budget is None
    if code is not None and code.weights in get_args(Half):
        dtype = cast(Half, code.weights)
    same = {name: getattr(config, name) for name in Family.model_fields.keys() & TrainConfig.model_fields.keys()}
    same |= {name: getattr(spread, name) for name in ("tensor_parallel", "sequence_parallel", "context_parallel")}
    if code is not None:  # which may have put an adapter on its model, and packed its weights
        same |= {"adapter": config.adapter or code.adapter, "quantization": config.quantization or code.quantization}
    return Family(
        **same,
        device="cpu" if hardware.is_cpu else "cuda",
        dtype=dtype,
        autocast=half,
        float8=config.precision is Precision.FP8,
        liger=config.use_liger_kernel,
        generation=generation_of(hardware.capability),
        compiled=is_traced and config.torch_compile_backend == "inductor",
        clones_outputs=is_ddp and bool(looks),
    )


def shape_of(workload: Workload) -> Shape:
    """Return the inputs at the peak: the longest samples."""
    lengths, recipe = workload.lengths, workload.recipe
    scored = 0 if recipe is None else recipe.completion_length
    if workload.own_code is not None and workload.own_code.recipe is not None:
        scored = workload.sequence_length  # at most
    same = {name: getattr(workload, name) for name in ("task", "target_length", "images", "image_size")}
    return Shape(
        **same,
        length=lengths.maximum if lengths is not None else workload.sequence_length,
        padded=lengths is not None and lengths.differ,
        recipe=workload.own_code.recipe if workload.own_code is not None else recipe and recipe.name,
        beta=workload.fixed_arguments.get("beta") if workload.generates else None,
        completion=scored,
        smoothed=bool(workload.fixed_arguments.get("label_smoothing_factor"))
        and workload.recipe is None
        and workload.task is not Task.SPEECH_CTC,  # whose labels aren't those of frames
    )


def generation_of(capability: tuple[int, int] | None) -> Generation:
    """Return the generation of a compute capability; where there is none, as of AMD's, that of 8.0."""
    if capability is None:
        return "ampere"
    if capability < (8, 0):
        return "turing"
    if capability[0] in (9, 10):
        return "hopper"
    return "small_ampere" if capability in ((8, 6), (8, 9)) or capability[0] == 12 else "ampere"


def workspace_bytes(generation: Generation) -> int:
    """Return the memory that cuBLAS takes of torch's allocator for each thread that uses it."""
    # `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp
    return 32 << 20 if generation == "hopper" else 8_519_680


# Threads that fill the device that most have of a generation: T4, A100, A40, H100.
_THREADS = {"turing": 40 * 1024, "ampere": 108 * 2048, "small_ampere": 84 * 1536, "hopper": 132 * 2048}


@functools.cache
def sum_bytes(rows: int, columns: int, generation: Generation) -> int:
    """Return the scratch memory of a sum over the rows of a matrix: `setReduceConfig` in aten's native/cuda/Reduce.cuh.

    A block sums up 32 times 4 columns. Several share them where a thread of one would have 256 rows or more.
    """

    def power(size: int, most: int) -> int:  # of two, the largest that is no more than both
        return 1 << (min(size, most).bit_length() - 1)

    vector = math.gcd(columns, 4)
    most, wide = 512 // vector, columns // vector
    width = min(power(wide, most), 32)
    height = min(power(rows, most), most // width)
    width = min(power(wide, most), most // height)
    each, blocks, room = -(-rows // height), -(-wide // width), _THREADS[generation] // (width * height)
    if each < 256 or blocks > room:
        return 0
    sharing = max(min(-(-room // blocks), -(-each // 16)), -(-each // 256))
    return 4 * columns * sharing * width * vector if sharing > 1 else 0
