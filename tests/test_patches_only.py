"""Only `hf_rocm.patches` sets attributes of other packages' classes, modules and objects, with listed exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("hf_rocm", "overlays") for path in (ROOT / folder).rglob("*.py"))
EXECUTOR = ROOT / "hf_rocm" / "patches.py"

THREAD_LOCALS = ("_thread", "_loading", "_watched")

# Attributes that an hf_rocm class declares are not reported. Exceptions for other attributes are listed here:
# file → names. The name `()` stands for setattr, delattr or a call that registers a hook.
ALLOWED = {
    # PyTorch's flags, set at the user's request, as code for NVIDIA sets them
    "hf_rocm/environment.py": {"()"},
    # a child process sets every flag to its current value, to check whether the build has it
    "hf_rocm/tools/doctor/child.py": {"()"},
    # tensors are data: their memory is replaced, or an attribute of aiter or hf_rocm is set on them
    "hf_rocm/generation/static_buffers.py": {"()"},
    "hf_rocm/layers/attention.py": {"()"},
    "hf_rocm/ops/mask_patterns.py": {"()"},
    "hf_rocm/ops/aiter/linear.py": {"is_shuffled"},
    "hf_rocm/ops/aiter/moe.py": {"is_shuffled"},
    "hf_rocm/weights/sharded.py": {"_local_tensor"},
    # an object that hf_rocm creates or that exists for one call: a log record, a foreign function of ctypes, a config,
    # a stand-in module, the module of an overlay
    "hf_rocm/distributed/rank_logging.py": {"msg", "args"},
    "hf_rocm/generation/continuous_batching.py": {"use_cuda_graph"},
    "hf_rocm/weights/mmap_pages.py": {"argtypes"},
    "hf_rocm/weights/experts.py": {"_modules"},
    "hf_rocm/overlay/activate.py": {"__file__"},
    # the output of generate, before it is returned
    "hf_rocm/generation/hooks.py": {"()", "sequences"},
    "hf_rocm/generation/user_cache.py": {"past_key_values"},
    # attributes of hf_rocm's functions, which torch.compile or hf_rocm reads
    "hf_rocm/ops/registry.py": {"_dynamo_marked_constant"},
    "hf_rocm/overlay/replacements.py": {"_dynamo_marked_constant"},
    "hf_rocm/overlay/bind.py": {"__hf_rocm_binding__"},
    # a layer of transformers' dynamic cache, whose `lazy_initialization` sets the same attributes
    "hf_rocm/layers/cached_attention.py": {"is_initialized"},
    # a cache belongs to one call, and stock sets this attribute if it is missing
    "overlays/transformers-4.53/models/gemma3n/modeling_gemma3n.py": {"shared_layers"},
    # copies of a model made by tools, and settings of the model under test, which are restored if the user
    # passed the model
    "hf_rocm/tools/bench/parity.py": {"()"},
    "hf_rocm/tools/bench/variants.py": {
        "_compile_all_devices",
        "do_sample",
        "eos_token_id",
        "pad_token_id",
        "temperature",
        "top_p",
    },
    "hf_rocm/tools/verify/cases.py": {"sliding_window"},
    "hf_rocm/tools/verify/generate.py": {"generation_config"},
    "hf_rocm/tools/verify/model_under_test.py": {"()"},
}


def test_only_the_executor_changes_other_packages() -> None:
    own = _declared()
    seen: dict[str, set[str]] = {}
    wrong = []
    for path in SOURCES:
        file = path.relative_to(ROOT).as_posix()
        for name, line in _sets(_tree(path)):
            if path == EXECUTOR or name in own:
                continue
            seen.setdefault(file, set()).add(name)
            if name not in ALLOWED.get(file, ()):
                wrong.append(f"{file}:{line} sets {name}")
    assert not wrong, "declare a Change instead:\n" + "\n".join(wrong)
    assert {
        file: names - seen.get(file, set()) for file, names in ALLOWED.items() if names - seen.get(file, set())
    } == {}


def test_all_kinds_of_assignments_are_found() -> None:
    source = """
nn.Linear.forward = replacement
cls.forward, other.generate = a, b
setattr(module, "name", value)
delattr(cls, name)
del cls.forward
torch_module.register_module_module_registration_hook(function)
interface["sdpa"], table.entry[0].rows = 1, 2
for owner.attribute in values: pass
with block as owner.block: pass
self.mine = 3
"""
    names = [name for name, _ in _sets(ast.parse(source))]
    assert sorted(names) == sorted(
        ["forward", "forward", "generate", "()", "()", "forward", "()", "rows", "attribute", "block"]
    )


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _sets(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Attributes that are set on, or deleted from, an object other than `self` or THREAD_LOCALS; `()` for a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", *THREAD_LOCALS)):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and _changes(node.func):
            yield "()", node.lineno


def _changes(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in ("setattr", "delattr")
    name = called.attr if isinstance(called, ast.Attribute) else ""
    return name in ("__setattr__", "__delattr__") or (name.startswith("register_") and name.endswith("_hook"))


def _declared() -> set[str]:
    """Attributes of hf_rocm's classes, except `forward`: annotated or assigned in the class, or set on `self`."""
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    names.add(statement.target.id)
                elif isinstance(statement, ast.Assign):
                    names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
            names.update(
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            )
    return names - {"forward"}
