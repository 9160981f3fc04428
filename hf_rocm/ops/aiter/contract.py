"""Calls by keyword, checked against the declarations of the installed release.

aiter has inserted arguments in the middle of its signatures more than once, some of them required. So nothing is passed
by position, and a call is bound once: every argument that hf_rocm passes must exist, and hf_rocm must support
every argument that is required.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hf_rocm.ops.aiter import detect
from hf_rocm.ops.aiter.detect import Function, Release

Call = Callable[..., Any]


def operator(name: str, passed: frozenset[str], neutral: Mapping[str, Any] | None = None) -> Call | str:
    """The torch operator with this name, for calls with exactly the arguments in `passed`, or why it can't be used.

    neutral: arguments that some releases require, with values that don't change the result.
    """
    return _bound(detect.release(), "operator", name, passed, neutral or {})


def function(name: str, passed: frozenset[str], neutral: Mapping[str, Any] | None = None) -> Call | str:
    """Like `operator`, for a plain function of the package."""
    return _bound(detect.release(), "function", name, passed, neutral or {})


def why_not(call: Call | str) -> str | None:
    return call if isinstance(call, str) else None


def _bound(release: Release, kind: str, name: str, passed: frozenset[str], neutral: Mapping[str, Any]) -> Call | str:
    known: Call | str | None = release.bound.get((kind, name, passed))
    if known is None:
        declared: Function | None = getattr(release, kind)(name)
        known = release.bound[kind, name, passed] = _bind(release, declared, name, passed, neutral)
    return known


def _bind(
    release: Release, declared: Function | None, name: str, passed: frozenset[str], neutral: Mapping[str, Any]
) -> Call | str:
    if declared is None:
        return f"{release.name} has no {name}"
    missing = sorted(passed - {argument.name for argument in declared.arguments})
    if missing:
        return f"{name} of {release.name} has no argument {_listed(missing)}"
    others = [argument.name for argument in declared.arguments if argument.required and argument.name not in passed]
    unknown = [other for other in others if other not in neutral]
    if unknown:
        return f"{name} of {release.name} requires {_listed(unknown)}, which hf_rocm doesn't support"
    return partial(declared.call, **{other: neutral[other] for other in others}) if others else declared.call


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
