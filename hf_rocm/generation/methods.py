"""Replace methods that transformers calls on a model's class while it generates, but only for marked models.

As with forwards, no class is replaced, and no instance gets an attribute that would be wrong in a copy or a pickle. The
method on the class checks the instance for a mark, whose value has a builtin type. The class keeps the method as long
as there is a marked model of the class, or a marked copy, that was not restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hf_rocm import patches
from hf_rocm.patches import ABSENT, Change

Method = Callable[..., Any]

# The key of the change to `__setstate__`, which marked copies call.
_COPIES = "copies"


def put_before(model: Any, functions: Mapping[str, Method], mark: str) -> None:
    """Replace methods of a model's class for this model.

    functions: by method name; called as `function(model, inherited, *args, **kwargs)`.
    inherited: the bound method without this change, which may be the replacement for another mark.
    mark: a name in a model's `__dict__`. Models without it, and instances of subclasses, call the inherited method.
    """
    cls = type(model)
    changes = [
        Change(cls, name, partial(_method, function, mark), key=mark)
        for name, function in functions.items()
        if hasattr(cls, name)
    ]
    patches.apply(*changes, Change(cls, "__setstate__", _setstate, key=_COPIES), user=model)


def take_away(model: Any, mark: str) -> None:
    """Undo `put_before` for this model."""
    patches.release(model, key=mark)
    if all(change.key == _COPIES for change in patches.of(model)):
        patches.release(model)


def set_by_others(model: Any, names: Sequence[str]) -> bool:
    """Return whether other code has set one of these methods on the model, or has replaced hf_rocm's on its class."""
    replaced = {change.name for change in patches.replaced() if change.owner is type(model)}
    return any(name in model.__dict__ or name in replaced for name in names)


def own(cls: type, name: str, origin: type) -> bool:
    """Return whether a class before `origin` in the MRO overrides this method."""
    for parent in cls.__mro__:
        if patches.original(parent, name) is not ABSENT:
            return parent is not origin
    return False


def _method(function: Method, mark: str, change: Change) -> Method:
    cls, name = change.owner, str(change.name)

    # `wraps` preserves the signature, from which generate reads the arguments that a model accepts
    @functools.wraps(getattr(cls, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `call_of` would add a call to every step.
        original = change.original
        inherited = getattr(super(cls, self), name) if original is ABSENT else original.__get__(self, cls)
        if mark not in self.__dict__ or type(self) is not cls or not change.live:
            return inherited(*args, **kwargs)
        return function(self, inherited, *args, **kwargs)

    return method


def _setstate(change: Change) -> Method:
    """Replaces `__setstate__`: copies and pickles contain the marks, so a copy needs the methods while it exists."""
    cls = change.owner

    @functools.wraps(cls.__setstate__)
    def __setstate__(self: Any, state: Any) -> None:
        change.call_of(self)(state)
        if change.live and type(self) is cls:
            marked = patches.keyed(self.__dict__)
            needed = [other for other in marked if other.owner is cls or not isinstance(other.owner, type)]
            if needed:
                patches.apply(*needed, change, user=self)

    return __setstate__
