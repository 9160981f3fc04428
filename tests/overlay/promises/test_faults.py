"""After a system fault during a command, every file is stock or installed, and the next command works."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.commands import install, uninstall
from hf_rocm.overlay.install import LEFTOVER
from tests.overlay.conftest import Site, hashes
from tests.overlay.promises import faults
from tests.overlay.promises.conftest import in_memory, make_farm
from tests.overlay.promises.faults import Call

Farm = Callable[[str], Site]


class Trial:
    """A command on the overlays of `fault_models`, with all the system calls that it makes on its site."""

    def __init__(self, farm: Farm, command: str, driver: faults.Driver) -> None:
        self.command, self.driver, self.models, self.farm = command, driver, driver.models, farm
        self.catalog = catalogs.load(driver.overlays)
        self.stock = farm("stock")
        self.installed = farm("installed")
        install(self.models, transformers_path=self.installed.path, catalog=self.catalog)
        self.cache = hashes(self.stock.path)
        self.before, self.after = (self.contents(site) for site in self._ends())
        watched = self.site("watched")
        self.calls = driver.calls(watched.path)
        assert self.contents(watched) == self.after

    def inject_everywhere(self, fault: str) -> list[tuple[Call, Site, int]]:
        """Run the command once per system call, with the fault at that call. Returns (call, site, status) per run."""
        runs = []
        for name in sorted({call.name for call in self.calls}):
            numbers = [call.number for call in self.calls if call.name == name]
            sites = [self.site(f"{fault}-{name}-{number}") for number in numbers]
            targets = [(number, site.path) for number, site in zip(numbers, sites, strict=True)]
            statuses = self.driver.inject(fault, name, targets)
            runs += [
                (Call(name, number), site, status)
                for number, site, status in zip(numbers, sites, statuses, strict=True)
            ]
        assert len(runs) == len(self.calls) > 50
        assert hashes(self.stock.path) == self.cache, "another environment changed"
        return runs

    def check(self, site: Site, where: object) -> None:
        """Check the state after a fault: valid files, a next command that works, no leftovers, and no other changes."""
        result = self.contents(site)
        for model in self.models:
            assert result[model] in (self.before[model], self.after[model]), (where, model)
        plan, _ = uninstall(transformers_path=site.path, catalog=self.catalog)
        assert not plan.refusals, where
        assert not leftovers(site), where
        assert hashes(site.path) == self.cache, where
        shutil.rmtree(site.path)

    def site(self, name: str) -> Site:
        site = self.farm(f"{self.command}-{name}")
        if self.command == "uninstall":
            for model in self.models:
                site.model(model).unlink()
                os.link(self.installed.model(model), site.model(model))
        return site

    def contents(self, site: Site) -> dict[str, bytes]:
        return {model: site.model(model).read_bytes() for model in self.models}

    def _ends(self) -> tuple[Site, Site]:
        ends = (self.stock, self.installed)
        return ends if self.command == "install" else ends[::-1]


def leftovers(site: Site) -> list[Path]:
    return list(site.path.rglob(f"*{LEFTOVER}"))


@pytest.fixture(params=["install", "uninstall"], scope="module")
def trial(
    request: pytest.FixtureRequest, fault_models: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trial]:
    """One trial per command. Every fault is injected at the same calls, on separate sites."""
    faults.require_injection()
    scratch = tmp_path_factory.mktemp(request.param)
    driver = faults.Driver(request.param, fault_models, scratch)
    try:
        with in_memory(scratch) as folder:
            yield Trial(make_farm(folder), request.param, driver)
    finally:
        driver.close()


@pytest.mark.slow
def test_05_after_a_kill_at_any_call_the_next_command_recovers(trial: Trial) -> None:
    left = 0
    for call, site, status in trial.inject_everywhere("KILL"):
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (call, status)
        left += bool(leftovers(site))
        trial.check(site, call)
    assert left > 10, "no run was killed while new files existed"


@pytest.mark.slow
@pytest.mark.parametrize("error", faults.ERRORS)
def test_06_a_full_or_broken_disk_at_any_call_undoes_the_run(trial: Trial, error: str) -> None:
    failed = 0
    for call, site, status in trial.inject_everywhere(error):
        assert os.WIFEXITED(status), (call, status)
        code = os.WEXITSTATUS(status)
        assert code in (0, 1), (call, code)
        assert trial.contents(site) == (trial.after if code == 0 else trial.before), (call, code)
        # if the removal of a new file failed, the next run removes it
        assert not leftovers(site) or call.name in ("unlink", "unlinkat"), call
        failed += code == 1
        trial.check(site, call)
    assert failed > len(trial.calls) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_07_an_interrupt_at_any_call_undoes_the_run(trial: Trial, name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    undone = 0
    for call, site, status in trial.inject_everywhere(name):
        # The process was killed before the first write or after the last one.
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == number, (call, status)
            assert trial.contents(site) in (trial.before, trial.after), call
        else:
            assert os.WEXITSTATUS(status) == 128 + number, (call, status)
            assert trial.contents(site) in (trial.before, trial.after), call
            undone += trial.contents(site) == trial.before
        assert not leftovers(site), call
        trial.check(site, call)
    assert undone > 10
