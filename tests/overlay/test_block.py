"""Removing a block restores the file exactly. Edited files and unsuitable texts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import block

TEXT = '"""An overlay."""\n\nx = 1\n'

ending = st.sampled_from([b"", b"\n", b"\r\n", b"\r", b"\n\n", b"\n\r", b" \\", b"\x00", b"\xef\xbb\xbf"])
beginning = st.sampled_from([b"", b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\r\n", b"\n"])
anything = st.builds(lambda *parts: b"".join(parts), beginning, st.binary(max_size=200), ending)
stocks = anything.filter(lambda data: not block.has_block(data))
texts = st.text(st.characters(exclude_characters="\r", codec="utf-8"), max_size=100).map(lambda text: text + "\n")


def render(stock: bytes, text: str = TEXT) -> bytes:
    return block.render(stock, overlay="transformers-5.4/llama", version="1.2.3", text=text)


@given(anything, texts)
def test_removing_a_block_restores_every_byte(stock: bytes, text: str) -> None:
    if block.refuses(stock, text) is not None:
        with pytest.raises(OverlayError):
            render(stock, text)
        return
    installed = render(stock, text)
    assert installed.startswith(stock)
    assert text.encode() in installed
    parts = block.split(installed)
    assert parts is not None
    assert parts.stock == stock == block.stock_part(installed)
    assert (parts.overlay, parts.version) == ("transformers-5.4/llama", "1.2.3")


@given(stocks)
def test_a_file_without_markers_has_no_block(stock: bytes) -> None:
    assert block.split(stock) is None
    assert block.stock_part(stock) == stock


@given(st.data())
def test_every_one_byte_edit_is_detected(data: st.DataObject) -> None:
    stock = data.draw(stocks)
    installed = render(stock)
    index = data.draw(st.integers(0, len(installed) - 1))
    edited = bytearray(installed)
    edited[index] ^= data.draw(st.integers(1, 255))
    try:
        parts = block.split(bytes(edited))
    except OverlayError:
        return
    assert parts is None, "an edited file was considered intact"
    assert block.START.rstrip() not in edited and block.END.rstrip() not in edited


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda data: data + b"\n", "added below"),
        (lambda data: data.replace(b"x = 1", b"x = 2"), "the block was edited"),
        (lambda data: b"#" + data, "the stock part"),
        (lambda data: data.replace(block.END, b""), "marker"),
        (lambda data: data.replace(block.START, b""), "marker"),
        (lambda data: data + data[data.index(block.START) :], "duplicated"),
        (lambda data: data.replace(b"# hf-rocm       1.2.3", b"# hf-rocm       1.2.4"), "the block was edited"),
        (lambda data: data.replace(b"\n", b"\r\n"), "marker"),
    ],
)
def test_an_edited_file_is_refused_and_the_edited_part_is_named(edit, reason: str) -> None:
    with pytest.raises(OverlayError, match=reason):
        block.split(edit(render(b"import os\n")))


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "x = 1\r\n",
        "__all__ = ['x']\n",
        "from __future__ import annotations\n",
        "# <<< hf-rocm overlay <<<\n",
        "y = '# >>> hf-rocm overlay >>>'\n",
    ],
)
def test_a_text_that_would_break_the_file_is_not_appended(text: str) -> None:
    with pytest.raises(OverlayError, match="can't be appended"):
        render(b"import os\n", text)


def test_a_second_block_is_not_appended() -> None:
    with pytest.raises(OverlayError, match="already has a block"):
        render(render(b"import os\n"))


def test_an_executed_block_sets_its_version() -> None:
    namespace: dict[str, object] = {}
    exec(render(b"import os"), namespace)
    assert namespace["__hf_rocm_block__"] == "1.2.3"
    assert namespace["x"] == 1


def test_the_block_explains_how_to_remove_it() -> None:
    header = render(b"import os\n").decode().split("__hf_rocm_block__")[0]
    assert "hf-rocm uninstall-overlays" in header
    assert "delete everything from the first marker to the last" in header
