"""Linear layers in 8 or 4 bits: the modules that replace `nn.Linear`, and the GEMM of a whole group.

Layers with the same input share one `QuantizedWeight`. A call of one layer uses only the rows of that layer. A call of
the group uses all rows at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm import ops
from hf_rocm.errors import OptionError
from hf_rocm.layers.grouped_linear import hooks_on_all
from hf_rocm.layers.weight_group import SLOT, PackedLinear, WeightGroup, names_in, register
from hf_rocm.ops.four_bit import INT4, SCALE
from hf_rocm.ops.quantized import ROUNDED_FROM, keeps_rows
from hf_rocm.ops.specs.quantized import QuantizedSpec
from hf_rocm.overlay import bind
from hf_rocm.weights.eligible import refusal
from hf_rocm.weights.encoding import QuantizedWeight
from hf_rocm.weights.fuse import fuse
from hf_rocm.weights.put_back import put_back, put_back_all

# The key of the report in the model's __dict__. The report consists of plain builtins, and `explain` reads it.
REPORT = "_hf_rocm_quantization"

_log = logging.getLogger("hf_rocm")


class Replacement(nn.Module):
    """A module that replaces another one until `restore` or `dequantize`. `quantize` and `prepare` create it.

    dtype: that of the dequantised weights. replaced: a tuple with the original module. follows: whether inputs are
    moved to this module's device, as accelerate did for the replaced module. warns: whether a warning is logged if a
    state dict contains rounded weights.
    """

    dtype: torch.dtype
    replaced: tuple[Any]
    follows: bool
    warns: bool

    def take_place_of(self, module: nn.Module, dtype: torch.dtype, *, warns: bool) -> None:
        """Set the attributes that this class declares.

        Afterwards, the caller frees the weights of `module`, or moves them to the CPU.
        """
        # PyTorch does not register a module in a tuple as a child.
        self.replaced = (module,)
        self.follows = "_hf_hook" in module.__dict__
        self.dtype, self.warns = dtype, warns
        # Includes the encoded weight: forwards of a model with a module in training mode are not recorded.
        self.train(module.training)

    @property
    def kept(self) -> bool:
        """Whether the original weights are kept on the CPU."""
        raise NotImplementedError

    def original(self) -> nn.Module:
        """Return the module that this one replaced, with its original weights or with dequantised ones."""
        raise NotImplementedError

    def ordinary(self) -> nn.Module:
        """Return an ordinary module with the original weights or the dequantised ones."""
        return self.original()

    def warn_if_rounded(self) -> None:
        """Log that a state dict contains rounded weights, unless the original ones are kept."""
        if self.warns and not self.kept:
            _log.warning("the state dict of a quantised model contains its rounded weights in %s", self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replacement:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class QuantizedLinear(PackedLinear, Replacement):
    """Replaces an `nn.Linear`. Its weight is a range of rows of a `QuantizedWeight`.

    State dicts contain the weight in `dtype` on the CPU: the original if it was kept, else the dequantised weight. A
    loaded weight is quantised again.
    """

    quantized: QuantizedWeight

    def __init__(self, linear: Any, quantized: QuantizedWeight, start: int, *, warns: bool) -> None:
        super().__init__()
        self.quantized = quantized
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.start = start
        dtype = linear.weight.dtype if isinstance(linear, Linear) else linear.dtype
        self.take_place_of(linear, dtype, warns=warns)

    def forward(self, x: Tensor) -> Tensor:
        if self.follows:
            x = x.to(self.quantized.scale.device)
        result: Tensor = self.quantized(x, *self._rows())
        return result

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.follows:
            return residual + self.forward(x)
        result: Tensor = self.quantized(x, *self._rows(), residual=residual)
        return result

    def _rows(self) -> tuple[int, ...]:
        # This is faster than attribute access on a module.
        data: Any = self._modules["quantized"]._buffers["data"]  # type: ignore[union-attr]
        alone = self.out_features == data.shape[0]
        return () if alone else (self.start, self.start + self.out_features)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [N, K] in `dtype`. Every access creates a new tensor."""
        return self.quantized.read(self.start, self.start + self.out_features, self.dtype)

    @property
    def bias(self) -> Tensor | None:
        bias = self.quantized.bias
        return None if bias is None else bias[self.start : self.start + self.out_features]

    @property
    def kept(self) -> bool:
        return self.replaced[0].weight.numel() > 0

    def original(self) -> nn.Module:
        linear: Linear = self.replaced[0]
        device = self.quantized.scale.device
        with torch.no_grad(), torch.inference_mode(linear.weight.is_inference()):
            weight = linear.weight.data.to(device, self.dtype) if self.kept else self.weight
            linear.weight.data = weight
            if linear.bias is not None and self.bias is not None:
                linear.bias.data = self.bias.clone()
        return linear

    def extra_repr(self) -> str:
        data = self.quantized.data
        kind = "4 bits" if data.dtype == INT4 else str(data.dtype).removeprefix("torch.")
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.warn_if_rounded()
        weight = self.replaced[0].weight.detach() if self.kept else self.weight.cpu()
        destination[prefix + "weight"] = weight.to(self.dtype)
        if self.bias is not None:
            # Without a clone, it would be a view of the bias of all layers of the group.
            destination[prefix + "bias"] = self.bias.cpu().clone()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected, values = self._shapes(), dict[str, Tensor]()
        for name, shape in expected.items():
            value = state_dict.get(prefix + name)
            if value is None:
                if strict:
                    missing_keys.append(prefix + name)
            elif tuple(value.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: {list(value.shape)} given, {list(shape)} expected"
                )
            elif value.dtype != (dtype := self._dtype(name) or value.dtype):
                error_msgs.append(f"dtype mismatch for {prefix}{name}: {value.dtype} given, {dtype} expected")
            else:
                values[name] = value
        self._take(values)
        if strict:
            unexpected_keys += [
                key
                for key in state_dict
                if key.startswith(prefix)
                and key.removeprefix(prefix) not in expected
                and not key.startswith(prefix + "quantized.")
            ]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in a state dict."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_features,)}

    def _dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in a state dict, or None if the tensor is cast."""
        return None

    @torch.no_grad()
    def _take(self, values: Mapping[str, Tensor]) -> None:
        """Load these tensors of a state dict."""
        if "weight" in values:
            weight = self.weight
            # Rounding rounded weights to 4 bits again would change them.
            if not torch.equal(values["weight"].to(weight), weight):
                self.quantized.write(self.start, values["weight"])
            if self.kept:
                self.replaced[0].weight.data.copy_(values["weight"])
        if "bias" in values and self.bias is not None:
            self.bias.copy_(values["bias"])


@register
class Quantized(WeightGroup):
    """Layers of a module that share one `QuantizedWeight`. They reference this weight, so no addresses are stored."""

    order = 10

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.names, self.sizes = names, sizes

    @classmethod
    def names_for(cls, module: nn.Module, binding: Any) -> tuple[str, ...]:
        return tuple(binding.fuses) if binding.fuses and group_of(module) is not None else ()

    @classmethod
    def form(cls, module: nn.Module, names: tuple[str, ...]) -> str | None:
        # `quantize` or `prepare` formed the group, which can't be fused.
        return refusal(module, names)

    @classmethod
    def restore(cls, module: nn.Module) -> None:
        for name in names_in(module):
            child = module._modules.get(name)
            if isinstance(child, QuantizedLinear):
                put_back(module, name, child.original(), name)
        module.__dict__.pop(SLOT, None)

    @classmethod
    def restore_model(cls, model: nn.Module) -> None:
        """Restore the original layers. Raises `OptionError` and changes nothing if their weights were not kept."""
        discarded = [path for path, module in replacements(model) if not module.kept]
        if discarded:
            raise OptionError(
                "this model was quantised, and its original weights were not kept",
                facts={"layers": f"{len(discarded)}, first {discarded[0]}"},
                hint='load it again, or quantise with keep="cpu"; hf_rocm.dequantize(model) converts the layers to '
                "ordinary ones with the rounded weights, after which restore works",
            )
        replace(model, lambda module: module.original())

    def shared_weight(self, module: nn.Module) -> QuantizedWeight | None:
        """Return the weight that the layers share, or None if it can't be used for all of them at once.

        It can't if a layer was replaced, is not in its place, or has a hook or its own forward.
        """
        children = module.__dict__["_modules"]
        shared, start = None, 0
        for name in self.names:
            child = children.get(name)
            if not isinstance(child, QuantizedLinear):
                return None
            attributes = child.__dict__
            if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
                return None
            weight: QuantizedWeight = attributes["_modules"]["quantized"]
            if attributes["start"] != start or (shared is not None and weight is not shared):
                return None
            shared = weight
            start += attributes["out_features"]
        return shared

    def multiply(self, module: nn.Module, x: Tensor, norm: ops.Norm | None, activation: str | None) -> Tensor | None:
        weight = None if hooks_on_all() else self.shared_weight(module)
        if weight is None:
            return None
        children: Any = module._modules
        if children[self.names[0]].follows:
            return super().multiply(module, x, norm, activation)
        joined: Tensor = weight(x, norm=norm, activation=activation)
        return joined

    def linear(self, module: nn.Module, x: Tensor) -> Tensor | None:
        weight = None if hooks_on_all() else self.shared_weight(module)
        if weight is None:
            return None
        children: Any = module._modules
        joined: Tensor = weight(x.to(weight.scale.device) if children[self.names[0]].follows else x)
        return joined

    def traced(self, module: nn.Module, x: Tensor) -> Tensor | None:
        return self.linear(module, x)

    def nbytes(self, module: nn.Module) -> int:
        weight = self.shared_weight(module)
        return 0 if weight is None else sum(tensor.nbytes for tensor in weight.buffers())

    def __reduce__(self) -> tuple[object, ...]:
        # hf_rocm is required anyway to unpickle the group's layers.
        return Quantized, (self.names, self.sizes)


def group_of(module: nn.Module) -> QuantizedWeight | None:
    """Return the weight of the module's group if the whole group would run as one GEMM now, else None."""
    group = module.__dict__.get(SLOT)
    return group.shared_weight(module) if isinstance(group, Quantized) and not hooks_on_all() else None


def group_layers(module: nn.Module, names: tuple[str, ...]) -> None:
    """Form a group of these quantised layers of a module, which share one weight."""
    children: Any = module._modules
    module.__dict__[SLOT] = Quantized(names, tuple(children[name].out_features for name in names))


def replace(model: nn.Module, replacement: Callable[[Replacement], nn.Module]) -> None:
    """Replace the quantised modules, fuse the resulting groups, and unfreeze the parameters that were frozen."""
    put_back_all(model, Replacement, replacement)
    for module in model.modules():
        if isinstance(module.__dict__.get(SLOT), Quantized):
            names = names_in(module)
            del module.__dict__[SLOT]
            if bind.mode_of(module) != bind.OFF:
                fuse(module, names)
    # Parts of the model may have been quantised in calls of their own.
    for module in model.modules():
        report = module.__dict__.pop(REPORT, None) or {}
        frozen = report.get("froze", ())
        parameters = dict(module.named_parameters()) if frozen else {}
        for name in frozen:
            if name in parameters:
                with torch.inference_mode(parameters[name].is_inference()):
                    parameters[name].requires_grad_()


def replacements(model: nn.Module) -> list[tuple[str, Replacement]]:
    """The quantised modules with their names."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, Replacement)]


def layers(model: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    """The quantised layers with their names."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def specifications(model: nn.Module) -> Iterator[tuple[str, QuantizedSpec]]:
    """Yield (names and sizes of layers, specification) for every quantised GEMM of the model in its current state."""
    joined: set[int] = set()
    for module in model.modules():
        weight = group_of(module)
        if weight is not None:
            joined.add(id(weight))
            children: Any = module._modules
            names = names_in(module)
            yield _specification(" + ".join(names), children[names[0]], weight, len(weight.data))
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and id(module.quantized) not in joined:
            yield _specification(path.rpartition(".")[2], module, module.quantized, module.out_features)


def _specification(name: str, layer: QuantizedLinear, weight: QuantizedWeight, n: int) -> tuple[str, QuantizedSpec]:
    packed, k = weight.data.dtype == INT4, layer.in_features
    group = weight.per_scale if weight.per_scale > 1 else k // weight.scale.shape[1] if packed else 0
    spec = QuantizedSpec(
        dtype=layer.dtype,
        format=weight.data.dtype,
        device=weight.scale.device,
        n=n,
        k=k,
        bias_dtype=None if weight.bias is None else weight.bias.dtype,
        shuffled=weight.shuffled,
        round_input=False,
        group=group,
        scale_dtype=weight.scale.dtype if packed and weight.scale.dtype != SCALE else None,
        zeros=weight.zeros is not None,
        code=weight.code,
        order=weight.order is not None,
    )
    rounds = weight.rounds and not keeps_rows(spec, ROUNDED_FROM)
    return f"{name}, {n} × {k}", spec._replace(round_input=rounds)
