"""Code shared by all stand-ins: it records calls, raises for wrong calls, and breaks a kernel if a test requests it."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """One call that reached a kernel. `leaf` records a tensor as (dtype, shape, strides)."""

    kernel: str
    arguments: dict[str, Any]


CALLS: list[Call] = []


class WrongCall(Exception):
    """A call for which the real kernel would return a wrong result or crash, or that a stand-in does not support."""


def need(condition: object, sentence: str) -> None:
    if not condition:
        raise WrongCall(sentence)


def broken(name: str) -> str | None:
    file = os.environ.get("STANDIN_BROKEN")
    kernel, _, fault = (Path(file).read_text() if file else "").partition(":")
    return fault if kernel == name else None


def leaf(function: Any) -> Any:
    """Wrap a stand-in: record its calls, raise if a gradient would be lost, and break it if a test requests this."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        arguments = {**dict(zip(names, positional, strict=False)), **keywords}
        tensors = [argument for argument in arguments.values() if isinstance(argument, Tensor)]
        need(
            not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)), f"{name} has no autograd"
        )
        CALLS.append(Call(name, {key: _shown(value) for key, value in arguments.items()}))
        _misbehave(name)
        result = function(*positional, **keywords)
        if broken(name) == "nan":
            for argument in result if isinstance(result, tuple) else [result, arguments.get("out")]:
                if isinstance(argument, Tensor) and argument.is_floating_point():
                    argument.fill_(torch.nan)
        return result

    # aiter does not compare the signatures of functions whose docstring starts like this.
    wrapper.__doc__ = "Members:"
    return wrapper


def _misbehave(name: str) -> None:
    fault = broken(name)
    if fault == "raise":
        raise RuntimeError("hipErrorLaunchFailure")
    if fault == "hang":
        time.sleep(3600)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "build":
        raise SystemExit("[aiter] build failed !!!!!!")


def _shown(value: Any) -> Any:
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value
