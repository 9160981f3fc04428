"""Render the block that an installed overlay adds at the end of a stock file, and remove it again.

Pure functions on bytes. The block describes itself, so no state file is needed: its header records the overlay's id,
the release that wrote it, the sha256 of the stock bytes above the block and the sha256 of the block itself.

    # >>> hf-rocm overlay >>>
    # overlay       transformers-5.4/llama
    # …
    __hf_rocm_block__ = "0.2.0"
    … the overlay's text …
    # <<< hf-rocm overlay <<<
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hf_rocm.errors import OverlayError

START = b"# >>> hf-rocm overlay >>>\n"
END = b"# <<< hf-rocm overlay <<<\n"

_HEADER = """\
# overlay       {overlay}
# hf-rocm       {version}
# stock sha256  {stock}
# block sha256  {block}
# newline       {newline}
# The lines above the first marker are the file as transformers ships it. To remove this block, run
# `hf-rocm uninstall-overlays`; if hf-rocm is not installed, delete everything from the first marker to the last.
__hf_rocm_block__ = "{version}"
"""
_KEPT, _ADDED = "kept", "added before the first marker"
_UNHASHED = "-" * 64
_FIELDS = {
    "overlay": rb"[a-z0-9._]+-[0-9.]+/[A-Za-z0-9_]+",
    "hf-rocm": rb"[A-Za-z0-9.+!]+",
    "stock sha256": rb"[0-9a-f]{64}",
    "block sha256": rb"[0-9a-f]{64}",
    "newline": rf"{_KEPT}|{_ADDED}".encode(),
}
_BLOCK_SHA256 = list(_FIELDS).index("block sha256") + 1
_LEADING = re.compile(
    re.escape(START) + b"".join(rb"# %-13s (%s)\n" % (name.encode(), value) for name, value in _FIELDS.items())
)


@dataclass(frozen=True)
class Split:
    """The parts of an installed file: the stock bytes, the block, and the overlay and version from its header."""

    stock: bytes
    block: bytes
    overlay: str
    version: str


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def has_block(data: bytes) -> bool:
    """Whether the file contains at least one of the two markers."""
    return START.rstrip() in data or END.rstrip() in data


def render(stock: bytes, *, overlay: str, version: str, text: str) -> bytes:
    """Return the stock bytes followed by the block. Raises `OverlayError` if `refuses` returns a reason."""
    reason = refuses(stock, text)
    if reason:
        raise OverlayError(f"overlay {overlay} can't be appended: {reason}")
    newline = _KEPT if not stock or stock.endswith(b"\n") else _ADDED
    fields = {"overlay": overlay, "version": version, "stock": sha256(stock), "newline": newline}
    unhashed = START + _HEADER.format(block=_UNHASHED, **fields).encode() + text.encode() + END
    block = unhashed.replace(_UNHASHED.encode(), sha256(unhashed).encode(), 1)
    return stock + (b"\n" if newline == _ADDED else b"") + block


def refuses(stock: bytes, text: str) -> str | None:
    """Return the reason if this text can't be appended to this file, else None."""
    if has_block(stock):
        return "the file already has a block"
    if has_block(text.encode()):
        return "its text contains a marker"
    if "\r" in text or not text.endswith("\n"):
        return "its text must have plain newlines, and one at the end"
    if re.search(r"^\s*(__all__\b|from __future__\b)", text, re.MULTILINE):
        return "transformers parses `__all__`, and `from __future__` is only valid at the start of a file"
    return None


def split(data: bytes) -> Split | None:
    """Split an installed file into its parts; None if it has no block.

    Raises `OverlayError`, with the reason as its message, if the block or the stock part was edited.
    """
    if not has_block(data):
        return None
    if data.count(START) != 1 or data.count(END) != 1:
        raise OverlayError("a marker line of the block is missing, changed or duplicated")
    if not data.endswith(END):
        raise OverlayError("something was added below the block")
    above, block = _cut(data)
    header = _LEADING.match(block)
    if header is None:
        raise OverlayError("the block's header was edited")
    overlay, version, stock_sha256, block_sha256, newline = (value.decode() for value in header.groups())
    first, last = header.span(_BLOCK_SHA256)
    if sha256(block[:first] + _UNHASHED.encode() + block[last:]) != block_sha256:
        raise OverlayError("the block was edited")
    stock = above.removesuffix(b"\n") if newline == _ADDED else above
    if sha256(stock) != stock_sha256:
        raise OverlayError("the stock part of the file was edited after the overlay was installed")
    return Split(stock, block, overlay, version)


def stock_part(data: bytes) -> bytes:
    """Return the bytes above the block, or all bytes if there is no block; exact unless the file was edited."""
    if not has_block(data):
        return data
    above, block = _cut(data)
    header = _LEADING.match(block)
    return above.removesuffix(b"\n") if header and header.groups()[-1] == _ADDED.encode() else above


def _cut(data: bytes) -> tuple[bytes, bytes]:
    marker = START.rstrip() if START.rstrip() in data else END.rstrip()
    position = data.index(marker)
    return data[:position], data[position:]
