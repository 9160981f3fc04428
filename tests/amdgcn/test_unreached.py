"""Unreached instructions are counted by source line."""

from __future__ import annotations

import json

import pytest

from tests.amdgcn import unreached

TEXT = """
\t.file\t1 "/kernels" "norm.py"
\t.loc\t1 12 0 prologue_end             ; norm.py:12:0
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_branch .LBB0_0
\t.loc\t1 0 0 is_stmt 0                 ; :0:0
.LBB0_0:
\ts_mov_b32 s13, s11
\t.loc\t1 28 30                         ; norm.py:28:30
\ts_endpgm
\t.amdhsa_kernel norm
"""


def test_every_instruction_has_its_line():
    assert unreached.source_lines(TEXT) == ["norm.py:12", "norm.py:12", "norm.py:12", "norm.py:28"]


def test_unreached_instructions_are_counted(tmp_path, capsys):
    forms = [form(reached=[0, 1, 2]), form(reached=[0, 1, 2, 3])]
    path = tmp_path / "report.json"
    other = form(kernel="_attn_fwd", reached=[])
    path.write_text(json.dumps({"arch": "gfx942", "forms": dict(enumerate([*forms, other]))}))
    (share,) = unreached.shares("gfx942", forms)
    assert (share.forms, share.instructions, share.reached, share.explained) == (2, 8, 7, 0)
    assert dict(share.places) == {"norm.py:28": 1}
    assert share.missed == unreached.missed([share]) == pytest.approx(1 / 8)
    assert unreached.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 of 8 instructions (12.5%) were not reached; 0 more were not reached, but are explained." in out
    assert out.index("(12.5%)") < out.index("| `_attn_fwd` | 1 | 4 | 100.0%")


def test_the_other_entry_is_explained():
    """Instructions that a launch with preloaded arguments skips are explained if they only load these arguments."""
    (share,) = unreached.shares("gfx942", [form(reached=[2], entry=2)])
    assert (share.reached, share.explained, dict(share.places)) == (1, 2, {"norm.py:28": 1})
    (share,) = unreached.shares("gfx942", [form(reached=[0, 1, 2, 3], entry=2)])
    assert (share.reached, share.explained, share.missed) == (4, 0, 0)
    instructions = ["v_mov_b32_e32 v1, 0", *INSTRUCTIONS[1:]]
    (share,) = unreached.shares("gfx942", [form(reached=[2], entry=2, instructions=instructions)])
    assert share.explained == 0 and share.missed == pytest.approx(3 / 4)
    # No branch to the other entry.
    instructions = [INSTRUCTIONS[0], "s_waitcnt lgkmcnt(0)", *INSTRUCTIONS[2:]]
    (share,) = unreached.shares("gfx942", [form(reached=[2], entry=2, instructions=instructions)])
    assert share.explained == 0


INSTRUCTIONS = ["s_load_dwordx2 s[2:3], s[0:1], 0x0", "s_branch .LBB0_0", "s_mov_b32 s13, s11", "s_endpgm"]


def form(**change):
    lines = unreached.source_lines(TEXT)
    return {"kernel": "norm", "instructions": INSTRUCTIONS, "lines": lines, "entry": 0, **change}
