"""Argument checks that several public functions share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hf_rocm.errors import LoadError, OptionError


def require_module(model: object, function: str) -> None:
    """Raise `OptionError` unless `model` is a `torch.nn.Module`. function: the public function that was called."""
    from torch import nn

    if isinstance(model, nn.Module):
        return
    actual, hint = type(model).__qualname__, None
    if isinstance(model, (str, os.PathLike)):
        hint = "load it first: model = hf_rocm.from_pretrained(…)"
    elif isinstance(model, type):
        actual = f"the class {model.__qualname__}"
        hint = f"create a model first, for example with {model.__qualname__}.from_pretrained(…)"
    elif isinstance(getattr(model, "model", None), nn.Module):
        # The argument is, for example, a pipeline or a trainer.
        hint = f"pass the `.model` of this {actual}"
    raise OptionError(f"{function} takes a model", facts={"expected": "a torch.nn.Module", "found": actual}, hint=hint)


def require_name(model: object, function: str) -> None:
    """Raise `OptionError` unless `model` is a string or a path: a name on the Hub, or a folder."""
    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(
            f"{function} takes the name of a model, or its folder",
            facts={"expected": "str or os.PathLike", "found": type(model).__qualname__},
            hint="hf_rocm.prepare(model) prepares a model that is loaded already",
        )


def require_families(models: Iterable[object], function: str) -> None:
    """Raise `OptionError` unless all of `models` are strings, the names of model folders of transformers."""
    for model in models:
        if not isinstance(model, str):
            names = isinstance(model, (list, tuple, set, frozenset))
            raise OptionError(
                f"{function} takes names of model folders",
                facts={"expected": "str, such as 'llama'", "found": type(model).__qualname__},
                hint=f"pass the names as separate arguments: hf_rocm.{function}('llama', 'bert')"
                if names
                else "hf_rocm.prepare(model) prepares one model",
            )


def require_bool(value: object, function: str) -> None:
    """Raise `OptionError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise OptionError(
            f"{function} takes True or False",
            facts={"expected": "bool", "found": type(value).__qualname__},
            hint="hf_rocm.prepare(model) prepares one model",
        )


def require_switches(**values: object) -> None:
    """Raise `OptionError` unless all of these arguments are True, False or None. The keywords are their names."""
    for name, value in values.items():
        if value is not None and not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is not valid", facts={"allowed": "True, False or None"})


def require_paths(**values: object) -> None:
    """Raise `OptionError` unless all of these arguments are paths or None. The keywords are their names."""
    for name, value in values.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise OptionError(
                f"{name}={value!r} is not valid",
                facts={"expected": "str or os.PathLike", "found": type(value).__qualname__},
            )


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Return a hint with the known name that is most similar to `name`, or None if none is similar."""
    from difflib import get_close_matches

    matches = get_close_matches(str(name), list(known), 1)
    return f"did you mean {matches[0]}?" if matches else None


def require_folder(model: str | os.PathLike[str]) -> None:
    """Raise `LoadError` if `model` can only be a path, and nothing exists at that path."""
    if _no_folder(model):
        raise not_loaded(model)


def not_loaded(model: str | os.PathLike[str], because: str = "") -> LoadError:
    """Return the error for a model that transformers can't find. because: transformers' own message."""
    return LoadError(
        f"no model could be loaded from {str(model)!r}",
        facts={"found": "the folder does not exist"} if _no_folder(model) else {"transformers error": because},
        hint="check the name or the path; the folder must contain config.json and the weights (model.safetensors)",
    )


def _no_folder(model: str | os.PathLike[str]) -> bool:
    """Return whether `model` can only be a path, and nothing exists there. A name on the Hub has at most one slash."""
    path = os.fspath(model)
    return (path.startswith((".", "~", "/")) or path.count("/") > 1) and not Path(path).exists()
