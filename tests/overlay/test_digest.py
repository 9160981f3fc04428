"""Digests ignore layout, comments, docstrings and annotations, and are the same in every Python version."""

from __future__ import annotations

import pytest

from hf_rocm.overlay.digest import digests

SOURCE = '''
"""Module."""
from __future__ import annotations
from .sibling import helper as renamed
import torch.nn

LIMIT: int = 0x10

if torch.nn:
    def guarded(x): return x
else:
    def guarded(x): return -x

@decorated("RMSNorm", flag=True)
class Norm(torch.nn.Module, metaclass=type):
    """Docstring."""
    eps: float = 1e-6

    def forward(self, x: "Tensor", /, *rest, scale=1.5j, **more) -> "Tensor":
        """Docstring."""
        a = f"{x!r:>{scale}} {{}} é\\u2028 {x.shape[0]=}" "tail"
        b = [y async for y in x] if False else {**more, "k": ...}
        match a:
            case {"k": [1, *others], **kw} if others:
                pass
        lambda u, *, v=b"\\xff": (yield)
        return (w := x[1:, ..., None] @ self.weight, *rest, -0.0, 10**400, "x" "y")

def documented_only():
    """Nothing else."""
'''

# Fixed values, because every Python version must compute the same digests.
EXPECTED = {
    "renamed": "15e05ef59b02860a",
    "LIMIT": "e01f7daf6a12b750",
    "guarded": "1d2d59e3a165f48f",
    "Norm": "c392270177855184",
    "documented_only": "910822bb112109dc",
}


def digest_of(source: str, name: str = "f") -> str | None:
    return digests(source, [name])[name]


def test_digests_are_the_same_on_every_python() -> None:
    assert digests(SOURCE, EXPECTED) == EXPECTED


BASE = "def f(a, b=1):\n    return a + b\n"


@pytest.mark.parametrize(
    "same",
    [
        'def f(a, b=1):\n    """A docstring."""\n    return a + b\n',
        "def f(a: int, b: 'str' = 1) -> list[int]:\n    # why\n    return (a + b)\n",
        "\ufeffdef f(\n    a,\n    b=1,\n):\n\n    return a + b  # done\n",
        "def f(a, b=1):\r\n\treturn a + b\r\n",
        "x = 1\n\ndef g(): pass\n\ndef f(a, b=0x1):\n    return a + b\n",
    ],
)
def test_layout_comments_docstrings_and_annotations_are_ignored(same: str) -> None:
    assert digest_of(same.encode()) == digest_of(BASE)


@pytest.mark.parametrize(
    "other",
    [
        "def f(a, b=2):\n    return a + b\n",
        "def f(a, b=1.0):\n    return a + b\n",
        "def f(a, b=True):\n    return a + b\n",
        "def f(a, *, b=1):\n    return a + b\n",
        "def f(a, b=1):\n    return b + a\n",
        "@cache\ndef f(a, b=1):\n    return a + b\n",
        "async def f(a, b=1):\n    return a + b\n",
        "def f(a, b=1):\n    'x'\n    'y'\n    return a + b\n",
        BASE + BASE.replace("+", "-"),
        "if x:\n    def f(a, b=1):\n        return a + b\n",
        "f = lambda a, b=1: a + b\n",
        "from m import f\n",
    ],
)
def test_everything_else_changes_the_digest(other: str) -> None:
    assert digest_of(other) not in (digest_of(BASE), None)


def test_an_unbound_name_has_no_digest() -> None:
    assert digests("def f(): pass\ng.h = 1\n", ["h", "F"]) == {"h": None, "F": None}


def test_the_origin_of_an_import_changes_the_digest() -> None:
    assert digest_of("from .a import f") != digest_of("from ..a import f") != digest_of("from .b import f")
    assert digest_of("from .a import x as f") != digest_of("from .a import f")


def test_conditions_change_the_digest() -> None:
    assert digest_of("if a:\n f = 1\nelse:\n f = 2") != digest_of("if a:\n f = 2\nelse:\n f = 1")
    assert digest_of("try:\n import f\nexcept ImportError:\n f = None") != digest_of(
        "try:\n import f\nexcept Exception:\n f = None"
    )


def test_broken_source_raises() -> None:
    with pytest.raises(SyntaxError):
        digest_of("def f(:\n")


def test_a_method_has_its_own_digest() -> None:
    result = digests(SOURCE, ["Norm.forward", "Norm.eps", "Norm.backward", "forward", "Norm"])
    assert result["Norm.backward"] is None
    assert result["forward"] is None
    other = SOURCE.replace("scale=1.5j", "scale=2.5j")
    changed = digests(other, ["Norm.forward", "Norm.eps", "Norm"])
    assert changed["Norm.eps"] == result["Norm.eps"]
    assert changed["Norm.forward"] != result["Norm.forward"]
    assert changed["Norm"] != result["Norm"]


def test_the_first_bound_name_of_several_is_used() -> None:
    source = "class Old: pass\ndef new(): return 1\n"
    both, second = digests(source, ["new|Old", "absent|Old", "absent|other", "Old"]), digest_of(source, "Old")
    assert both == {"new|Old": digest_of(source, "new"), "absent|Old": second, "absent|other": None, "Old": second}
