"""Random steps in random order on hard links to copies of stock files. The invariants hold after every step."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_rocm import __version__
from hf_rocm.errors import HfRocmError
from hf_rocm.overlay import block
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay import state as states
from hf_rocm.overlay.audit import Finding
from hf_rocm.overlay.commands import install, record, status, uninstall
from hf_rocm.overlay.disk import Disk
from hf_rocm.overlay.install import LEFTOVER
from tests.overlay.conftest import MODELS, Site, hashes, make_site
from tests.overlay.promises.world import NEXT, VERSION, encoded

SELECTIONS = st.lists(st.sampled_from(MODELS), unique=True, max_size=4)
# Versions of hf-rocm.
RELEASES = {__version__, "0.0.1", "0.0.2"}
CATALOG = catalogs.load()


class Killed(Disk):
    """Simulate a process that is killed at one of its disk operations, without cleaning up."""

    left: int = 0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("_") and name != "left":
            Killed.left -= 1
            if Killed.left < 0:
                os._exit(137)
        return value


class AnyOrder(RuleBasedStateMachine):
    """Models the content of every file: the stock bytes, the version of the block, and edits."""

    def __init__(self) -> None:
        super().__init__()
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="hf-rocm-", dir=base))
        self.patch = pytest.MonkeyPatch()
        self.caches = {VERSION: make_site(self.folder / VERSION), NEXT: self._newer()}
        self.untouched = {version: hashes(cache.path) for version, cache in self.caches.items()}
        self.site = Site(self.folder / "site")
        self.own_version = __version__

    def _newer(self) -> Site:
        site = make_site(self.folder / NEXT)
        record = site.metadata / "RECORD"
        text = record.read_text()
        for model in MODELS:
            file = site.model(model)
            old, new = file.read_bytes(), file.read_bytes() + b"# a newer release\n"
            file.write_bytes(new)
            text = text.replace(f"sha256={encoded(old)},{len(old)}", f"sha256={encoded(new)},{len(new)}")
        init = site.root / "__init__.py"
        old = init.read_bytes()
        site.set_release(NEXT)
        new = init.read_bytes()
        text = text.replace(f"sha256={encoded(old)},{len(old)}", f"sha256={encoded(new)},{len(new)}")
        (site.metadata / "RECORD").write_text(text.replace(VERSION, NEXT))
        return site

    @initialize()
    def begin(self) -> None:
        self._package_manager(VERSION)

    def _package_manager(self, version: str) -> None:
        """Install a release as uv does: remove the previous files, and create hard links to the files in the cache."""
        shutil.rmtree(self.site.path, ignore_errors=True)
        shutil.copytree(self.caches[version].path, self.site.path, copy_function=os.link)
        self.version = version
        self.stock = {model: self.site.model(model).read_bytes() for model in MODELS}
        self.expected = dict(self.stock)
        self.edited: set[str] = set()
        self.leftovers: set[str] = set()

    # actions of users

    @rule(models=SELECTIONS)
    def install(self, models: list[str]) -> None:
        self._command(install, models, {model: self._installed(model) for model in models or MODELS})

    @rule(models=SELECTIONS)
    def uninstall(self, models: list[str]) -> None:
        self._command(uninstall, models, {model: self.stock[model] for model in models or MODELS})

    @rule(version=st.sampled_from([VERSION, NEXT]))
    def upgrade_transformers(self, version: str) -> None:
        self._package_manager(version)

    @rule(own_version=st.sampled_from(sorted(RELEASES)))
    def upgrade_hf_rocm(self, own_version: str) -> None:
        self.own_version = own_version
        self.patch.setattr(states, "__version__", own_version)

    @rule(model=st.sampled_from(MODELS), where=st.integers(0, 10**6))
    def edit(self, model: str, where: int) -> None:
        data = bytearray(self.site.model(model).read_bytes())
        data[where % len(data)] ^= 1
        # write a new file, as editors do; the tests of `status --record` cover writes in place
        self.site.model(model).unlink()
        self.site.model(model).write_bytes(data)
        self.expected[model] = bytes(data)
        if model in self.edited and self.expected[model] in self._valid(model):
            self.edited.discard(model)
        else:
            self.edited.add(model)

    @precondition(lambda self: self.edited)
    @rule(choice=st.randoms(use_true_random=False))
    def repair(self, choice: random.Random) -> None:
        model = choice.choice(sorted(self.edited))
        self.site.model(model).write_bytes(self.stock[model])
        self.expected[model] = self.stock[model]
        self.edited.discard(model)

    @rule(models=SELECTIONS, at=st.integers(0, 60), undo=st.booleans())
    def crash(self, models: list[str], at: int, undo: bool) -> None:
        command = uninstall if undo else install
        child = os.fork()
        if not child:
            try:
                Killed.left = at
                self.patch.setattr("hf_rocm.overlay.install.Disk", Killed)
                command(models, transformers_path=self.site.path, catalog=CATALOG)
            except HfRocmError:
                pass
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for model in set(models or MODELS) - self.edited:
            content = self.site.model(model).read_bytes()
            assert content in (self.expected[model], self.stock[model] if undo else self._installed(model)), model
            self.expected[model] = content
        self.leftovers = {str(path) for path in self.site.path.rglob(f"*{LEFTOVER}")}

    def _command(self, command: Any, models: list[str], wanted: dict[str, bytes]) -> None:
        try:
            plan, _ = command(models, transformers_path=self.site.path, catalog=CATALOG)
            refused = bool(plan.refusals)
        except HfRocmError:
            refused = True
        blocked = {model for model in wanted if model in self.edited and self._refuses(command, model)}
        assert refused == bool(blocked), (command.__name__, models, self.edited)
        if not refused:
            self.leftovers = set()
            for model in wanted.keys() - self.edited:
                self.expected[model] = wanted[model]

    def _refuses(self, command: Any, model: str) -> bool:
        """Whether the command refuses an edited file. If an edit removed the block, there is nothing to uninstall."""
        return command is install or block.has_block(self.expected[model])

    def _installed(self, model: str) -> bytes:
        overlay = CATALOG.find(model, self.version)
        assert overlay is not None
        return block.render(self.stock[model], overlay=overlay.id, version=self.own_version, text=overlay.text)

    def _valid(self, model: str) -> Iterable[bytes]:
        overlay = CATALOG.find(model, self.version)
        assert overlay is not None
        yield self.stock[model]
        for release in RELEASES:
            yield block.render(self.stock[model], overlay=overlay.id, version=release, text=overlay.text)

    # invariants after every step

    @invariant()
    def every_file_has_the_expected_content(self) -> None:
        for model in MODELS:
            assert self.site.model(model).read_bytes() == self.expected[model], model
            assert model in self.edited or self.expected[model] in self._valid(model)

    @invariant()
    def no_cache_changed(self) -> None:
        for version, cache in self.caches.items():
            assert hashes(cache.path) == self.untouched[version]

    @invariant()
    def no_other_files_remain(self) -> None:
        leftovers = {str(path) for path in self.site.path.rglob(f"*{LEFTOVER}")}
        assert leftovers == self.leftovers
        names = {path.relative_to(self.site.path) for path in self.site.path.rglob("*") if str(path) not in leftovers}
        stock = self.caches[self.version].path
        assert names == {path.relative_to(stock) for path in stock.rglob("*")}

    @invariant()
    def status_is_correct(self) -> None:
        states = status(transformers_path=self.site.path, catalog=CATALOG).states
        for state in states:
            if state.model in self.edited:
                assert state.installed.value == "edited" or state.match.value == "changed", state.model
            else:
                stock, current = self.stock[state.model], self._installed(state.model)
                expected = {stock: "no", current: "yes"}.get(self.expected[state.model], "old")
                assert state.installed.value == expected, state.model
        recorded = record(transformers_path=self.site.path)
        differing = {entry.path for entry in recorded.foreign}
        old = {model for model in MODELS if self.expected[model] not in (self.stock[model], self._installed(model))}
        wrong = {self.site.model(model) for model in self.edited | old}
        assert differing == wrong | {Path(path) for path in self.leftovers}
        assert all(entry.finding is not Finding.MISSING for entry in recorded.entries)

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.folder)


def _machine(examples: int, steps: int) -> Any:
    class Machine(AnyOrder):
        pass

    case = Machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        # Do not shrink, because it takes minutes, and a failure lists its steps anyway.
        phases=[Phase.generate],
    )
    return case


TestAnyOrderBriefly = _machine(4, 15)
TestAnyOrderAtLength = pytest.mark.slow(_machine(12, 25))
