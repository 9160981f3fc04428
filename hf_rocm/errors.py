"""The exception hierarchy. An error states what failed, where, what was expected and found, and the next step.

Errors that a user can act on are `HfRocmError`s; most other exceptions are bugs in hf_rocm.
"""

from __future__ import annotations

from collections.abc import Mapping


class HfRocmError(Exception):
    """An error that the user can act on.

    message: one sentence without a full stop. facts: labelled values, such as file, expected and found.
    hint: the next step. `str(error)` is the whole text, as the command line prints it.
    """

    def __init__(self, message: str, *, facts: Mapping[str, object] | None = None, hint: str | None = None) -> None:
        self.message = message
        self.facts = {label: str(value) for label, value in (facts or {}).items()}
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        width = max((len(label) for label in self.facts), default=0)
        lines = [self.message]
        lines += [f"  {label:<{width}}  {value}" for label, value in self.facts.items()]
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {"error": type(self).__name__, "message": self.message, "facts": self.facts, "hint": self.hint}

    def __reduce__(self) -> tuple[object, ...]:
        # the default would lose the keyword-only arguments, and ranks send pickled errors to each other
        return (_rebuild, (type(self), self.message, self.facts, self.hint))


def _rebuild(kind: type[HfRocmError], message: str, facts: dict[str, str], hint: str | None) -> HfRocmError:
    return kind(message, facts=facts, hint=hint)


class OptionError(HfRocmError):
    """An argument or environment variable has a value that can't be honoured."""


class OverlayError(HfRocmError):
    """An overlay can't be planned, installed, removed or activated."""


class DigestMismatch(OverlayError):
    """A stock definition differs from those that the overlay supports."""


class LoadError(HfRocmError, OSError):
    """A model can't be loaded. Also an `OSError`, because that is what transformers raises and callers catch."""


class RankError(HfRocmError):
    """Ranks can't run a model together: for example, they differ, one of them failed, or one never joined.

    In these three cases, every rank that joined raises the same error.
    """


class TuningError(HfRocmError):
    """Shapes can't be recorded or tuned here."""


class TableError(TuningError):
    """A table of tuned GEMMs or of shapes is invalid or too large, or can't be read. The facts list invalid lines."""


class GraphError(HfRocmError):
    """Graphs are required but can't be used, or a recorded step was wrong and its tokens can't be withdrawn."""


class VerifyError(HfRocmError):
    """A model can't be verified, the given tokens are not valid, or hf_rocm changes nothing in the model."""


class GoldenError(VerifyError):
    """A golden file can't be read or written, or belongs to another model."""


class TierUnavailable(HfRocmError):
    """A tier that the user selected can't serve a call or some layers; the facts list the reasons."""
