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


def test_what_was_not_reached_is_counted(tmp_path, capsys):
    form = {"kernel": "norm", "lines": unreached.source_lines(TEXT), "reached": [0, 1, 2]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"arch": "gfx942", "forms": {"one": form, "two": {**form, "reached": [0, 1, 2, 3]}}}))
    (share,) = unreached.shares([path])
    assert (share.forms, share.instructions, share.reached) == (2, 8, 7)
    assert dict(share.places) == {"norm.py:28": 1} and share.missed == pytest.approx(1 / 8)
    assert unreached.main([str(path)]) == 0
    assert "1 of 8 instructions were not reached, 12.5%." in capsys.readouterr().out
