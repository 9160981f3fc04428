"""save_quantized: write a quantised model as a compressed-tensors checkpoint, with its packed weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import Linear

from hf_rocm import patches
from hf_rocm.arguments import require_module
from hf_rocm.errors import OptionError
from hf_rocm.loading.stored_quantizer import StoredConfig, StoredQuantizer
from hf_rocm.ops.eight_bit import FP8, INT8
from hf_rocm.ops.four_bit import E2M1, INT4, PER_WORD
from hf_rocm.ops.mxfp4 import BLOCK, MXFP4
from hf_rocm.patches import Change, Entry
from hf_rocm.weights.compressed_tensors import parse
from hf_rocm.weights.four_bit import FourBitWeight
from hf_rocm.weights.quantized import QuantizedLinear, layers, replacements
from hf_rocm.weights.stored import LinearFormat, TensorInfo
from hf_rocm.weights.stored_linear import EncodedLinear, StoredLinear


def save_quantized(model: nn.Module, folder: str | PathLike[str], **arguments: Any) -> None:
    """Write a model that `hf_rocm.quantize` quantised, in the compressed-tensors format, with `save_pretrained`.

    The checkpoint contains the packed weights and their scales, so it is as small as the quantised model. Stock
    transformers (with the `compressed-tensors` package) and `hf_rocm.from_pretrained` can load it. arguments: those of
    `save_pretrained`.
    Weights in e4m3fnuz (gfx942) are stored in e4m3fn, and those with magnitudes below 2⁻⁶ are rounded to multiples
    of 2⁻⁹. The model is unchanged afterwards; other threads must not use it while it is saved.
    Raises `OptionError` if model is not a `torch.nn.Module`, is not quantised, has quantised experts, layers of several
    kinds or no `save_pretrained`, if folder is not a path, if a `state_dict` is given, or if the model was loaded from
    a quantised checkpoint, which `save_pretrained` writes in the checkpoint's own format.
    """
    require_module(model, "save_quantized")
    if not isinstance(folder, (str, PathLike)):
        raise OptionError(
            "save_quantized takes a folder",
            facts={"expected": "str or os.PathLike", "found": type(folder).__qualname__},
        )
    linears, quantized = layers(model), replacements(model)
    if not quantized:
        raise OptionError("this model is not quantised", hint='hf_rocm.quantize(model, "int4") quantises it')
    if any(isinstance(layer, EncodedLinear) for _, layer in linears):
        raise OptionError(
            "this model was loaded from a quantised checkpoint",
            hint="model.save_pretrained writes it in the checkpoint's own format",
        )
    if len(linears) < len(quantized):
        raise OptionError(
            "stock transformers reads no format that has both experts and other layers in MXFP4",
            hint='model.save_pretrained writes an ordinary checkpoint; quantize(..., exclude=["experts"]) leaves the '
            "experts as they are",
        )
    kinds: dict[str, str] = {}
    for path, layer in linears:
        kinds.setdefault(json.dumps(_scheme(layer, [])["config_groups"]["group_0"]["weights"]), path)
    if len(kinds) > 1:
        raise OptionError(
            "save_quantized writes no checkpoint whose layers have different kinds of weights",
            facts={path: kind for kind, path in kinds.items()},
            hint="model.save_pretrained writes an ordinary checkpoint",
        )
    if arguments.get("state_dict") is not None:
        raise OptionError(
            "save_quantized writes the model's own weights, and takes no state_dict",
            hint="load the state dict into the model first",
        )
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise OptionError(f"{type(model).__name__} has no save_pretrained", hint="pass the transformers model itself")
    with patches.applied(*_as_checkpoint(model, linears)):
        save(folder, **arguments)


def _as_checkpoint(model: Any, linears: list[tuple[str, QuantizedLinear]]) -> Iterator[Change]:
    """Yield the changes that make the model look as if it had been loaded from a compressed-tensors checkpoint."""
    others = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    given = _scheme(linears[0][1], others)
    format = parse(given)
    assert isinstance(format, LinearFormat)
    config = StoredConfig(given, format, given["quant_method"])
    for path, layer in linears:
        parent, _, name = path.rpartition(".")
        yield Entry(model.get_submodule(parent)._modules, name, _constant(_stored(layer, format)))
    yield Entry(model.__dict__, "hf_quantizer", lambda _: StoredQuantizer(config))
    yield Entry(model.config.__dict__, "quantization_config", lambda _: config)


def _constant(value: Any) -> Callable[[Any], Any]:
    """Return a function for an `Entry` that returns this value."""
    return lambda _: value


def _scheme(layer: QuantizedLinear, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint with this layer's encoding. ignore: the other linear layers."""
    weight = layer.quantized
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None
    if weight.code == E2M1:
        format = "mxfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK}
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    elif isinstance(weight, FourBitWeight):
        format = "pack-quantized"
        group = layer.in_features // weight.scale.shape[1]
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    else:
        number = "int" if weight.data.dtype == INT8 else "float"
        format = f"{number}-quantized"
        weights = {"num_bits": 8, "type": number, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": number, "strategy": "token", "dynamic": True, "symmetric": True}
    group_0 = {
        "targets": ["Linear"],
        "weights": {**weights, "symmetric": True, "dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _stored(layer: QuantizedLinear, format: LinearFormat) -> EncodedLinear:
    """Return a layer whose state dict contains the checkpoint's tensors."""
    n, k = layer.out_features, layer.in_features
    scale = layer.quantized.scale[layer.start : layer.start + n]
    small: dict[str, torch.Tensor]
    if layer.quantized.code == E2M1:
        small = {}
        large = {
            "weight_packed": TensorInfo(MXFP4, (n, k // 2)),
            "weight_scale": TensorInfo(MXFP4, tuple(scale.shape)),
        }
    elif isinstance(layer.quantized, FourBitWeight):
        small = {"weight_shape": torch.tensor([n, k])}
        large = {
            "weight_packed": TensorInfo(INT4, (n, k // PER_WORD)),
            "weight_scale": TensorInfo(scale.dtype, tuple(scale.shape)),
        }
    else:
        small = {"weight_scale": scale[:, None]}
        large = {"weight": TensorInfo(INT8 if layer.quantized.data.dtype == INT8 else FP8, (n, k))}
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in small.items()} | large
    stored = StoredLinear(layer.replaced[0], format, infos, biased=False)
    stored.training = layer.training
    for name in infos:
        stored._buffers[name] = small.get(name, torch.empty(0, dtype=torch.int8))
    return EncodedLinear(stored, layer.quantized, layer.start)
