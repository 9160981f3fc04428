"""Find a checkpoint's quantised layers, check their tensors, and replace the corresponding layers of the model.

Shapes and dtypes are read from the files' headers, and tensors are read only if their values must be checked. So errors
are raised before memory is allocated for the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_rocm.errors import LoadError
from hf_rocm.loading.safetensors_headers import Entry
from hf_rocm.weights.stored import Expected, LinearFormat, StoredFormat, TensorInfo, Unsupported
from hf_rocm.weights.stored_experts import StoredExperts
from hf_rocm.weights.stored_linear import StoredLayer, StoredLinear

_BIAS = "bias"
_INTEGERS = (torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


class Later(NamedTuple):
    """A tensor that transformers can't load, because its name contains a dot, like that of a child module's tensor."""

    layer: StoredLayer
    name: str
    # Its name in the checkpoint.
    full: str
    entry: Entry

    def load(self) -> None:
        """Read the tensor onto the device of the layer's other tensors."""
        self.layer.attach(self.name, self.entry.tensor())


def replace_layers(model: nn.Module, format: StoredFormat, entries: Mapping[str, Entry]) -> list[Later]:
    """In a model on the meta device, replace the layers that the checkpoint stores in quantised form.

    Returns the tensors that transformers does not load. Raises `Unsupported` if the checkpoint can't be loaded this
    way, and `LoadError` if tensors are missing or have shapes, dtypes or values that the format and the model do not
    allow. In both cases, the model is not changed.
    """
    stored = _layers(format, entries)
    format = format.completed(next(iter(stored.values())))
    kind: type[Any] = StoredLinear if isinstance(format, LinearFormat) else StoredExperts
    modules = {path: module for path, module in model.named_modules() if kind.fits(module)}
    matched = _match(stored, modules, model)
    new, later = {}, list[Later]()
    for path, prefix in matched.items():
        module, tensors = modules[path], stored[prefix]
        reason = kind.refusal(module)
        if reason is not None:
            raise Unsupported(f"its layer {path} {reason}")
        _check(prefix, format.expected(*kind.sizes(module)), tensors)
        infos = {name: entry.info for name, entry in tensors.items() if name not in format.plain}
        new[path] = kind(module, format, infos, biased=_BIAS in tensors)
        later += [
            Later(new[path], name, f"{prefix}.{name}", tensors[name])
            for name in infos
            if not StoredLayer.is_plain(name)
        ]
    for path, layer in new.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = layer
    return later


def _layers(format: StoredFormat, entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Return the tensors of every quantised layer by the layer's name in the checkpoint."""
    modules: dict[str, dict[str, Entry]] = defaultdict(dict)
    for full, entry in entries.items():
        prefix, name = format.split(full)
        modules[prefix][name] = entry
    names_of_layer = set(format.bulk) | {format.marker}
    layers = {}
    for prefix, tensors in modules.items():
        packed = [
            name
            for name in names_of_layer & tensors.keys()
            if name != "weight" or tensors[name].info.dtype in _INTEGERS
        ]
        if packed:
            layers[prefix] = tensors
    if not layers:
        raise Unsupported(f"it has no layer with {format.marker}")
    return layers


def _match(stored: Mapping[str, Any], modules: Mapping[str, Any], model: Any) -> dict[str, str]:
    """Return the name in the checkpoint of every quantised layer by its path in the model.

    The names are equal, or differ only where transformers renames them: in the base model's prefix, or in parts of the
    path before the layer's number.
    """
    base = getattr(model, "base_model_prefix", "")
    matched = {}
    tails = defaultdict(list)
    for path in modules:
        tails[_tail(path)].append(path)
    for prefix in stored:
        names = [prefix, f"{base}.{prefix}", prefix.removeprefix(f"{base}.")]
        matches = [name for name in names if name in modules][:1] or tails.get(_tail(prefix), [])
        path = matches[0] if len(matches) == 1 else ""
        if not path or path in matched:
            raise Unsupported(
                f"its quantised tensors {prefix} do not match exactly one layer of {type(model).__name__}"
            )
        matched[path] = prefix
    return matched


def _tail(path: str) -> str:
    """Return the part of a path that begins with the layer's number, or the whole path if it contains no number."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] :]) if numbers else path


def _check(prefix: str, expected: Mapping[str, Expected], tensors: Mapping[str, Entry]) -> None:
    """Raise `Unsupported` for a tensor that is not part of the format, and `LoadError` for a missing or invalid one."""
    unknown = sorted(tensors.keys() - expected.keys() - {_BIAS})
    if unknown:
        raise Unsupported(f"its layers have an unexpected tensor {unknown[0]} ({prefix})")
    for name, rule in expected.items():
        entry = tensors.get(name)
        if entry is None:
            if rule.required:
                raise _damaged(prefix, name, _text(rule), "no such tensor")
            continue
        dtype, shape = entry.info
        if dtype not in rule.dtypes or (rule.shapes and shape not in rule.shapes):
            raise _damaged(prefix, name, _text(rule), _described(entry.info))
        wrong = None if rule.check is None else rule.check(entry.values())
        if wrong is not None:
            raise _damaged(prefix, name, _text(rule), wrong)


def _damaged(prefix: str, name: str, expected: str, actual: str) -> LoadError:
    return LoadError(
        "a quantised layer of the checkpoint is invalid",
        facts={"tensor": f"{prefix}.{name}", "expected": expected, "found": actual},
        hint="download the checkpoint again; config.json and the weights must be from the same revision",
    )


def _text(rule: Expected) -> str:
    dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in rule.dtypes)
    if not rule.shapes:
        return f"{dtypes} of any shape"
    return f"{' or '.join(str(list(shape)) for shape in rule.shapes)} {dtypes}"


def _described(info: TensorInfo) -> str:
    return f"{list(info.shape)} {str(info.dtype).removeprefix('torch.')}"
