"""Recorded machines: the output of their tools, their files, and results of child processes, usable without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_rocm.generation.ledger import Event
from hf_rocm.overlay.facts import AiterFacts, TorchFacts
from hf_rocm.tools.doctor.machine import CommandResult, Node, System, TaskResult
from hf_rocm.tools.doctor.transformers import TransformersFacts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).with_name("machines")
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


class Recorded:
    """One recorded machine.

    In its file, `base` names another machine if only the differences from it are stored, and "-" removes an entry.
    """

    def __init__(self, name: str) -> None:
        self.data = read(name)

    @property
    def system(self) -> System:
        return System(**self.data["system"])

    @property
    def environment(self) -> Mapping[str, str]:
        return self.data.get("environment", {})

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.data.get("groups", ()))

    def text(self, path: str) -> str | None:
        return self._files.get(path)

    def names(self, folder: str) -> tuple[str, ...]:
        start = f"{folder}/"
        known = (*self._files, *self._nodes)
        return tuple(sorted({path[len(start) :].split("/")[0] for path in known if path.startswith(start)}))

    def mentions(self, path: str, word: bytes) -> bool:
        return word.decode() in self._files.get(path, "")

    def look(self, path: str) -> Node | None:
        if path in self._nodes:
            return Node(**self._nodes[path])
        return Node() if path in self._files or self.names(path) else None

    def free_bytes(self, path: str) -> int | None:
        return self.data.get("free", {}).get(path)

    def resolves(self) -> bool | None:
        return self.data.get("resolves")

    def run(self, *command: str, timeout: float) -> CommandResult | None:
        results = self.data.get("commands", {}).get(command[0])
        return (
            None
            if results is None
            else CommandResult(results.get("code", 0), results.get("out", ""), results.get("err", ""))
        )

    def packages(self) -> Mapping[str, str]:
        return self.data.get("packages", {})

    def torch(self) -> TorchFacts:
        return TorchFacts(**self.data.get("torch", {}))

    def aiter(self) -> AiterFacts:
        return AiterFacts(**self.data.get("aiter", {}))

    def transformers(self) -> TransformersFacts:
        return TransformersFacts(**self.data.get("transformers", {}))

    def graph_events(self) -> tuple[Event, ...]:
        return tuple(Event(**event) for event in self.data.get("graph_events", ()))

    def ledger(self) -> str | None:
        return "/home/alice/.cache/hf_rocm/graph_events.jsonl"

    def run_task(self, task: str, *, timeout: float) -> TaskResult:
        return TaskResult(**self.data.get("child", {}).get(task, {}))

    @property
    def expected(self) -> dict[str, Any]:
        return self.data["expect"]

    @property
    def _files(self) -> dict[str, str]:
        return self.data.get("files", {})

    @property
    def _nodes(self) -> dict[str, dict[str, Any]]:
        return self.data.get("nodes", {})


def read(name: str) -> dict[str, Any]:
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    base = data.pop("base", None)
    if base is None:
        return data
    below = read(base)
    below.pop("expect")
    return merged(below, data)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    results = dict(below)
    for key, value in above.items():
        if value == "-":
            results.pop(key, None)
        elif isinstance(value, dict) and isinstance(results.get(key), dict) and key != "expect":
            results[key] = merged(results[key], value)
        else:
            results[key] = value
    return results
