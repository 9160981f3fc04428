"""A code object decodes to its assembly, and differences between them are detected."""

from __future__ import annotations

import pytest

from hf_rocm.ops.triton.builds import ARCHITECTURES
from tests.amdgcn import decoded
from tests.amdgcn.machine import Program

pytest.importorskip("triton", reason="not run: needs Triton")
if not decoded.available():
    pytest.skip("not run: needs tinygrad's decoder (scripts/test installs it)", allow_module_level=True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request):
    """(architecture, instructions, code object) of the first norm kernel that is built."""
    from triton.backends.compiler import GPUTarget

    from hf_rocm.ops.triton.builds import compiled_for
    from hf_rocm.ops.triton.kernels import norm

    build = compiled_for(norm.BUILDS[0], GPUTarget("hip", request.param, ARCHITECTURES[request.param]))
    program = Program.parse(build.asm["amdgcn"], request.param)
    return request.param, [instruction.text for instruction in program.instructions], build.asm["hsaco"]


def test_text_and_bytes_agree(compiled):
    arch, text, binary = compiled
    assert decoded.compare(text, binary, arch) == len(text) > 100


def test_a_different_text_is_detected(compiled):
    arch, text, binary = compiled
    place = next(index for index, line in enumerate(text) if line.startswith("v_add_f32"))
    for other in (text[place].replace("v_add", "v_sub"), text[place].replace(" v", " v1", 1)):
        with pytest.raises(decoded.Mismatch):
            decoded.compare([*text[:place], other, *text[place + 1 :]], binary, arch)
    for shorter in ([*text[:place], *text[place + 1 :]], text[:-1], [*text, "s_endpgm"]):
        with pytest.raises(decoded.Mismatch):
            decoded.compare(shorter, binary, arch)


def test_compared_files_are_not_compared_again(compiled, tmp_path, monkeypatch):
    arch, text, binary = compiled
    calls = []
    monkeypatch.setattr(decoded, "compare", lambda *arguments: calls.append(arguments))
    for _ in range(2):
        decoded.compare_once(text, binary, arch, tmp_path / "kernel.compared")
    decoded.compare_once(text[1:], binary, arch, tmp_path / "kernel.compared")
    assert len(calls) == 2
