"""Golden files: references that are recorded on one machine and used for comparison on another.

A golden file is a safetensors file. It contains the inputs of the cases, the inputs of every layer in the model's
dtype, the outputs of every layer in all runs of `Reference`, and the end results. The header contains the model's
class, name and dtype, the checksums of its config and weights, the layout of every case, and versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import __version__, files
from hf_rocm.errors import GoldenError
from hf_rocm.tools.verify.cases import Case, Step
from hf_rocm.tools.verify.fingerprint import combined, differing, fingerprint, of_config
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.points import OUTPUT
from hf_rocm.tools.verify.reference import Reference, Run, reference_of

FORMAT = "hf_rocm golden 1"
_RUNS = ("eager", "wide", "local")


class Golden(NamedTuple):
    """The contents of a golden file: the cases with their references, and the header."""

    cases: dict[str, tuple[Case, Reference]]
    header: dict[str, Any]


def save(
    file: Path, subject: Subject, cases: dict[str, Case], references: dict[str, Reference] | None = None
) -> dict[str, Any]:
    """Record the stock model on this machine. references: case name → reference, if known. Returns the header."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check(file)
    tensors: dict[str, Tensor] = {}
    layout = {}
    for name, case in cases.items():
        reference = (references or {}).get(name) or reference_of(subject, case, set())
        layout[name] = {
            "cache": case.cache,
            "window": case.window,
            "starts": [step.start for step in case.steps],
            "further": sorted(case.further),
        }
        tensors |= {f"{name}/{key}": value for key, value in _of_case(case)}
        tensors |= {f"{name}/{key}": value for key, value in _of_reference(reference)}
    header = {**_identity(subject), "cases": layout, "recorded with": _versions(subject)}
    try:
        with files.output(file) as temporary:
            save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, {FORMAT: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise _unwritable(file, error) from error
    return header


def check(file: Path) -> None:
    """Raise `GoldenError` early if the file can't be written."""
    try:
        files.check_output(file)
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: Exception) -> GoldenError:
    because = getattr(error, "strerror", None) or error
    return GoldenError(
        f"{file} can't be written", facts={"because": because}, hint="specify a file in a writable folder"
    )


def load(file: Path, subject: Subject) -> Golden:
    """Read a golden file. Raises `GoldenError` if it is unreadable, or if it was not recorded from this model.

    The class, dtype, config and weights of the model must be the same.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(FORMAT)
            header = json.loads(text) if text else None
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except OSError as error:
        raise GoldenError(f"{file} can't be read", facts={"because": error.strerror or error}) from error
    except (SafetensorError, ValueError) as error:
        raise GoldenError(
            f"{file} is damaged or not a golden file",
            facts={"because": str(error).splitlines()[0]},
            hint="record it again with --save-golden, or copy it again",
        ) from error
    if not isinstance(header, dict):
        raise GoldenError(
            f"{file} is not a golden file of this release",
            facts={"expected": f"metadata {FORMAT!r}"},
            hint="record it again with --save-golden",
        )
    _check_identity(file, header, subject)
    try:
        return Golden({name: _case(name, layout, tensors) for name, layout in header["cases"].items()}, header)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise GoldenError(f"{file} is incomplete", facts={"missing": error}, hint="record it again") from error


def difference_in_versions(header: dict[str, Any], subject: Subject) -> str:
    """Return, as part of a sentence, how the versions and the device in the file differ from those here."""
    recorded, current = header["recorded with"], _versions(subject)
    other = [
        f"{name} {recorded.get(name)} (here: {current[name]})"
        for name in current
        if recorded.get(name) != current[name]
    ]
    return "recorded with " + ("the same versions on the same kind of device" if not other else ", ".join(other))


def _identity(subject: Subject) -> dict[str, Any]:
    weights = fingerprint(subject.model)
    return {
        "model": type(subject.model).__name__,
        "name": Path(str(getattr(subject.config, "_name_or_path", ""))).name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "config": of_config(subject.config),
        "weights": combined(weights),
        "tensors": weights,
    }


def _versions(subject: Subject) -> dict[str, str]:
    import transformers

    from hf_rocm.tools.verify.model_under_test import device_name

    return {
        "hf_rocm": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": device_name(subject.device),
    }


def _check_identity(file: Path, header: dict[str, Any], subject: Subject) -> None:
    identity = _identity(subject)
    for key, hint in (
        ("model", "load the same class of model"),
        ("dtype", "load the model in the dtype that the file was recorded in"),
        ("config", "use the checkpoint that the file was recorded from"),
        ("weights", "use the checkpoint that the file was recorded from, at the same revision"),
    ):
        if header.get(key) == identity[key]:
            continue
        facts = {"file": header.get(key), "here": identity[key]}
        if key == "weights":
            names = differing(header.get("tensors", {}), identity["tensors"])
            facts["first that differs"] = f"{names[0]} ({len(names)} in all)" if names else "the list itself"
        verb = "differ" if key == "weights" else "differs"
        raise GoldenError(f"{file} belongs to another model: its {key} {verb}", facts=facts, hint=hint)


def _of_case(case: Case) -> Iterator[tuple[str, Tensor]]:
    for number, step in enumerate(case.steps):
        yield f"{number}/ids", step.ids
        if step.mask is not None:
            yield f"{number}/mask", step.mask
        if step.positions is not None:
            yield f"{number}/positions", step.positions
    for name, value in case.further.items():
        yield f"further/{name}", value


def _of_reference(reference: Reference) -> Iterator[tuple[str, Tensor]]:
    for kind in _RUNS:
        run: Run = getattr(reference, kind)
        for number, points in enumerate(run.points):
            if kind != "local":
                yield f"{kind}/{number}/final", run.finals[number]
            for layer, names in points.items():
                if OUTPUT in names:
                    yield f"{kind}/{number}/out/{layer}", names[OUTPUT]
            for layer, value in run.inputs[number].items() if kind == "eager" else ():
                yield f"{kind}/{number}/in/{layer}", value.clone()


def _case(name: str, layout: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Case, Reference]:
    own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
    steps = tuple(
        Step(own[f"{number}/ids"], own.get(f"{number}/mask"), own.get(f"{number}/positions"), start)
        for number, start in enumerate(layout["starts"])
    )
    further = {key: own[f"further/{key}"] for key in layout["further"]}
    runs = {kind: _run(kind, len(steps), own) for kind in _RUNS}
    return Case(name, steps, layout["cache"], layout["window"], further), Reference(**runs)


def _run(kind: str, steps: int, own: dict[str, Tensor]) -> Run:
    run = Run()
    for number in range(steps):
        base = f"{kind}/{number}/"
        if kind != "local":
            run.finals.append(own[f"{base}final"])
        outs = {key.removeprefix(f"{base}out/"): value for key, value in own.items() if key.startswith(f"{base}out/")}
        if not outs:
            raise KeyError(f"{base}out")
        run.points.append({layer: {OUTPUT: value} for layer, value in outs.items()})
        inputs = {key.removeprefix(f"{base}in/"): value for key, value in own.items() if key.startswith(f"{base}in/")}
        run.inputs.append(inputs)
    return run
