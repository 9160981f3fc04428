"""Convert a notebook to Python: its code cells in order, with shell lines as calls to `get_ipython().system`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass, field

_SHELL = re.compile(r"^(\s*)(?:[\w, ]+=\s*)?!(.*)$")
_INSTALL = re.compile(r"^(\s*)%\s*((?:pip|conda|mamba|uv)\s.*)$")
_MAGIC = re.compile(r"^(\s*)%\w.*$|^(\s*)(?:\?\w.*|[\w.]+\?{1,2})$")
# Cell magics whose cells contain Python.
_TRANSPARENT = ("time", "timeit", "capture", "prun")


@dataclass
class Notebook:
    """A notebook as Python. text: one line for each line of a code cell. origins: for each line, the number of its cell
    (from 1) and its line in the file. unread: the number of a cell → the reason why it is left out.
    """

    text: str = ""
    origins: list[tuple[int, int]] = field(default_factory=list)
    unread: dict[int, str] = field(default_factory=dict)

    def origin(self, line: int) -> tuple[int, int]:
        return self.origins[line - 1] if 0 < line <= len(self.origins) else (0, 1)


def read(text: str) -> Notebook:
    """Return the code cells of a notebook's JSON. Raises ValueError if the text is not a Python notebook."""
    content = json.loads(text)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook: it has no cells")
    kernel = content.get("metadata") or {}
    language = ((kernel.get("kernelspec") or {}).get("language") or "python") if isinstance(kernel, dict) else "python"
    if language != "python":
        raise ValueError(f"a notebook in {language}")
    notebook, lines_of = Notebook(), _Positions(text)
    kept: list[str] = []
    for number, cell in enumerate(cells, 1):
        source = cell.get("source", "") if isinstance(cell, dict) else ""
        lines = ("".join(source) if isinstance(source, list) else str(source)).split("\n")
        numbers = [(number, lines_of.find(content_line)) for content_line in lines]
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        try:
            python = _python(lines)
        except SyntaxError as error:
            notebook.unread[number] = f"{error.msg}, line {error.lineno}"
            continue
        kept += python
        notebook.origins += numbers
    notebook.text = "\n".join(kept) + "\n"
    return notebook


class _Positions:
    """Find the line number in the file for a line of a cell, which the JSON parser does not report."""

    def __init__(self, text: str) -> None:
        self._text, self._position, self._line = text, 0, 1
        # The number of searches that may still fail. A failed search reads the rest of the file.
        self._misses = 100

    def find(self, line: str) -> int:
        """Return the number of the first line in the file that contains this text, starting at the last result.

        If there is no such line, if the text is blank, or after 100 failed searches, return the last result again.
        """
        for ascii_only in (False, True) if line.strip() and self._misses else ():
            start = self._text.find(json.dumps(line, ensure_ascii=ascii_only)[1:-1], self._position)
            if start >= 0:
                self._line += self._text.count("\n", self._position, start)
                self._position = start
                return self._line
            if line.isascii():
                break
        self._misses -= bool(line.strip()) and self._misses > 0
        return self._line


def _python(lines: list[str]) -> list[str]:
    """Return the lines of a cell as Python, without changing the number of lines. Raises SyntaxError if that fails."""
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%"):
        magic = first[2:].split(maxsplit=1)[0] if first[2:].strip() else ""
        if magic in ("bash", "sh", "script", "system"):
            body = "\n".join(["" if line is first else line for line in lines])
            return [_call("", body), *[""] * (len(lines) - 1)]
        if magic not in _TRANSPARENT:
            return [""] * len(lines)
    translated: list[str] = []
    waiting = iter(lines)
    for line in waiting:
        match = _SHELL.match(line) or _INSTALL.match(line)
        if match:
            command, extra = match[2], 0
            while command.endswith("\\") and (following := next(waiting, None)) is not None:
                command, extra = f"{command[:-1]} {following.strip()}", extra + 1
            translated += [_call(match[1], command), *[""] * extra]
        elif _MAGIC.match(line) or line.startswith("%%"):
            translated.append(f"{line[: len(line) - len(line.lstrip())]}pass")
        else:
            translated.append(line)
    with warnings.catch_warnings():
        # Do not show warnings about escapes in the cell's strings.
        warnings.simplefilter("ignore")
        ast.parse("\n".join(translated))
    return translated


def _call(indent: str, command: str) -> str:
    return f"{indent}get_ipython().system({command!r})"
