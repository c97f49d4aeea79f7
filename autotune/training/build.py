"""Models by name, built with random weights: the built-in catalogue, local directories, hub ids.

``resolve`` turns what the user wrote into a :class:`ModelSpec`, a value that any process can build
from; ``build_model`` does so on the device itself. A name of the catalogue never touches the network.
Weights are never read. Data, adapters and training arguments are somebody else's; called by the
tuner, the worker, the tracer and the command line.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError, one_line
from autotune.training.facts import HEADS, USUAL_TASK, facts_of, tasks_for
from autotune.values.model import ModelFacts, ModelSpec, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# What the library and torch raise at a request they can't fulfil. Out of memory is a RuntimeError; a
# build of torch without CUDA says so by an AssertionError.
_REFUSALS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    NotImplementedError,
    ImportError,
    AssertionError,
)


def tasks_of(spec: ModelSpec) -> tuple[Task, ...]:
    """Return the tasks for which there is a head for this type of model."""
    return tasks_for(spec.model_type, own_code(spec))


def default_task(spec: ModelSpec) -> Task:
    """Return the task a model of this kind is usually trained for."""
    usual = USUAL_TASK[spec.kind]
    if spec.source == "catalogue":
        return usual
    possible = tasks_of(spec)
    return usual if usual in possible else possible[0]


def check_task(spec: ModelSpec, task: Task) -> None:
    """Refuse a task for which the model has no head.

    Raises:
        InputError: There is no such head; the message lists those there are.
    """
    possible = tasks_of(spec)
    if task not in possible:
        raise InputError(
            f"{shown(spec.name)}: model type {spec.model_type!r} has no head for {task.value} "
            f"(possible: {', '.join(t.value for t in possible)})"
        )


def build_config(spec: ModelSpec, task: Task) -> PreTrainedConfig:
    """Make the library's config for a model and a head.

    Raises:
        InputError: The model has no such head, or the library refuses the figures.
    """
    check_task(spec, task)
    config = library_config(spec)
    if config.architectures is None:
        config.architectures = []  # the library iterates over it where a type has several heads, as DeiT
    if task is Task.SEQUENCE_CLASSIFICATION:
        if not spec.config.keys() & {"num_labels", "id2label"}:
            config.num_labels = 2
        text = config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:  # decoders look for the last token before padding
            end = getattr(text, "eos_token_id", None)
            text.pad_token_id = config.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
    if task is Task.CAUSAL_LM and spec.kind == "encoder":
        config.is_decoder = True
    return config


def build_model(
    spec: ModelSpec,
    task: Task,
    *,
    dtype: str,
    attn_implementation: str | None = None,
    device: str,
    experts_implementation: str | None = None,
    config: PreTrainedConfig | None = None,
    quantization: dict[str, Any] | None = None,
    distributed_config: dict[str, Any] | None = None,
    whole_first: bool = False,
    **figures: int,
) -> PreTrainedModel:
    """Build the model with random weights on the device, ready to train.

    Equal torch seeds give equal weights. Running out of memory is not caught here.

    Args:
        spec: The model.
        task: The head.
        dtype: Name of a torch dtype, as "float32" or "bfloat16".
        attn_implementation: Attention kernel; None leaves the choice to the library.
        device: Torch device; "meta" allocates nothing.
        experts_implementation: Way of running experts; None leaves the choice to the library.
        config: In place of the spec's own, as a shallower one.
        quantization: Keyword arguments of `transformers.BitsAndBytesConfig` for the weights of linear layers.
        distributed_config: Keyword arguments of transformers' `DistributedConfig`: this rank's part is built.
        whole_first: Each rank builds all of it before it keeps its part, whose weights are then those of one device.
        figures: Fields of the config to set, such as `num_experts_per_tok`.

    Raises:
        InputError: The library refuses.
    """
    import torch
    import transformers

    from autotune.training.random_weights import whole_weights

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise InputError(f"{dtype!r} is not a torch dtype (as 'float32' or 'bfloat16')")
    options: dict[str, Any] = {"dtype": torch_dtype, "trust_remote_code": spec.trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    config = copy.deepcopy(config or build_config(spec, task)) if figures else config or build_config(spec, task)
    for name, value in figures.items():
        setattr(config.get_text_config(), name, value)
    head = getattr(transformers, HEADS[task][0])
    try:
        in_parts = distributed_config is not None and not whole_first
        first = "meta" if quantization is not None or in_parts else device
        with whole_weights() if whole_first else nullcontext(), torch.device(first):
            model = head.from_config(config, **options)
        # Wav2Vec2 makes one parameter by torch's legacy constructor, which knows nothing of the device around it.
        if any(parameter.device.type != torch.device(first).type for parameter in model.parameters()):
            model.to(first)
    except _REFUSALS as error:
        raise InputError(f"{shown(spec.name)}: can't be built: {one_line(error)}") from error
    if spec.config.get("tie_word_embeddings") is False:
        _untie(model)
    if quantization is not None:
        from autotune.training.quantized import quantize

        quantize(model, quantization, device)
    if distributed_config is not None:
        from autotune.training.tensor_parallel import share_matrices

        model = share_matrices(model, distributed_config)
    return model.train()


def describe(spec: ModelSpec, task: Task) -> ModelFacts:
    """Read off what the model's classes offer, without allocating its weights.

    Raises:
        InputError: The model has no such head, or the library refuses.
    """
    model = build_model(spec, task, dtype="float32", attn_implementation=None, device="meta")
    return facts_of(model, task)


def own_code(spec: ModelSpec) -> dict[str, str]:
    """Return the classes that come with the model, by the auto class they stand for, if they may run."""
    return (spec.config.get("auto_map") or {}) if spec.trust_remote_code else {}


def library_config(spec: ModelSpec) -> PreTrainedConfig:
    """Make the config class from the spec's figures, or with the model's own code if that is trusted."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    location = spec.path if spec.source == "directory" else spec.name
    try:
        if "AutoConfig" in own_code(spec):
            return AutoConfig.from_pretrained(location, revision=spec.revision, trust_remote_code=True)
        figures = copy.deepcopy(spec.config)
        figures.pop("model_type", None)  # the class has its own, which may be a narrower one
        if own_code(spec):
            figures["name_or_path"] = location  # where the library looks for the head's code
        return CONFIG_MAPPING[spec.model_type].from_dict(figures)
    except Exception as error:  # a config class may raise anything at all at figures it didn't expect
        raise InputError(f"{shown(spec.name)}: transformers refuses its config: {one_line(error)}") from error


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer its own weights where the config says so and the library ties all the same.

    T5's config class forces the tie. Loading a checkpoint that has both (T5 v1.1, FLAN, mT5, ByT5) leaves
    them apart, so a model made from figures must be given what a loaded one has.
    """
    import torch

    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None or inputs is None or outputs.weight is not inputs.weight:
        return
    outputs.weight = torch.nn.Parameter(outputs.weight.detach().clone())
    name = next(n for n, module in model.named_modules() if module is outputs)
    model.all_tied_weights_keys.pop(f"{name}.weight", None)


def shown(name: str) -> str:
    """Return a name as it can stand in a message of one line."""
    return name if name.isprintable() else repr(name)
