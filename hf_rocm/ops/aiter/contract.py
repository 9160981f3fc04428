"""Calls by keyword, checked against what the installed release declares.

aiter inserted arguments in the middle of its signatures more than once, some of them required. So nothing is passed
by position, and a call is bound once: what must be given has to exist, and what exists and is required has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hf_rocm.ops.aiter import detect
from hf_rocm.ops.aiter.detect import Function, Release

Call = Callable[..., Any]


def operator(name: str, gives: frozenset[str], neutral: Mapping[str, Any] | None = None) -> Call | str:
    """The torch operator of that name, to be called with exactly `gives`; or why it can't be, in a sentence.

    neutral: arguments that some releases require, and the value under which they change nothing.
    """
    return _bound(detect.release(), "operator", name, gives, neutral or {})


def function(name: str, gives: frozenset[str], neutral: Mapping[str, Any] | None = None) -> Call | str:
    """The same for a plain function of the package."""
    return _bound(detect.release(), "function", name, gives, neutral or {})


def why_not(call: Call | str) -> str | None:
    return call if isinstance(call, str) else None


def _bound(release: Release, kind: str, name: str, gives: frozenset[str], neutral: Mapping[str, Any]) -> Call | str:
    known: Call | str | None = release.bound.get((kind, name, gives))
    if known is None:
        found: Function | None = getattr(release, kind)(name)
        known = release.bound[kind, name, gives] = _bind(release, found, name, gives, neutral)
    return known


def _bind(
    release: Release, found: Function | None, name: str, gives: frozenset[str], neutral: Mapping[str, Any]
) -> Call | str:
    if found is None:
        return f"{release.name} has no {name}"
    declared = {each.name for each in found.arguments}
    missing = sorted(gives - declared)
    if missing:
        return f"{name} of {release.name} has no argument {_listed(missing)}"
    further = [each.name for each in found.arguments if each.required and each.name not in gives]
    unknown = [each for each in further if each not in neutral]
    if unknown:
        return f"{name} of {release.name} requires {_listed(unknown)}, which hf_rocm doesn't know"
    return partial(found.call, **{each: neutral[each] for each in further}) if further else found.call


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
