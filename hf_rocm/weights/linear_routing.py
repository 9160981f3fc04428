"""GEMM routing without overlays: run the plain linear layers of a model or of the process through `hf_rocm.ops`.

Only modules of the exact class `nn.Linear` are routed; quantised layers, adapters and subclasses are not changed. Calls
that the fast GEMMs do not support (gradients, autocast, function transforms) run PyTorch's own GEMM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.linear import Linear

from hf_rocm import options, patches
from hf_rocm.arguments import require_module, require_switches
from hf_rocm.device import is_rocm
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import blas_backend
from hf_rocm.ops.linear import aiter_refuses, choose, left_to_pytorch
from hf_rocm.patches import Change
from hf_rocm.weights import instance_forward, linear_hook
from hf_rocm.weights.eligible import accepted_forward, linear_refusal
from hf_rocm.weights.linear_hook import BACKEND, FEW_ROWS

BACKENDS = ("auto", "aiter", *blas_backend.LIBRARIES)

Exclusion = str | type | nn.Module

_log = logging.getLogger("hf_rocm")


class _Route:
    """One route of one or more layers. Compared by identity: two routes with the same backend are different."""

    def __init__(self, backend: str) -> None:
        self.backend = backend


# The routes of every layer. The last route is in use. Undoing a route does not change the others.
_routes: WeakKeyDictionary[nn.Module, list[_Route]] = WeakKeyDictionary()


class Routed:
    """The result of `route_linear`. As a context manager, it undoes the routing at the end of the block.

    layers: the names of the routed layers. skipped: the other linear layers, with the reason.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.layers: list[str] = []
        self.skipped: dict[str, str] = {}
        self._route = _Route(backend)
        self._routed: list[nn.Module] = []

    def __repr__(self) -> str:
        left = f", {len(self.skipped)} left alone" if self.skipped else ""
        layers = f"{len(self._routed)} linear layer{'s' * (len(self._routed) != 1)}"
        return f"<Routed: {layers} through {self.backend!r}{left}>"

    def undo(self) -> None:
        """Remove this route from every layer. Idempotent.

        Routes may be undone in any order. The latest of the remaining routes is used from then on.
        """
        while self._routed:
            linear = self._routed.pop()
            routes = _routes.get(linear, [])
            if self._route not in routes:
                # The model was restored.
                continue
            routes.remove(self._route)
            if routes:
                linear.__dict__[BACKEND] = routes[-1].backend
            else:
                _unroute(linear)

    def _add(self, linear: nn.Module) -> None:
        before = linear.__dict__.get(BACKEND)
        # A copied layer has its original's backend, but no routes.
        if before is None or linear not in _routes:
            _routes[linear] = [] if before is None else [_Route(before)]
        _routes[linear].append(self._route)
        linear.__dict__[BACKEND] = self.backend
        instance_forward.attach(linear)
        self._routed.append(linear)

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def route_linear(
    model: nn.Module,
    *,
    linear_backend: str = "auto",
    exclude: Iterable[Exclusion] = (),
    force: bool | None = None,
) -> Routed:
    """Run the plain linear layers of a model through `hf_rocm.ops.linear`, in place. The model needs no overlay.

    model: a `torch.nn.Module`. linear_backend: `auto`: aiter or a Triton kernel where one serves a call, else PyTorch;
    `aiter`: aiter or an error; `hipblaslt`, `rocblas`, `ck`: the library that PyTorch prefers while such a layer runs.
    exclude: layers to skip, given as names (`lm_head`), patterns of whole names (`model.layers.0.*`), classes (all
    layers inside their instances) or modules. force: as in `prepare`.

    Returns a `Routed`, whose `undo()` or `with` block reverts the routing, as `hf_rocm.restore` does. Raises
    `OptionError` if an argument is invalid, and `OptionError` or `TierUnavailable` if the backend is not available. In
    these cases, no layer is changed.
    """
    require_module(model, "route_linear")
    excluded = tuple(_checked(entry) for entry in exclude)
    result = Routed(linear_backend)
    if not _wanted(linear_backend, force, type(model).__name__):
        return result
    linears = list(_linears(model, excluded, result.skipped))
    if linear_backend == "aiter":
        _require_aiter(linears)
    for name, linear in linears:
        result._add(linear)
        result.layers.append(name)
    return result


def route_head(model: Any) -> str | None:
    """Run the output head through hf_rocm's kernel for few rows. Returns the reason if the head stays stock, else None.

    A step of `generate` needs the logits of one token per row, and the head's weight is often the largest matrix.
    model: a transformers model that generates. A head that is routed already keeps its route.
    """
    head = model.get_output_embeddings()
    if head is None:
        return "the model has no output head"
    reason = linear_refusal(head)
    if reason is None and BACKEND not in head.__dict__:
        head.__dict__[BACKEND] = FEW_ROWS
        instance_forward.attach(head)
    return None if reason is None else f"the head {reason}"


def backend_of(name: object) -> str:
    """Return `name` if it is a backend, else raise `OptionError`."""
    if name not in BACKENDS:
        raise OptionError(f"linear_backend={name!r} is not valid", facts={"allowed": ", ".join(BACKENDS)})
    return str(name)


def unroute(model: nn.Module) -> None:
    """Undo all routes of all layers."""
    for module in model.modules():
        if BACKEND in module.__dict__:
            _unroute(module)


def _unroute(linear: nn.Module) -> None:
    _routes.pop(linear, None)
    linear.__dict__.pop(BACKEND, None)
    linear_hook.release(linear)


@contextmanager
def routed_linear(*, linear_backend: str = "auto", force: bool | None = None) -> Iterator[None]:
    """Route every plain `nn.Linear` of the process within the block, as `route_linear` does for a model.

    linear_backend, force: as in `route_linear`. The forward of the class `nn.Linear` is replaced, and restored at the
    end. Blocks may be nested. If other code has replaced this forward in the meantime, that replacement is kept, and a
    warning is logged. The replacement may call hf_rocm's forward, which then only calls the original.
    """
    if not _wanted(linear_backend, force, "nn.Linear"):
        yield
        return
    with patches.applied(Change(Linear, "forward", partial(_forward, linear_backend))):
        yield


def _forward(backend: str, change: Change) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        original: Callable[..., Tensor] = change.original
        if not change.live or self.__class__ is not Linear:
            return original(self, input)
        parameters = self.__dict__["_parameters"]
        if parameters.get("weight").__class__ is not nn.Parameter:
            return original(self, input)
        if not is_compiling() and left_to_pytorch(input):
            return original(self, input)
        return linear_hook.multiply(input, self.weight, self.bias, backend)

    return forward


def _wanted(backend: str, force: bool | None, subject: str) -> bool:
    """Whether to route on this machine. Raises `OptionError` if an argument is invalid or the backend unavailable."""
    backend_of(backend)
    require_switches(force=force)
    if force is False:
        return False
    if backend in blas_backend.LIBRARIES:
        blas_backend.check(backend)
    if force is None and not options.force_requested() and not is_rocm():
        if backend != "auto":
            raise OptionError(
                f"linear_backend={backend!r} is not available",
                facts={"reason": "this PyTorch is not a ROCm build"},
                hint="use linear_backend='auto', which leaves the model stock here",
            )
        _log.warning("%s stays stock: this PyTorch is not a ROCm build, so no GEMM is routed", subject)
        return False
    return True


def _linears(
    model: nn.Module, excluded: tuple[Exclusion, ...], skipped: dict[str, str]
) -> Iterator[tuple[str, Linear]]:
    classes = tuple(entry for entry in excluded if isinstance(entry, type))
    inside: set[int] = set()
    for module in model.modules():
        if (classes and isinstance(module, classes)) or any(module is entry for entry in excluded):
            inside.update(id(member) for member in module.modules())
    patterns = [entry for entry in excluded if isinstance(entry, str)]
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        last = name.rpartition(".")[2]
        if id(module) in inside or any(fnmatchcase(name, pattern) or last == pattern for pattern in patterns):
            skipped[name] = "excluded"
        elif type(module) is not Linear:
            skipped[name] = (
                f"it is of type {type(module).__module__}.{type(module).__qualname__}, not a plain nn.Linear"
            )
        elif not isinstance(module._parameters.get("weight"), nn.Parameter):
            skipped[name] = "its weight is not a separate parameter"
        elif not accepted_forward(module):
            skipped[name] = "it has its own forward"
        else:
            yield name, module


def _require_aiter(linears: list[tuple[str, Linear]]) -> None:
    refused = {
        name: reason
        for name, linear in linears
        if (reason := aiter_refuses(choose(linear.weight, linear.bias))) is not None
    }
    if refused:
        first = dict(list(refused.items())[:5])
        raise TierUnavailable(
            f"linear_backend='aiter' can't serve {len(refused)} of {len(linears)} layers",
            facts=first,
            hint="exclude these layers, or use linear_backend='auto'",
        )


def _checked(entry: Any) -> Exclusion:
    if not isinstance(entry, (str, type, nn.Module)):
        raise OptionError(
            "exclude has an invalid entry",
            facts={"allowed": "names, patterns, classes and modules", "found": repr(entry)},
        )
    return entry
