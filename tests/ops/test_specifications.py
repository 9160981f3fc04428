"""Specifications are built in one place per operation, in the order of their fields."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import pytest

import hf_rocm.ops
from hf_rocm.ops import registry

# Importing hf_rocm.ops registers every operation.
assert hf_rocm.ops

# Operation → the function that builds its specification.
BUILDERS = {
    "act": "act._specification",
    "act_and_mul": "pointwise._activation_specification",
    "add_layer_norm": "layer_norm.add_layer_norm",
    "add_rms_norm": "pointwise.add_rms_norm",
    "append_tokens": "append_tokens._specification",
    "attend_into_cache": "attend_into_cache._specification",
    "attention": "attention._specification",
    "begin_step": "begin_step._specification",
    "choose_experts": "routing.specification",
    "decode_attention": "decode.decode_attention",
    "experts": "moe.specification",
    "finish_step": "finish_step._specification",
    "fused_linear": "linear.fused_linear",
    "gated_delta_prefill": "delta_prefill.specification",
    "gated_delta_step": "delta.specification",
    "linear": "linear.specification",
    "look_up_drafts": "look_up_drafts._specification",
    "mxfp4_experts": "moe_mxfp4.specification",
    "norm_add": "norm_add._specification",
    "paged_attention": "paged.paged_attention",
    "quantized_linear": "quantized.quantized_linear",
    "rms_norm": "pointwise.rms_norm",
    "rope": "pointwise.rope",
    "rope_into_cache": "rope_into_cache._specification",
    "rotary_angles": "rotary_angles._specification",
    "round_rows": "round_rows._specification",
    "varlen_attention": "varlen.varlen_attention",
}
# Operation → operation with the same spec type.
SHARED = {"shuffled_linear": "linear", "shuffled_experts": "experts", "experts_add": "experts"}


def test_every_operation_is_listed():
    assert {*BUILDERS, *SHARED} == set(registry.operations())


@pytest.mark.parametrize("operation", BUILDERS)
def test_the_plain_tuple_names_the_fields_in_their_order(operation):
    """For speed, the router takes a plain tuple. Its elements are variables with the names of the fields, or
    comparisons of these variables with None.
    """
    module, _, name = BUILDERS[operation].partition(".")
    function = getattr(sys.modules[f"hf_rocm.ops.{module}"], name)
    fields = registry.operations()[operation].spec_type._fields
    tuples = [
        names
        for statement in _body(function)
        for node in ast.walk(statement)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) == len(fields)
        for names in [tuple(map(_variable, node.elts))]
    ]
    assert tuples == [fields]


@pytest.mark.parametrize(("operation", "builder"), SHARED.items())
def test_shared_specifications_have_one_type(operation, builder):
    operations = registry.operations()
    assert operations[operation].spec_type is operations[builder].spec_type


def _variable(node: ast.expr) -> str:
    """The variable in the expression `name` or `name is not None`."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.IsNot):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def _body(function: Any) -> list[ast.stmt]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.body
