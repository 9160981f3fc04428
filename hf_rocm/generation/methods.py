"""Methods of a model's class that transformers calls while it generates, with ours in front for the models that ask.

As with forwards, no class is replaced and no instance gets an attribute that a copy or a pickle would carry along
wrongly: what sits on the class looks for a mark, a plain string, on the instance that it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_HOOK = "__hf_rocm_method__"


def put_before(cls: type, name: str, function: Callable[..., Any], mark: str) -> None:
    """Let `function(model, inherited, *args, **kwargs)` answer for an inherited method of a class.

    inherited: the method as the class inherits it at that moment, or what was put before it under another mark, bound.
    mark: a name in a model's `__dict__`; for models without it, and for subclasses, the inherited method is called.
    """
    found = cls.__dict__.get(name)
    marks: tuple[str, ...] = getattr(found, _HOOK, ())
    if mark in marks:
        return

    # wraps keeps the signature: generate reads it to tell which arguments a model knows
    @functools.wraps(getattr(cls, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        inherited = found.__get__(self) if found is not None and marks else getattr(super(cls, self), name)
        if mark not in self.__dict__ or type(self) is not cls:
            return inherited(*args, **kwargs)
        return function(self, inherited, *args, **kwargs)

    setattr(method, _HOOK, (*marks, mark))
    setattr(cls, name, method)


def take_away(cls: type, name: str) -> None:
    """Let the class inherit the method again."""
    if hasattr(cls.__dict__.get(name), _HOOK):
        delattr(cls, name)


def own(cls: type, name: str, origin: type) -> bool:
    """Whether a class, or one between it and `origin`, has a method of its own there instead of origin's."""
    for each in cls.__mro__:
        found = each.__dict__.get(name)
        if found is not None and not hasattr(found, _HOOK):
            return each is not origin
    return False
