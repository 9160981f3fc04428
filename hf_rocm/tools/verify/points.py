"""The points that are compared inside a layer: the results of its modules and operations, in stock's order.

In a prepared model, several projections are fused into one GEMM, and their modules are not called. The results of
hf_rocm's operations are therefore recorded under the names of stock's modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm.layers.weight_group import SLOT
from hf_rocm.ops.registry import Route, watching
from hf_rocm.tools.verify.intercept import Interceptor, first_tensor, hidden_of, intercepted, with_hidden

# The output of the whole layer.
OUTPUT = "output"
# The prefix for the input of a linear layer: the result of attention or of the activation.
INPUT = "in "
ROTATED = ("rotated query", "rotated key")
ATTENTION = {"attend_into_cache", "attention", "decode_attention", "varlen_attention"}


class Recorder:
    """Record the points of one run by layer and name: the compared positions as [N, D], on the CPU.

    Names are paths relative to the layer. keeps: [B, S] masks for the current call, one for each length that its
    tensors may have. inside: the layers whose inner points are recorded; for other layers, only the output is recorded.
    rotary: also record the results of the model file's own rotary functions. forced: layer → the input that replaces
    the computed one.
    """

    def __init__(
        self, blocks: dict[str, nn.Module], outside: dict[str, nn.Module], *, inside: set[str], rotary: bool = False
    ) -> None:
        self._blocks, self._outside, self._inside, self._rotary = blocks, outside, inside, rotary
        # (layer, path inside it, module).
        self._stack: list[tuple[str, str, nn.Module]] = []
        # The layer's input and its modules' results. If a linear layer's input is one of these, it is not recorded.
        self._values: list[Tensor | None] = []
        self.keeps: tuple[Tensor, ...] = ()
        self.forced: dict[str, Tensor] = {}
        self.points: dict[str, dict[str, Tensor]] = {}
        self.inputs: dict[str, Tensor] = {}
        # (layer, path) → hf_rocm's operations that ran in it.
        self.ran: dict[tuple[str, str], set[str]] = {}

    def begin(self, keeps: tuple[Tensor, ...], forced: dict[str, Tensor] | None = None) -> None:
        self.keeps, self.forced, self.points, self.inputs = keeps, forced or {}, {}, {}

    @contextmanager
    def recording(self) -> Iterator[list[Route]]:
        interceptors: dict[int, Interceptor] = {}
        for layer, block in self._blocks.items():
            for path, module in block.named_modules() if layer in self._inside else [("", block)]:
                interceptors[id(module)] = self._interceptor(layer, path)
        for path, module in self._outside.items():
            interceptors.setdefault(id(module), self._interceptor(path, ""))
        with ExitStack() as stack:
            stack.enter_context(intercepted(interceptors))
            if self._rotary:
                stack.enter_context(_rotations_recorded(list(self._blocks.values()), self._rotation))
            yield stack.enter_context(watching(self._operation))

    def _interceptor(self, layer: str, path: str) -> Interceptor:
        def intercept(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
        ) -> Any:
            if not path:
                args, kwargs = self._enter(layer, args, kwargs)
            elif isinstance(module, Linear):
                hidden = hidden_of(args, kwargs)
                if not any(hidden is value for value in self._values):
                    self._put(layer, f"{INPUT}{path}", hidden)
            self._stack.append((layer, path, module))
            try:
                result = call(*args, **kwargs)
            finally:
                self._stack.pop()
            value = first_tensor(result)
            self._put(layer, path or OUTPUT, value)
            self._values.append(value)
            return result

        return intercept

    def _enter(
        self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = hidden_of(args, kwargs)
        self._values = [hidden]
        if hidden is None or not hidden.is_floating_point():
            return args, kwargs
        forced = self.forced.get(layer)
        if forced is not None and forced.shape == hidden.shape:
            hidden = forced.to(hidden.device, hidden.dtype)
            self._values = [hidden]
            return with_hidden(args, kwargs, hidden)
        self.inputs[layer] = hidden.detach().cpu()
        return args, kwargs

    def _put(self, layer: str, name: str, value: Tensor | None) -> None:
        rows = None if value is None or not value.is_floating_point() else self._rows(value.detach())
        if rows is not None:
            self.points.setdefault(layer, {})[name] = rows

    def _rows(self, value: Tensor) -> Tensor | None:
        for keep in self.keeps:
            b, s = keep.shape
            if value.dim() > 2 and value.shape[:2] == (b, s):
                return value.reshape(b * s, -1)[keep.flatten().to(value.device)].cpu()
            if value.dim() == 2 and value.shape[0] == b * s:
                return value[keep.flatten().to(value.device)].cpu()
        return None

    def _rotation(self, query: Tensor, key: Tensor) -> None:
        """Record the rotated query [B, H, S, D] and key [B, Hkv, S, D]."""
        layer, path, _ = self._stack[-1] if self._stack else ("", "", None)
        if layer in self._inside and query.dim() == 4 and key.dim() == 4:
            for name, value in zip(ROTATED, (query, key), strict=True):
                self._put(layer, _join(path, name), value.transpose(1, 2))

    def _operation(self, name: str, result: Any) -> None:
        if not self._stack or self._stack[-1][0] not in self._inside:
            return
        layer, path, module = self._stack[-1]
        self.ran.setdefault((layer, path), set()).add(name)
        value = first_tensor(result)
        if name == "rope" and isinstance(result, tuple):
            self._rotation(*result)
        elif name in ATTENTION:
            self._put(layer, _join(path, "attention"), value)
        elif value is not None:
            group: Any = module.__dict__.get(SLOT)
            sizes = getattr(group, "sizes", ())
            if sizes and sum(sizes) == value.shape[-1]:
                for part, rows in zip(group.names, value.split(sizes, dim=-1), strict=True):
                    self._put(layer, _join(path, part), rows)


def label(layer: str, name: str, ran: dict[tuple[str, str], set[str]]) -> str:
    """Return the readable name of a point. A linear layer's input is named after the operation before it, if known."""
    if not name.startswith(INPUT):
        return name
    path = name.removeprefix(INPUT).rpartition(".")[0]
    operations = ran.get((layer, path), set())
    if operations & ATTENTION:
        return _join(path, "attention")
    return _join(path, "activation") if "act_and_mul" in operations else name.replace(INPUT, "input of ")


def same_point(points: dict[str, Tensor], name: str) -> Tensor | None:
    """Return the point with this name, or None.

    If a linear layer's input was not recorded, return the result of attention in the same module.
    """
    point = points.get(name)
    if point is None and name.startswith(INPUT):
        point = points.get(_join(name.removeprefix(INPUT).rpartition(".")[0], "attention"))
    return point


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def _rotations_recorded(blocks: list[nn.Module], record: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Pass the results of the model files' rotary functions to `record` within the block."""
    homes = {type(module).__module__ for block in blocks for module in block.modules()}
    originals: list[tuple[dict[str, Any], str, Any]] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, tuple) and len(result) == 2:
                record(*result)
            return result

        return rotate

    for home in homes:
        names = vars(sys.modules[home]) if home.startswith("transformers.models.") else {}
        for name in [name for name in names if name.startswith("apply_rotary_pos_emb")]:
            originals.append((names, name, names[name]))
            names[name] = recorded(names[name])
    try:
        yield
    finally:
        for names, name, function in originals:
            names[name] = function
