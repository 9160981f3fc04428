"""Functions that take the argument `fused` leave the norm and the residual sum to the shared layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

OVERLAYS = sorted((Path(__file__).resolve().parents[2] / "overlays").glob("transformers-*/models/*/modeling_*.py"))
# Functions that normalise their input if they get the argument `fused`. The function passed as `stock` does so, too,
# because the decoder layer passes one that runs the norm before the stock forward.
NORMALISE = {"layers.heads", "layers.project", "layers.latent_heads", "gated.forward"}


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and "fused" in [
            argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)
        ]:
            yield node


def loads(function: ast.FunctionDef, name: str) -> list[ast.AST]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]


def test_more_than_30_overlay_functions_take_fused() -> None:
    assert sum(1 for path in OVERLAYS for _ in functions(path)) > 30


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: "/".join((path.parts[-4], path.parts[-2])))
def test_an_input_that_is_not_normalised_is_only_passed_to_shared_layers(path: Path) -> None:
    for function in functions(path):
        x = function.args.args[2].arg
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        uses = {
            argument: (ast.unparse(call.func), call)
            for call in calls
            for argument in call.args
            if isinstance(argument, ast.Name) and argument.id == x
        }
        assert set(loads(function, x)) == set(uses), f"{function.name} uses {x} itself"
        for name, call in uses.values():
            assert name == "stock" or name in NORMALISE, f"{function.name} passes {x} to {name}"
            passed = [ast.unparse(arg) for arg in (*call.args, *(keyword.value for keyword in call.keywords))]
            assert name == "stock" or "fused" in passed, f"{function.name} does not pass `fused` to {name}"
