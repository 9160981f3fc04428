"""The plan of a command as data, shared by the dry run, the JSON output and the real run.

Nothing is written here. Removing an overlay restores the bytes from before its installation, and `Action.inverse`
undoes any action.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from packaging.version import Version

from hf_rocm.errors import DigestMismatch, OverlayError
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import LISTED, FileState, Installed, LeftOut, pip, some, the_others

_INSTALL = "install-overlays"


class Verb(str, Enum):
    INSTALL = "install"
    UPDATE = "update"
    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True)
class Action:
    """What a command does with one file, with the file's content before and after."""

    verb: Verb
    model: str
    file: Path
    before: bytes
    after: bytes
    overlay: str

    def inverse(self) -> Action:
        return Action(self.verb, self.model, self.file, self.after, self.before, self.overlay)

    def to_dict(self) -> dict[str, object]:
        return {
            "action": self.verb.value,
            "model": self.model,
            "overlay": self.overlay,
            "file": str(self.file),
            "bytes_before": len(self.before),
            "bytes_after": len(self.after),
        }


@dataclass(frozen=True)
class Plan:
    """All actions of a command. Nothing is written unless `refusals` is empty."""

    command: str
    installation: Installation
    states: tuple[FileState, ...]
    actions: tuple[Action, ...]
    refusals: tuple[OverlayError, ...]
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def writes(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.verb is not Verb.KEEP)

    @property
    def errors(self) -> tuple[OverlayError, ...]:
        """The refusals as shown to users. `install-overlays` shows one error for all files that upstream changed, if
        there are many of them.
        """
        changed = [state for state in self.states if state.outgrown and _refuse_writing(state) is None]
        if self.command != _INSTALL or len(changed) <= LISTED:
            return self.refusals
        others = [error for state in self.states if state not in changed and (error := _refuse_install(state))]
        return (_refuse_many(changed, self), *others)

    def check(self) -> None:
        """Raise the first refusal, if any."""
        if self.refusals:
            raise self.refusals[0]

    def to_dict(self) -> dict[str, object]:
        return {
            "command": self.command,
            "transformers": {"path": str(self.installation.root), "version": self.installation.version},
            "actions": [action.to_dict() for action in self.actions],
            "refused": [error.to_dict() for error in self.refusals],
            "left_out": self.left_out.to_dict(),
        }


def plan_install(installation: Installation, states: Iterable[FileState]) -> Plan:
    """Plan to add or update the block of every file. Files that must not be changed get a refusal instead."""
    return _plan(_INSTALL, installation, states, _refuse_install, _install)


def plan_uninstall(installation: Installation, states: Iterable[FileState]) -> Plan:
    """Plan to remove the block from every file that has one. Files that must not be changed get a refusal instead."""
    return _plan("uninstall-overlays", installation, states, _refuse_writing, _remove)


def _plan(
    command: str,
    installation: Installation,
    states: Iterable[FileState],
    refuse: Callable[[FileState], OverlayError | None],
    act: Callable[[FileState], Action],
) -> Plan:
    states = tuple(states)
    errors = {state.model: error for state in states if (error := refuse(state)) is not None}
    actions = tuple(act(state) for state in states if state.model not in errors)
    return Plan(command, installation, states, actions, tuple(errors.values()))


def _refuse_install(state: FileState) -> OverlayError | None:
    return _refuse_writing(state) or state.mismatch()


def _refuse_many(changed: Sequence[FileState], plan: Plan) -> OverlayError:
    release, total = plan.installation.version, len(plan.states)
    newest = max((newest for state in changed if (newest := state.newest_checked)), key=Version, default=None)
    names = [state.model for state in changed]
    skip = f"`hf-rocm {_INSTALL} --skip-changed` installs {the_others(total - len(names))}"
    see = f"`hf-rocm status --diff {names[0]}` shows a difference"
    return DigestMismatch(
        f"{len(names)} of {total} files are not files that the overlays were made for",
        facts={
            "folder": plan.installation.root,
            "expected": f"transformers up to {newest}" if newest else f"transformers {release}, not edited",
            "found": f"transformers {release}, whose definitions differ",
            "models": f"{some(names)} (--all: one error for each)",
        },
        hint=f"{pip(newest)}; or {skip if len(names) < total else see}"
        if newest
        else f"{changed[0].reinstall()}; or {see}",
    )


def _refuse_writing(state: FileState) -> OverlayError | None:
    if state.link is not None:
        return _refuse_link(state, state.link)
    if state.installed is Installed.EDITED:
        return OverlayError(
            f"{state.file.name} has been edited since its overlay was installed",
            facts={
                "file": state.file,
                "expected": "the stock file and one block, as hf-rocm wrote them",
                "found": state.detail,
            },
            hint=f"run `hf-rocm status --diff {state.model}` to see the edit, or {state.reinstall()}",
        )
    return None


def _refuse_link(state: FileState, link: Path) -> OverlayError:
    ordinary, label = ("an ordinary file", "file") if link == state.file else ("an ordinary folder", "folder")
    if link.name == "__pycache__":
        hint = f"remove the link (rm '{link}'); Python creates the folder again"
    else:
        hint = (
            "let uv copy instead of link: "
            f"UV_LINK_MODE=copy uv pip install --reinstall --no-deps transformers=={state.release}"
        )
    return OverlayError(
        f"{link.name} is a symbolic link, whose target may be shared",
        facts={label: link, "expected": ordinary, "found": f"a link to {os.readlink(link)}"},  # noqa: PTH115 (as is)
        hint=hint,
    )


def _install(state: FileState) -> Action:
    assert state.data is not None and state.overlay is not None
    if state.installed is Installed.YES:
        return Action(Verb.KEEP, state.model, state.file, state.data, state.data, state.overlay.id)
    verb = Verb.INSTALL if state.installed is Installed.NO else Verb.UPDATE
    return Action(verb, state.model, state.file, state.data, state.rendered(), state.overlay.id)


def _remove(state: FileState) -> Action:
    data = state.data or b""
    if state.written is None:
        return Action(Verb.KEEP, state.model, state.file, data, data, state.overlay.id if state.overlay else "")
    return Action(Verb.REMOVE, state.model, state.file, data, state.stock, state.written.overlay)
