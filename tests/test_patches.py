"""Changes in memory are applied once, and undone when no user is left, in any order and under other wrappers."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import types
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_rocm import patches
from hf_rocm.patches import ABSENT, Change, Entry
from tests.threads import running


class User:
    pass


class Base:
    def method(self):
        return ["base"]

    @classmethod
    def of_class(cls):
        return [cls.__name__]


@pytest.fixture
def owner():
    class Owner(Base):
        def own(self):
            return ["stock"]

        @staticmethod
        def free():
            return ["free"]

    return Owner


def labelled(label):
    """Returns the argument `make` of a `Change`: the changed method adds a label to the original's result."""

    def make(change):
        def method(self):
            return [label, *change.call_of(self)()] if change.live else change.call_of(self)()

        return method

    return make


def test_a_change_is_undone_with_its_last_user(owner):
    stock, first, second = vars(owner)["own"], User(), User()
    change = Change(owner, "own", labelled("a"), key="k")
    patches.apply(change, user=first)
    # Applying twice has no further effect.
    patches.apply(change, user=first)
    patches.apply(Change(owner, "own", labelled("b"), key="k"), user=second)
    assert owner().own() == ["a", "stock"] and patches.of(second) == [change] and patches.on(owner) == [change]
    assert patches.release(first) == [] and owner().own() == ["a", "stock"]
    assert patches.release(first) == [] and patches.release(second) == []
    assert vars(owner)["own"] is stock and not change.live and patches.of(second) == patches.on(owner) == []


def test_users_are_referenced_weakly_and_compared_by_identity(owner):
    class Equal:
        def __eq__(self, other):
            return True

    stock, first, second = vars(owner)["own"], Equal(), Equal()
    patches.apply(Change(owner, "own", labelled("a"), key=1), user=first)
    patches.apply(Change(owner, "own", labelled("a"), key=1), user=second)
    del first
    patches.sweep()
    assert owner().own() == ["a", "stock"]
    del second
    patches.sweep()
    assert vars(owner)["own"] is stock


def test_garbage_collection_takes_effect_at_the_next_operation(owner):
    stock, user = vars(owner)["own"], User()
    user.cycle = user
    patches.apply(Change(owner, "own", labelled("a")), user=user)
    changed = vars(owner)["own"]
    del user

    class Collecting(dict):
        def __setitem__(self, key, value):
            gc.collect()
            super().__setitem__(key, value)

    table = Collecting()
    with patches.applied(Entry(table, "x", lambda _: 1)):
        assert vars(owner)["own"] is changed and table == {"x": 1}
    assert vars(owner)["own"] is stock and table == {}


def test_inherited_attributes_are_inherited_again(owner):
    with patches.applied(
        Change(owner, "method", labelled("a")),
        Change(owner, "of_class", lambda change: classmethod(lambda cls: ["a", *change.call_of(cls)()])),
    ):
        assert owner().method() == ["a", "base"] and owner.of_class() == ["a", "Owner"]
    assert "method" not in vars(owner) and "of_class" not in vars(owner)


def test_static_methods_modules_and_entries_are_restored(owner):
    module, table = types.ModuleType("somewhere"), {"first": 1, "second": 2}
    module.function = stock = len
    stock_free = vars(owner)["free"]
    with patches.applied(
        Change(owner, "free", lambda change: staticmethod(lambda: ["a", *change.call_of(owner)()])),
        Change(module, "function", lambda change: lambda x: change.original(x) + 1),
        Change(module, "added", lambda _: 3),
        Entry(table, "first", lambda _: 10),
        Entry(table, "third", lambda _: 30),
    ):
        assert owner.free() == ["a", "free"] and module.function("ab") == 3 and module.added == 3
        assert table == {"first": 10, "second": 2, "third": 30}
    assert vars(owner)["free"] is stock_free and module.function is stock and not hasattr(module, "added")
    assert list(table.items()) == [("first", 1), ("second", 2)]


def test_changes_are_applied_all_or_none(owner):
    stock = dict(vars(owner))
    user = User()
    with pytest.raises(TypeError):
        patches.apply(
            Change(owner, "own", labelled("a")),
            Change(int, "real", labelled("a")),
            Change(owner, "method", labelled("a")),
            user=user,
        )
    assert dict(vars(owner)) == stock and patches.of(user) == []


def test_a_key_releases_its_own_changes_only(owner):
    user = User()
    patches.apply(Change(owner, "own", labelled("a"), key="a"), Change(owner, "own", labelled("b"), key="b"), user=user)
    assert owner().own() == ["b", "a", "stock"]
    patches.release(user, key="a")
    assert owner().own() == ["b", "stock"]
    patches.release(user)
    assert owner().own() == ["stock"]


def test_another_wrapper_around_a_change_stays_and_the_change_becomes_inert(owner, caplog):
    stock, user = vars(owner)["own"], User()
    change = Change(owner, "own", labelled("a"))
    patches.apply(change, user=user)
    changed = owner.own
    owner.own = wrapper = lambda self: ["theirs", *changed(self)]
    with caplog.at_level(logging.WARNING, "hf_rocm"):
        assert patches.release(user) == [change]
    assert "Owner.own was replaced by other code" in caplog.text
    assert owner.own is wrapper and owner().own() == ["theirs", "stock"]
    assert patches.original(owner, "own") is wrapper
    owner.own = changed
    assert owner().own() == ["stock"]
    assert patches.original(owner, "own") is stock
    patches.sweep()
    assert vars(owner)["own"] is stock


def test_the_same_change_under_a_wrapper_is_reactivated_in_place(owner):
    """The wrapper calls the change. If the change were applied above the wrapper, the recursion would be infinite."""
    change, first, second = Change(owner, "own", labelled("a")), User(), User()
    stock = vars(owner)["own"]
    patches.apply(change, user=first)
    changed = owner.own
    owner.own = lambda self: ["theirs", *changed(self)]
    patches.release(first)
    patches.apply(change, user=second)
    assert owner().own() == ["theirs", "a", "stock"]
    owner.own = changed
    patches.release(second)
    assert vars(owner)["own"] is stock
    patches.apply(change, user=first)
    assert owner().own() == ["a", "stock"]
    # Another library restores stock's function.
    owner.own = stock
    patches.apply(change, user=second)
    assert owner().own() == ["a", "stock"]
    patches.release(first)
    patches.release(second)
    assert vars(owner)["own"] is stock


def test_a_change_above_another_one_can_be_applied_again(owner):
    stock, first, second = vars(owner)["own"], User(), User()
    below, above = Change(owner, "own", labelled("a")), Change(owner, "own", labelled("b"))
    patches.apply(below, user=first)
    for _ in range(2):
        patches.apply(above, user=second)
        assert owner().own() == ["b", "a", "stock"]
        patches.release(second)
        assert owner().own() == ["a", "stock"]
    patches.apply(above, user=second)
    patches.release(first)
    assert owner().own() == ["b", "stock"]
    patches.release(second)
    assert vars(owner)["own"] is stock


def test_the_original_is_the_attribute_without_hf_rocm(owner):
    stock = vars(owner)["own"]
    with patches.applied(Change(owner, "own", labelled("a")), Change(owner, "method", labelled("b"))):
        assert patches.original(owner, "own") is stock and patches.original(owner, "method") is ABSENT
        owner.method = wrapper = lambda self: []
        assert patches.original(owner, "method") is wrapper
        del owner.method


def test_exchange_replaces_only_the_expected_value(owner):
    module = owner()
    one, other = object(), object()
    assert not patches.exchange(module.__dict__, "forward", one, other) and "forward" not in vars(module)
    assert patches.exchange(module.__dict__, "forward", ABSENT, one)
    assert patches.exchange(module.__dict__, "forward", one, other) and module.forward is other
    assert not patches.exchange(module.__dict__, "forward", one, ABSENT)
    assert patches.exchange(module.__dict__, "forward", other, ABSENT) and vars(module) == {}
    cell = (lambda: module).__closure__[0]
    assert patches.exchange(cell, "cell_contents", module, one) and cell.cell_contents is one
    assert patches.exchange(cell, "cell_contents", one, module)


def test_threads_may_change_one_attribute_at_the_same_time(owner):
    stock, wrong = vars(owner)["own"], []

    def work(number):
        for turn in range(200):
            key = number if turn % 2 else "shared"
            with patches.applied(Change(owner, "own", labelled(key), key=key)):
                labels = owner().own()
                if labels.count(key) != 1 or labels[-1] != "stock":
                    wrong.append(labels)

    with running(*(partial(work, number) for number in range(4)), interval=1e-5) as failed:
        pass
    assert not failed
    assert not wrong and vars(owner)["own"] is stock and patches.on(owner) == []


def test_the_original_is_read_while_other_threads_undo_changes(owner):
    changes = [Change(owner, f"method_{number}", lambda change: change.original) for number in range(300)]
    for change in changes:
        setattr(owner, change.name, labelled(change.name))
    done = threading.Event()

    def read():
        while not done.is_set():
            patches.original(owner, "own")

    with running(read, read) as failed:
        try:
            for change in changes:
                user = User()
                patches.apply(change, user=user)
                patches.release(user)
        finally:
            done.set()
    assert not failed


def test_nothing_is_printed_at_exit():
    program = (
        "from hf_rocm import patches\n"
        "class Owner: pass\n"
        "class User: pass\n"
        "user = User(); user.cycle = user; other = User()\n"
        "patches.apply(patches.Change(Owner, 'x', lambda _: 1), user=user)\n"
        "patches.apply(patches.Change(Owner, 'y', lambda _: 1), user=other)\n"
        "import hf_rocm; hf_rocm.kept = other\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr == ""


class Stack(RuleBasedStateMachine):
    """A method that hf_rocm changes and other libraries wrap, in any order."""

    @initialize(inherited=st.booleans())
    def make(self, inherited):
        class Owner(Base):
            pass

        if not inherited:
            Owner.method = lambda self: ["stock"]
        self.owner, self.stock = Owner, vars(Owner).get("method", ABSENT)
        self.users = [User() for _ in range(3)]
        self.needs = [set() for _ in self.users]
        # (label, wrapper, previous attribute) in the order of installation.
        self.wrappers = []
        self.orderly, self.count = True, 0

    @rule(user=st.integers(0, 2), keys=st.sets(st.sampled_from("abc"), min_size=1))
    def apply(self, user, keys):
        changes = [Change(self.owner, "method", labelled(key), key=key) for key in sorted(keys)]
        patches.apply(*changes, user=self.users[user])
        self.needs[user] |= keys

    @rule(user=st.integers(0, 2), key=st.sampled_from("abc"))
    def release_one(self, user, key):
        patches.release(self.users[user], key=key)
        self.needs[user].discard(key)

    @rule(user=st.integers(0, 2), collected=st.booleans())
    def release_all(self, user, collected):
        if collected:
            self.users[user] = User()
            patches.sweep()
        else:
            patches.release(self.users[user])
        self.needs[user] = set()

    @rule()
    def wrap(self):
        own, self.count = vars(self.owner).get("method", ABSENT), self.count + 1
        function, label = self.owner.method, f"theirs{self.count}"
        self.owner.method = wrapper = lambda object: [label, *function(object)]
        self.wrappers.append((label, wrapper, own))

    @rule(index=st.integers(0, 5))
    def unwrap(self, index):
        """Restore the previous attribute unconditionally, as monkeypatch does."""
        if self.wrappers:
            _, wrapper, before = self.wrappers.pop(index % len(self.wrappers))
            self.orderly = self.orderly and vars(self.owner).get("method") is wrapper
            if before is ABSENT:
                if "method" in vars(self.owner):
                    del self.owner.method
            else:
                self.owner.method = before

    @invariant()
    def only_needed_changes_are_live(self):
        if not hasattr(self, "owner"):
            return
        labels = self.owner().method()
        needed = set().union(*self.needs)
        changed = [label for label in labels if label in ("a", "b", "c")]
        assert set(changed) <= needed and len(changed) == len(set(changed))
        assert {change.key for change in patches.on(self.owner)} == needed
        if self.orderly:
            assert set(changed) == needed
            assert [label for label in labels if label.startswith("theirs")] == [
                entry[0] for entry in self.wrappers[::-1]
            ]

    def teardown(self):
        if not hasattr(self, "owner"):
            return
        for user in self.users:
            patches.release(user)
        while self.wrappers:
            self.unwrap(len(self.wrappers) - 1)
        patches.sweep()
        own = vars(self.owner).get("method", ABSENT)
        assert own is self.stock or (not self.orderly and "labelled" not in own.__qualname__)


TestStack = Stack.TestCase
TestStack.settings = settings(max_examples=150, stateful_step_count=25)
