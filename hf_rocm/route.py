"""GEMM routing without model changes: the plain linear layers of one model, or of the whole process, through our ops.

Only exact `nn.Linear` is routed, so quantised layers, adapters and subclasses keep what they are. What the fast
products can't do (gradients, autocast, function transforms) PyTorch's own does, call by call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from hf_rocm import options
from hf_rocm.device import is_rocm
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import library
from hf_rocm.ops.linear import aiter_refuses, choose, is_pytorchs
from hf_rocm.weights import routed
from hf_rocm.weights.eligible import accepted_forward
from hf_rocm.weights.routed import BACKEND

BACKENDS = ("auto", "aiter", *library.LIBRARIES)

Exclusion = str | type | nn.Module

_log = logging.getLogger("hf_rocm")


class Routed:
    """What `route_linear` did to a model. A context manager whose end undoes it; `undo()` does the same."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.layers: list[str] = []  # routed, by their names in the model
        self.skipped: dict[str, str] = {}  # linear layers that were left alone, and why
        self._before: list[tuple[nn.Module, str | None]] = []

    def undo(self) -> None:
        """Give every layer the route that it had before, which for most is none. Twice is as good as once."""
        while self._before:
            linear, before = self._before.pop()
            if before is None:
                linear.__dict__.pop(BACKEND, None)
                routed.release(linear)
            else:
                linear.__dict__[BACKEND] = before

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
    """Run the plain linear layers of a model, one with an overlay or not, through `ops.linear`. In place.

    linear_backend: `auto` is aiter where it serves a call, else PyTorch; `aiter` raises where it doesn't; `hipblaslt`,
    `rocblas` and `ck` are PyTorch's libraries, preferred while such a layer runs. exclude: names (`lm_head`), patterns
    of whole names (`model.layers.0.*`), classes (what is inside one of them), or modules. force: as in `prepare`.

    Returns a `Routed`: `undo()` or the end of a `with` block takes it back, and so does `hf_rocm.restore`. Raises
    `OptionError` or `TierUnavailable` where the backend can't be honoured; then nothing has changed.
    """
    excluded = tuple(_checked(each) for each in exclude)
    result = Routed(linear_backend)
    if not _wanted(linear_backend, force, type(model).__name__):
        return result
    found = list(_linears(model, excluded, result.skipped))
    if linear_backend == "aiter":
        _require_aiter(found)
    for name, linear in found:
        result._before.append((linear, linear.__dict__.get(BACKEND)))
        linear.__dict__[BACKEND] = linear_backend
        routed.attach(linear)
        result.layers.append(name)
    return result


def backend_of(name: object) -> str:
    """The backend of that name, or an `OptionError`."""
    if name not in BACKENDS:
        raise OptionError(f"linear_backend={name!r} is not understood", facts={"allowed": ", ".join(BACKENDS)})
    return str(name)


def unroute(model: nn.Module) -> None:
    """Take the routes of all layers back, whoever made them."""
    for module in model.modules():
        if module.__dict__.pop(BACKEND, None) is not None:
            routed.release(module)


@contextmanager
def routed_linear(*, linear_backend: str = "auto", force: bool | None = None) -> Iterator[None]:
    """Every plain `nn.Linear` of the process, within the block, as in `route_linear`: its class's forward is replaced.

    What was found there is put back, whatever it was, so blocks nest. If somebody else has replaced it in the
    meantime, theirs stays and the `hf_rocm` logger says so; ours, which theirs may call, then only calls what it found.
    """
    if not _wanted(linear_backend, force, "nn.Linear"):
        yield
        return
    found = nn.Linear.__dict__["forward"]
    patch = _patch(found, linear_backend)
    nn.Linear.forward = patch  # type: ignore[method-assign]
    try:
        yield
    finally:
        patch.hf_rocm_live = False  # type: ignore[attr-defined]
        if nn.Linear.__dict__["forward"] is patch:
            nn.Linear.forward = _live(found)  # type: ignore[method-assign]
        elif not hasattr(nn.Linear.__dict__["forward"], "hf_rocm_found"):
            _log.warning("nn.Linear.forward was replaced by someone else after hf_rocm; theirs stays, without ours")


def _patch(found: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        if not forward.hf_rocm_live or self.__class__ is not nn.Linear:  # type: ignore[attr-defined]
            return found(self, input)
        parameters = self.__dict__["_parameters"]
        if parameters.get("weight").__class__ is not nn.Parameter:
            return found(self, input)
        if not is_compiling() and is_pytorchs(input):
            return found(self, input)
        return routed.multiply(input, self.weight, self.bias, backend)

    forward.hf_rocm_live = True  # type: ignore[attr-defined]
    forward.hf_rocm_found = found  # type: ignore[attr-defined]
    return forward


def _live(found: Any) -> Any:
    """What to put back: past patches of ours whose block has ended already."""
    while not getattr(found, "hf_rocm_live", True):
        found = found.hf_rocm_found
    return found


def _wanted(backend: str, force: bool | None, what: str) -> bool:
    """Whether to route at all on this machine. Raises if the backend is unknown, or can't be honoured."""
    backend_of(backend)
    if force is False:
        return False
    if backend in library.LIBRARIES:
        library.check(backend)
    if force is None and not options.force_requested() and not is_rocm():
        if backend != "auto":
            raise OptionError(
                f"linear_backend={backend!r} can't be honoured",
                facts={"reason": "this PyTorch is not a ROCm build"},
                hint="use linear_backend='auto', which leaves the model stock here",
            )
        _log.warning("%s stays stock: this PyTorch is not a ROCm build, so no product is routed", what)
        return False
    return True


def _linears(
    model: nn.Module, excluded: tuple[Exclusion, ...], skipped: dict[str, str]
) -> Iterator[tuple[str, nn.Linear]]:
    classes = tuple(each for each in excluded if isinstance(each, type))
    inside: set[int] = set()
    for module in model.modules():
        if (classes and isinstance(module, classes)) or any(module is each for each in excluded):
            inside.update(id(each) for each in module.modules())
    patterns = [each for each in excluded if isinstance(each, str)]
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        last = name.rpartition(".")[2]
        if id(module) in inside or any(fnmatchcase(name, each) or last == each for each in patterns):
            skipped[name] = "excluded"
        elif type(module) is not nn.Linear:
            skipped[name] = f"a {type(module).__module__}.{type(module).__qualname__}, not a plain nn.Linear"
        elif not isinstance(module._parameters.get("weight"), nn.Parameter):
            skipped[name] = "its weight is no parameter of its own"
        elif not accepted_forward(module):
            skipped[name] = "it has a forward of its own"
        else:
            yield name, module


def _require_aiter(found: list[tuple[str, nn.Linear]]) -> None:
    refused = {
        name: reason
        for name, linear in found
        if (reason := aiter_refuses(choose(linear.weight, linear.bias))) is not None
    }
    if refused:
        first = dict(list(refused.items())[:5])
        raise TierUnavailable(
            f"linear_backend='aiter' can't be honoured for {len(refused)} of {len(found)} layers",
            facts=first,
            hint="exclude these layers, or use linear_backend='auto'",
        )


def _checked(each: Any) -> Exclusion:
    if not isinstance(each, (str, type, nn.Module)):
        raise OptionError(
            "exclude has an entry that is not understood",
            facts={"allowed": "names, patterns, classes and modules", "found": repr(each)},
        )
    return each
