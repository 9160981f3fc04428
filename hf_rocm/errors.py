"""One tree of errors: what failed, where, expected, found, and the next step.

Everything that hf_rocm raises on purpose is an `HfRocmError`; anything else that escapes is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Mapping


class HfRocmError(Exception):
    """A refusal that the user can act on.

    message: one sentence without a full stop. facts: label → value lines such as file, expected, found.
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
        # the keyword-only arguments would be lost by the default, and ranks send errors to each other
        return (_rebuild, (type(self), self.message, self.facts, self.hint))


def _rebuild(kind: type[HfRocmError], message: str, facts: dict[str, str], hint: str | None) -> HfRocmError:
    return kind(message, facts=facts, hint=hint)


class OptionError(HfRocmError):
    """An argument or environment variable has a value that can't be honoured."""


class OverlayError(HfRocmError):
    """An overlay can't be planned, installed, removed or activated."""


class DigestMismatch(OverlayError):
    """A stock definition is not one that the overlay was made for."""


class LoadError(HfRocmError, OSError):
    """A model can't be loaded. An `OSError` too, since that is what transformers raises and callers catch."""


class RankError(HfRocmError):
    """The ranks that load a model together can't: they differ, one of them failed, or one did not come.

    Every rank that came raises the same one.
    """


class TuningError(HfRocmError):
    """Shapes can't be recorded or tuned here."""


class TableError(TuningError):
    """A table of tuned products can't be used as it is; the facts name its lines."""


class GraphError(HfRocmError):
    """Decoding with graphs was required, and a model or a call can't have it."""


class VerifyError(HfRocmError):
    """A model can't be verified here, or there is nothing of hf_rocm in it to verify."""


class GoldenError(VerifyError):
    """A golden file can't be read or written, or belongs to another model."""


class TierUnavailable(HfRocmError):
    """A tier that the user named can't serve a call; the message lists every reason."""
