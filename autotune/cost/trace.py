"""Runs one micro-step of a model, or one forward pass of an evaluation, on the meta device mostly. Returns its tape."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from accelerate.utils import convert_to_fp32
from torch.utils.checkpoint import checkpoint
from transformers.trainer_pt_utils import LabelSmoother

from autotune.cost.family import Family, Shape
from autotune.cost.kernels import flash_attention_2, liger_kernels, scratch_bytes
from autotune.cost.meta import tensors_in
from autotune.cost.own_training import OwnTraining
from autotune.cost.post_training import log_probs_head
from autotune.cost.profile import TRANSFER
from autotune.cost.semantics import Semantics
from autotune.cost.tape import Recorder, Tape
from autotune.training.dataset import joined_batch
from autotune.training.facts import experts_of
from autotune.training.inputs import OF_ONE_CLASS, image_or_sound, image_text, labels_of
from autotune.training.loss import base_model
from autotune.values.model import Task
from autotune.values.techniques import CHECKPOINTING


def micro_step(model: Any, family: Family, shape: Shape, batch: int, own: OwnTraining | None = None) -> Tape:
    """Return the tape of one forward and backward pass of a model in training mode, with its adapter.

    `own`: the user's own training, whose batches and loss take the place of the model's.
    """
    with _recording(model, family, shape, batch, own) as (recorder, semantics, forward):

        def loss() -> Any:
            with semantics:
                return forward()["loss"]

        return recorder.step(model, loss)


def evaluation_step(model: Any, family: Family, shape: Shape, batch: int) -> Tape:
    """Return the tape of one forward pass in evaluation mode, without gradients; the outputs stay until its end."""
    # In a recipe this pass is the reference's.
    has_adapter = shape.recipe is not None and hasattr(model, "disable_adapter")
    model.eval()
    try:
        with (
            model.disable_adapter() if has_adapter else contextlib.nullcontext(),
            _recording(model, family, shape, batch) as (recorder, semantics, forward),
            torch.no_grad(),
        ):
            with semantics:
                output = forward()
            ignored = {"loss", *getattr(model.config, "keys_to_ignore_at_inference", ("cache", "past_key_values"))}
            kept = tensors_in([value for name, value in output.items() if name not in ignored])
            kept_bytes = float(sum(tensor.nbytes for tensor in kept))
            recorder.end_of_forward()
    finally:
        model.train()
    return recorder.tape(kept_bytes)


@contextlib.contextmanager
def _recording(
    model: Any, family: Family, shape: Shape, batch: int, own: OwnTraining | None = None
) -> Iterator[tuple[Recorder, Semantics, Callable[[], Any]]]:
    """Record what runs inside; yield the recorder, how operators run, and the forward pass."""
    known = [*model.parameters(), *model.buffers(), *([] if own is None else [*own.tensors, *own.inputs(batch)])]
    is_own = shape.task is Task.OWN  # the module too
    inputs = make_inputs(model.config, shape, batch) if own is None else {}
    on_cuda = family.device == "cuda"
    shows = shape.task is Task.IMAGE_TEXT_TO_TEXT
    scratch = functools.partial(scratch_bytes, generation=family.generation) if on_cuda else None
    recorder = Recorder(
        [*known, *inputs.values()], scratch, numbers=shows, attended=family.sequence_parallel // family.context_parallel
    )
    autocast = getattr(torch, family.autocast) if family.autocast else None
    dtype: torch.dtype = getattr(model, "dtype", torch.float32) if autocast is None else autocast
    semantics = Semantics(
        family.device, recorder, autocast=autocast, padded=shape.padded,
        experts=max(1, experts_of(model.config)) if not is_own else None, generation=family.generation, images=shows,
        context_parallel=family.context_parallel,
    )  # fmt: skip
    if not is_own:
        _set_checkpointing(model, family, semantics, recorder)

    def leave(*_: Any) -> None:
        recorder.modules.pop()

    with contextlib.ExitStack() as changed:
        if family.liger:
            changed.enter_context(liger_kernels(model, recorder, family))
        changed.enter_context(recorder)
        if shape.recipe is not None and shape.task is Task.CAUSAL_LM:
            head = log_probs_head(model, recorder, on_cuda=on_cuda, dtype=dtype, scored=shape.completion)
            changed.enter_context(head)
        changed.enter_context(flash_attention_2(recorder, dtype))
        changed.enter_context(library_autocast(family, semantics))
        for name, module in model.named_modules():
            changed.enter_context(module.register_forward_pre_hook(lambda *_, name=name: recorder.modules.append(name)))
            changed.enter_context(module.register_forward_hook(leave, always_call=True))
        if own is None:
            yield recorder, semantics, lambda: _output(model, inputs, semantics, family, shape)
        else:
            yield recorder, semantics, lambda: {"loss": own.loss(model, batch, semantics, family)}


def _set_checkpointing(model: Any, family: Family, semantics: Semantics, recorder: Recorder) -> None:
    """Have a model run the layers again that its family says, and lay their inputs on the host meanwhile if it does."""
    base = base_model(model)
    if family.checkpointing == "none":
        if base.supports_gradient_checkpointing:
            base._set_gradient_checkpointing(enable=False)
        return
    kind = CHECKPOINTING[family.checkpointing]

    # To the host as `torch.autograd.graph.save_on_cpu`.
    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
        recorder.note_kernel("to_host", 0.0, tensor, kind=TRANSFER)
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def unpack(packed: tuple[torch.Size, torch.dtype, torch.device, bool]) -> torch.Tensor:
        shape, dtype, device, requires_grad = packed
        tensor = torch.empty(shape, dtype=dtype, device=device)
        recorder.note_kernel("from_host", 0.0, tensor, kind=TRANSFER)
        return tensor.requires_grad_(requires_grad)

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if kind.offload else contextlib.nullcontext():
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs
            )

    # As `gradient_checkpointing_enable`: frozen embeddings' (LoRA) output is a leaf, which stays and gets a gradient.
    if base.main_input_name == "input_ids":
        base.disable_input_require_grads()
        base.enable_input_require_grads()
    every = {"every_n_layers": kind.every} if kind.every > 1 else {}
    run_again = functools.partial(run, context_fn=lambda: (contextlib.nullcontext(), semantics.again()))
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_again, **every)


def _output(model: Any, inputs: dict[str, torch.Tensor], semantics: Semantics, family: Family, shape: Shape) -> Any:
    labels = inputs["labels"]
    if shape.recipe is not None or shape.smoothed:
        inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        if shape.smoothed and shape.task.has_targets:
            inputs["decoder_input_ids"] = labels
    with semantics.casting():
        output = model(**inputs)
    if family.autocast is not None:  # accelerate converts every output: ConvertOutputsToFp32
        output = convert_to_fp32(output)
    if family.clones_outputs and torch.is_grad_enabled():  # `_DDPSink` of torch.nn.parallel.distributed
        output = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in output.items()}
    if shape.smoothed:
        output["loss"] = LabelSmoother()(output, labels, shift_labels=shape.task is Task.CAUSAL_LM)
    if shape.recipe == "reward":
        chosen, rejected = output["logits"].squeeze(-1).chunk(2)
        output["loss"] = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    return output


@contextlib.contextmanager
def library_autocast(family: Family, semantics: Semantics) -> Iterator[None]:
    """Let libraries ask for autocast and switch it off while the tracer casts by itself: the meta device has none."""
    original: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == "meta" and not kwargs.get("enabled", True):  # as peft's LoRA on experts does
            return semantics.casting(on=False)
        return original(device_type, *args, **kwargs)

    # peft's layers on packed weights ask whether CUDA's autocast is on; nothing on the meta device is cast by that.
    before = torch.is_autocast_enabled("cuda")
    is_asked = family.quantization is not None and family.device == "cuda" and family.autocast is not None
    torch.set_autocast_enabled("cuda", before or is_asked)
    try:
        with mock.patch.object(torch, "autocast", autocast):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def make_inputs(config: Any, shape: Shape, batch: int, *, device: str = "meta") -> dict[str, torch.Tensor]:
    """Return the inputs of a batch, with the names that a trial's data have; values at random where there are any."""
    batch *= shape.kind.sequences if shape.kind else 1
    vocabulary: int = getattr(config.get_text_config(), "vocab_size", None) or 2

    def ids(*size: int, below: int | None = None) -> torch.Tensor:
        return torch.randint(below or vocabulary, size, device=device)

    if shape.task is Task.IMAGE_TEXT_TO_TEXT:  # tensors whose values a model asks for are on the host
        shown = image_text(config, shape.images, shape.image_size)
        tokens = torch.full((shape.length,), int(shown.token == 0))
        tokens[shown.positions] = shown.token
        # Of images that are stacked a model asks which are none.
        pixels = torch.ones(shown.pixels, device="cpu" if shown.image.is_stacked else device)
        marks = {name: torch.tensor(values) for name, values in shown.marks(shape.length).items()}
        inputs = joined_batch([{"input_ids": tokens, "pixel_values": pixels, **marks}] * batch)
    elif shape.task.takes_text:
        mask = torch.ones((batch, shape.length), dtype=torch.long, device=device)
        inputs = {"input_ids": ids(batch, shape.length), "attention_mask": mask}
        if config.model_type in ("xlm", "flaubert"):  # which check them on the host
            inputs["lengths"] = torch.full((batch,), shape.length)
    else:
        name, size, colours = image_or_sound(config, shape.length)
        whole = (batch, *size)
        inputs = {name: ids(*whole, below=colours) if colours else torch.zeros(whole, device=device)}
    if shape.task in (Task.SEQUENCE_CLASSIFICATION, Task.IMAGE_CLASSIFICATION, Task.AUDIO_CLASSIFICATION):
        is_class, classes = config.problem_type in OF_ONE_CLASS, getattr(config, "num_labels", 2)
        labels = ids(batch, below=classes) if is_class else torch.zeros((batch, classes), device=device)
        return {**inputs, "labels": labels}
    if shape.task is Task.SPEECH_CTC:  # real ones, as the library looks at them: no blanks, and no two neighbours alike
        ordinary = [i for i in range(config.vocab_size) if i != config.pad_token_id][:2]
        count = labels_of(shape.length)
        return {**inputs, "labels": torch.tensor(ordinary).repeat(count)[:count].repeat(batch, 1)}
    return {**inputs, "labels": ids(batch, (shape.task.has_targets and shape.target_length) or shape.length)}
