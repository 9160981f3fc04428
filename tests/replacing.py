"""Replace functions of transformers and torch, as users do."""

from __future__ import annotations

from contextlib import contextmanager

import torch


@contextmanager
def replaced(holder, name, change):
    """Replace an entry with change(entry) within the block. holder: a class, a module, a mapping or a registry."""
    before = holder[name] if hasattr(holder, "keys") else getattr(holder, name)
    has_entry = name in getattr(holder, "_local_mapping", holder if hasattr(holder, "keys") else vars(holder))
    put(holder, name, change(before))
    try:
        yield
    finally:
        if has_entry:
            put(holder, name, before)
        else:
            take_away(holder, name)


def put(holder, name, value):
    if hasattr(holder, "keys"):
        holder[name] = value
    else:
        setattr(holder, name, value)


def take_away(holder, name):
    if hasattr(holder, "keys"):
        del holder[name]
    else:
        delattr(holder, name)


def scaled(function):
    """A user's wrapper that multiplies the result, or the first of several results, by 1.25."""

    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        return (result[0] * 1.25, *result[1:]) if isinstance(result, tuple) else result * 1.25

    return wrapper


def masked(function):
    """A user's wrapper that hides the second key from all queries, in prompts and in steps."""

    def wrapper(*args, **kwargs):
        kwargs = {**kwargs, "allow_is_causal_skip": False}
        mask = function(*args, **kwargs).clone()
        mask[..., 1] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask

    return wrapper
