"""The executor of changes in memory: the only code that replaces and restores functions of other packages.

A `Change` is a record: an owner (a class, a module, a registry), a name, the original (or `ABSENT`) and the
replacement. Everything else in hf_rocm declares changes and names their user. A change is applied for its first user
and undone when its last user is released. Users are referenced weakly, so the changes for a model end with the model.

If other code has wrapped or replaced hf_rocm's replacement in the meantime, that code's value is kept. The change is
then no longer `live`, and a replacement that is not live only calls the original. If the replacement becomes the
current value again, the next operation undoes it.

Garbage collection can run while PyTorch compiles or iterates over a table of hooks. So the callback for a collected
user only records the user, and the next operation undoes the user's changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, WeakSet, ref


class _Absent:
    """The original of an attribute that is not in the owner's own dictionary: it is inherited or does not exist."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()

_log = logging.getLogger("hf_rocm")


class Change:
    """A change of one attribute of a class or a module. For entries of a mapping see `Entry`.

    make: a function that is called once with the change and returns the replacement. The replacement reads
    `change.live` on every call and calls `change.original` (see `call_of`) if `live` is false. The executor keeps
    `original` up to date: it is the value below the replacement, which may be another change's replacement.
    key: changes of one attribute with the same key are one change. The second is not applied; its user is added to the
    users of the first.
    """

    def __init__(
        self, owner: Any, name: Hashable, make: Callable[[Change], Any], *, key: Hashable | None = None
    ) -> None:
        self.owner, self.name, self.key = owner, name, key
        self.place = id(owner), name
        self.live = False
        self.original: Any = ABSENT
        self.applied_before = False
        self.users = 0
        self.replacement = make(self)

    def current(self) -> Any:
        """Return the owner's own attribute with this name, or ABSENT."""
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            delattr(self.owner, str(self.name))
        else:
            setattr(self.owner, str(self.name), value)

    def call_of(self, instance: Any) -> Callable[..., Any]:
        """Return the original method as looked up on `instance`, which is the class for class and static methods."""
        cls: Any = self.owner
        is_class = isinstance(instance, type)
        bound: Callable[..., Any] = (
            getattr(super(cls, instance), str(self.name))
            if self.original is ABSENT
            else self.original.__get__(None if is_class else instance, instance if is_class else type(instance))
        )
        return bound

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"


class Entry(Change):
    """A change of one entry of a dictionary: a registry, a function table or PyTorch's tables of global hooks."""

    def current(self) -> Any:
        return self.owner.get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            del self.owner[self.name]
        else:
            self.owner[self.name] = value


# Collected users: the next operation undoes their changes.
_gone: deque[_User] = deque()


class _User:
    """The changes of one user. Users are compared by identity and need not be hashable."""

    def __init__(self, user: Any) -> None:
        self.number = id(user)
        self.changes: list[Change] = []
        self.ref: ReferenceType[Any] = ref(user, self._on_collected)

    # bound as a default argument, because globals may have been deleted at interpreter exit
    def _on_collected(self, _: object, gone: deque[_User] = _gone) -> None:
        gone.append(self)


_lock = threading.RLock()
_users: dict[int, _User] = {}
# Changes by place, in the order in which they were applied.
_live: dict[tuple[int, Hashable], list[Change]] = {}
# Undone changes that something still references, such as their replacements.
_undone: WeakSet[Change] = WeakSet()


def apply(*changes: Change, user: Any) -> None:
    """Apply these changes for a user, all or none.

    A live change is written again only if other code has removed its replacement. A change that was undone is written
    again only if the value below hf_rocm's replacements is its original. Otherwise other code's wrapper may still call
    the replacement, so the change is only made live again.
    """
    with _operation():
        record = _users.get(id(user))
        if record is None or record.ref() is not user:
            record = _User(user)
        joined = [_same(change) or change for change in changes]
        applied: list[Change] = []
        try:
            for change in joined:
                if not change.live:
                    _put(change)
                    applied.append(change)
                elif change.current() is change.original:
                    # Other code removed the replacement.
                    change.write(change.replacement)
        except BaseException:
            for change in reversed(applied):
                _take(change)
            raise
        for change in joined:
            if change not in record.changes:
                record.changes.append(change)
                change.users += 1
        _users[record.number] = record


def release(user: Any, *, key: Hashable | None = None) -> list[Change]:
    """Undo the changes that only this user needs. key: undo only the changes with this key.

    Returns the changes that other code has replaced. That code's value is kept, and a warning is logged.
    """
    with _operation():
        record = _users.get(id(user))
        if record is None or record.ref() is not user:
            return []
        left = _release(record, [change for change in record.changes if key is None or change.key == key])
    _report(left)
    return left


@contextmanager
def applied(*changes: Change) -> Iterator[None]:
    """Apply these changes within a block. Blocks may end in any order."""
    user = _Block()
    apply(*changes, user=user)
    try:
        yield
    finally:
        release(user)


class _Block:
    """The user of a `with` block's changes."""


def of(user: Any) -> list[Change]:
    """Return the changes of a user."""
    record = _users.get(id(user))
    return list(record.changes) if record is not None and record.ref() is user else []


def on(owner: Any) -> list[Change]:
    """Return the live changes of an owner."""
    return [change for changes in list(_live.values()) for change in changes if change.owner is owner]


def keyed(keys: Container[Hashable]) -> list[Change]:
    """Return the live changes whose key is one of these, on all owners."""
    return [change for changes in list(_live.values()) for change in changes if change.key in keys]


def replaced() -> list[Change]:
    """Return the live changes that other code has wrapped or replaced: for each attribute, the last one applied."""
    with _operation():
        return [
            changes[-1]
            for changes in _live.values()
            if not any(change.current() is change.replacement for change in changes)
        ]


def original(owner: Any, name: str) -> Any:
    """Return the owner's value without hf_rocm's changes, or ABSENT. A wrapper from other code is returned as is."""
    entries = owner if isinstance(owner, dict) else vars(owner)
    with _lock:
        value = entries.get(name, ABSENT)
        # most classes of an MRO don't have the attribute
        return ABSENT if value is ABSENT else _beneath(value, (id(owner), name))


def sweep() -> None:
    """Undo the changes of collected users, and replacements that were written back after their change was undone."""
    with _operation():
        pass


def exchange(owner: Any, name: str, expected: Any, replacement: Any) -> bool:
    """Replace one value of a single object (an entry of an instance's `__dict__`, the contents of a closure cell).

    Nothing is recorded, because copies of the object also contain the new value: the new value itself must reference
    the old one. The inverse is the same call with `expected` and `replacement` swapped. Either may be ABSENT.
    Returns False, and changes nothing, if the current value is not `expected`.
    """
    with _lock:
        entries = isinstance(owner, dict)
        if (owner.get(name, ABSENT) if entries else getattr(owner, name, ABSENT)) is not expected:
            return False
        if expected is replacement:
            return True
        if replacement is ABSENT:
            if entries:
                del owner[name]
            else:
                delattr(owner, name)
        elif entries:
            owner[name] = replacement
        else:
            setattr(owner, name, replacement)
        return True


@contextmanager
def _operation() -> Iterator[None]:
    """Take the lock, and first undo the changes of collected users and replacements that were written back."""
    left: list[Change] = []
    with _lock:
        while _gone:
            record = _gone.popleft()
            left += _release(record, list(record.changes))
        for change in list(_undone):
            if change.current() is not change.replacement:
                continue
            if not any(other.replacement is change.replacement for other in _live.get(change.place, ())):
                change.write(change.original)
        yield
    _report(left)


def _release(record: _User, changes: list[Change]) -> list[Change]:
    left = []
    for change in changes:
        record.changes.remove(change)
        change.users -= 1
        if change.users == 0 and not _take(change):
            left.append(change)
    if not record.changes and _users.get(record.number) is record:
        del _users[record.number]
    return left


def _put(change: Change) -> None:
    current = change.current()
    if not change.applied_before or _beneath(current, change.place) is _beneath(change.original, change.place):
        change.original = current
        change.write(change.replacement)
    _live.setdefault(change.place, []).append(change)
    _undone.discard(change)
    change.live = change.applied_before = True


def _take(change: Change) -> bool:
    """Undo one change. Returns False if other code has replaced or wrapped its replacement."""
    change.live = False
    changes = _live[change.place]
    changes.remove(change)
    if not changes:
        del _live[change.place]
    undone = [other for other in _undone if other.place == change.place]
    above = [other for other in (*changes, *undone) if other.original is change.replacement]
    for other in above:
        other.original = change.original
    _undone.add(change)
    current = change.current()
    if current is change.replacement:
        change.write(change.original)
        return True
    return bool(above) or current is change.original


def _same(change: Change) -> Change | None:
    """Return the live change of the same attribute and key, or None."""
    if change.key is None:
        return None
    return next((other for other in _live.get(change.place, ()) if other.key == change.key), None)


def _beneath(value: Any, place: tuple[int, Hashable]) -> Any:
    """Return the value below hf_rocm's replacements, whether their changes are live or undone."""
    changes = [*_live.get(place, ()), *(change for change in _undone if change.place == place)]
    while (change := next((change for change in changes if change.replacement is value), None)) is not None:
        value = change.original
    return value


def _report(left: list[Change]) -> None:
    for change in left:
        _log.warning(
            "%s was replaced by other code after hf_rocm had replaced it; that code's value stays, and hf_rocm's "
            "wrapper only calls the original",
            change,
        )
