"""quantize: quantise the linear layers of a model's blocks to 8 or 4 bits in place, and undo it.

The encodings are subclasses of `QuantizedWeight`, one per file. Embeddings, norms and routers keep their dtype. So do
experts, unless the encoding has a class for them, and the head, unless it is requested. Layers that can't be quantised
are left unchanged and listed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm import options
from hf_rocm.arguments import did_you_mean, require_module, require_switches
from hf_rocm.device import is_rocm
from hf_rocm.errors import OptionError
from hf_rocm.layers.weight_group import SLOT, names_in
from hf_rocm.weights.encoding import QuantizedWeight, encodings
from hf_rocm.weights.kinds import import_all
from hf_rocm.weights.preshuffle import unshuffle
from hf_rocm.weights.put_back import put_back_all
from hf_rocm.weights.quantize_plan import Group, plan
from hf_rocm.weights.quantized import REPORT as REPORT
from hf_rocm.weights.quantized import QuantizedLinear, Replacement, group_layers, replace, replacements
from hf_rocm.weights.quantized import layers as layers
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLayer

ModelT = TypeVar("ModelT", bound=nn.Module)

_MARKS = (
    "hf_quantizer",
    "is_quantized",
    "quantization_method",
    "quantization_config",
    "_is_quantized",
    "_pre_quantization_dtype",
)
# Rows of the random input with which a layer's error is measured.
_SAMPLES = 8

_log = logging.getLogger("hf_rocm")


def quantize(
    model: ModelT,
    kind: str,
    *,
    keep: str | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    force: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelT:
    """Quantise the linear layers of a loaded model's blocks to 8 or 4 bits in place.

    kind: `fp8`, `int8`, or `int4` in groups of 128 numbers; `int4-g64` and `int4-g32` in smaller groups; or `mxfp4`,
    4-bit floats in blocks of 32 that share a power of two. keep: `cpu` keeps the original weights in host memory, so
    that `restore` can bring them back; None frees them. exclude: names or patterns of layers to skip, such as
    `down_proj` or `model.layers.0.*`. head: also quantise the layer that computes the logits, unless it shares the
    embedding's weight. force: as in `prepare`. progress: a function that is called with the number of groups of layers
    that have been quantised and the total. After the call, no parameter requires gradients. The peak memory is that of
    the original model plus one group of layers.

    Returns the same model. Raises `OptionError` if an argument is invalid, if the model is already quantised or in
    training mode, if it has no layer that can be quantised, or if the ROCm path is disabled.
    """
    _check(model, kind, keep, force)
    encoding = encodings()[kind]
    format = encoding.format_for(model, kind)
    refuses = None if encoding.experts is None else encoding.experts.refusal
    groups, left = plan(model, exclude, lambda weight: encoding.refuses(weight, format), head=head, experts=refuses)
    if not groups:
        raise OptionError(
            "this model has no layer that can be quantised",
            facts=dict(list(left.items())[:5]),
            hint="only nn.Linear layers inside repeated blocks and, in mxfp4, stacked experts are quantised",
        )
    before = nbytes(model)
    errors: dict[str, float] = {}
    warns = True
    with torch.inference_mode(False), torch.no_grad():
        for done, group in enumerate(groups):
            quantize_one = _quantize if isinstance(group.module._modules[group.names[0]], Linear) else _quantize_experts
            errors.update(quantize_one(group, encoding, format, keep is not None, warns=warns))
            warns = False
            if progress is not None:
                progress(done + 1, len(groups))
    worst = max(errors, key=errors.__getitem__)
    model.__dict__[REPORT] = {
        "kind": kind,
        "format": encoding.described(format),
        "layers": len(errors),
        # layer → the reason why it keeps its dtype
        "left": left,
        "kept": keep,
        "bytes": [before, nbytes(model)],
        "error": {"mean": sum(errors.values()) / len(errors), "max": errors[worst], "worst": worst},
        "froze": freeze(model),
    }
    _log.info("%s: %s", type(model).__name__, summary(model))
    return model


def dequantize(model: ModelT) -> ModelT:
    """Replace the quantised layers and experts of a model with ordinary ones in place.

    After `keep="cpu"` they have the original weights, otherwise the dequantised ones, in the model's current dtype. The
    `quantization_config` of a quantised checkpoint is removed from the model's config.
    Returns the same model. Raises `OptionError` if model is not a `torch.nn.Module`.
    """
    require_module(model, "dequantize")
    stored = any(isinstance(module, (StoredLayer, EncodedLinear)) for module in model.modules())
    replace(model, lambda module: module.ordinary())
    put_back_all(model, StoredLayer, lambda layer: layer.ordinary())
    if stored:
        _forget_format(model)
    return model


def summary(model: nn.Module) -> str | None:
    """Describe the quantised layers, and their error after `quantize`, in a sentence; None if there are none."""
    report = model.__dict__.get(REPORT)
    if report is None or not any(isinstance(module, (Replacement, StoredLayer)) for module in model.modules()):
        return None
    before, after = (size / 2**20 for size in report["bytes"])
    error = report["error"]
    if error is None:
        left = f"; {len(report['left'])} more stay as they are" if report["left"] else ""
        return f"{report['layers']} layers as in the checkpoint, {report['format']}, {after:.0f} MiB{left}"
    form = "" if report["format"] == report["kind"] else f" ({report['format']})"
    return (
        f"{report['layers']} layers in {report['kind']}{form}, {before:.0f} MiB before and {after:.0f} "
        f"after; the mean error of their outputs is {error['mean']:.1%}, the largest is {error['max']:.1%} "
        f"({error['worst']})"
    )


def _check(model: nn.Module, kind: str, keep: str | None, force: bool | None) -> None:
    require_module(model, "quantize")
    check_options(kind, keep, force)
    if replacements(model):
        raise OptionError("this model is already quantised", facts={"found": summary(model) or "quantised layers"})
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "hf_quantizer", None) is not None:
        method = getattr(config, "quant_method", None) or getattr(model, "quantization_method", "another library")
        raise OptionError(
            f"this model is already quantised, by {getattr(method, 'value', method)}",
            hint="load the checkpoint without quantization_config, or load one that is not quantised",
        )
    if model.training:
        raise OptionError(
            "quantised weights can't be trained, and the model is in training mode", hint="call model.eval() first"
        )


def kinds() -> list[str]:
    """The names of all kinds."""
    import_all()
    return list(encodings())


def check_options(
    kind: str, keep: str | None = None, force: bool | None = None, *, enabled_by: str = "force=True"
) -> None:
    """Raise `OptionError`, before a model is loaded, if an argument is invalid for every model.

    Also raises `OptionError` if the ROCm path is disabled. enabled_by: the option that enables the ROCm path, as it
    appears in the hint.
    """
    require_switches(force=force)
    if kind not in kinds():
        known = kinds()
        raise OptionError(
            f"quantize has no kind {kind!r}", facts={"known": ", ".join(known)}, hint=did_you_mean(kind, known)
        )
    if keep not in (None, "cpu"):
        raise OptionError(f"quantize can't keep the originals on {keep!r}", facts={"allowed": 'None or "cpu"'})
    if force is False or not (force or options.force_requested() or is_rocm()):
        raise OptionError(
            "quantize is part of the ROCm path, which is disabled",
            facts={"because": "force=False" if force is False else "this PyTorch is not a ROCm build"},
            hint=f"{enabled_by} or HF_ROCM_FORCE=1 enables it on any machine",
        )


def _quantize(
    group: Group, encoding: type[QuantizedWeight], format: Any, keep: bool, *, warns: bool
) -> dict[str, float]:
    """Replace the layers of a group. Returns the relative error of every layer's output on a random input."""
    module, names = group.module, group.names
    unshuffle(module)
    linears: list[Any] = [module._modules[name] for name in names]
    sample = _sample(linears[0].weight)
    expected = [F.linear(sample, linear.weight, linear.bias) for linear in linears]
    quantized = _round(linears, encoding, format)
    if set(names_in(module)).intersection(names):
        # Delete the reference, so that a fused group's memory is freed once no parameter uses it.
        del module.__dict__[SLOT]
    errors, start = {}, 0
    for name, linear, wanted in zip(names, linears, expected, strict=True):
        layer = QuantizedLinear(linear, quantized, start, warns=warns and not start)
        _empty(linear, keep)
        module._modules[name] = layer
        start += layer.out_features
        path = f"{group.path}.{name}" if group.path else name
        errors[path] = _relative_error(layer(sample), wanted)
    if len(names) > 1:
        group_layers(module, names)
    if quantized.scale.is_cuda:
        # The freed memory does not fit the next allocations.
        torch.cuda.empty_cache()
    return errors


def _quantize_experts(
    group: Group, encoding: type[QuantizedWeight], format: Any, keep: bool, *, warns: bool
) -> dict[str, float]:
    """Replace a module of stacked experts. Returns the relative error of its output, as `_quantize` does."""
    (name,) = group.names
    experts: Any = group.module._modules[name]
    assert encoding.experts is not None
    unshuffle(experts)
    layer = encoding.experts(experts, warns=warns)
    spec = layer.specification(top_k=2)
    sample = _sample(experts.down_proj.new_empty(0, spec.hidden))
    ids = torch.arange(2 * len(sample), device=sample.device).view(-1, 2) % spec.experts
    weights = torch.full_like(ids, 0.5, dtype=sample.dtype)
    error = _relative_error(layer(sample, ids, weights), layer.reference(sample, ids, weights))
    layer.release(keep=keep)
    group.module._modules[name] = layer
    if sample.is_cuda:
        torch.cuda.empty_cache()
    return {f"{group.path}.{name}" if group.path else name: error}


def _round(linears: Sequence[Any], encoding: type[QuantizedWeight], format: Any) -> QuantizedWeight:
    first = linears[0].weight
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    quantized = encoding.empty(sum(linear.out_features for linear in linears), first, format, bias)
    start = 0
    for linear in linears:
        quantized.write(start, linear.weight.detach())
        start += linear.out_features
    quantized.written(first.dtype)
    return quantized


def _forget_format(model: nn.Module) -> None:
    """Remove what transformers stored about a quantised checkpoint from a model that is no longer quantised."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in _MARKS:
                getattr(holder, "__dict__", {}).pop(name, None)


def _empty(linear: Linear, keep: bool) -> None:
    """Free a layer's bias, and free its weight or keep it in host memory."""
    for name, parameter in list(linear.named_parameters()):
        with torch.inference_mode(parameter.is_inference()):
            data = parameter.data
            # on the CPU, the clone separates the weight from a fused block or a mapped file
            parameter.data = data.cpu().clone() if keep and name == "weight" else data.new_empty(0)
            parameter.grad = None


def _sample(weight: Tensor) -> Tensor:
    """Return normally distributed numbers, the same for equal K, without using the global random state."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_SAMPLES, weight.shape[1], generator=generator).to(weight.device, weight.dtype)


def _relative_error(actual: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    size = wanted.norm().item()
    return (actual.float() - wanted).norm().item() / size if size else 0.0


def freeze(model: nn.Module) -> list[str]:
    """Freeze all parameters, because quantised layers have no gradients. Returns the names of the frozen parameters."""
    required = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in required:
        model.get_parameter(name).requires_grad_(False)
    return required


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
