"""Parse shell text into commands: their words and lines, and the platform tests around them.

Quotes, comments, line continuations, here-documents and command substitutions are parsed, so that a name in a message
or a comment is not mistaken for a command. Nothing is expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PLATFORM = re.compile(
    r"rocm|\bhip|amd[-_]?(?:gpu|smi)|\bamd\b|nvidia|gfx\d|\bhas_cuda|cuda[-_]?(?:available|found)", re.IGNORECASE
)

# The largest nesting depth of command substitutions and `bash -c`.
DEPTH = 4
_PIECE = re.compile(
    r"""'[^']*'?|"(?:\\.|[^"\\])*"?|\\\n|\\.|\$\(|\d*[<>]+&?|\|\||&&|;;|[;&|()\n`#]|\{(?=\s)|(?<=[\s;])\}"""
    r"""|[ \t\r\f\v]+|[^\s'"\\;&|()`#<>]+|.""",
    re.DOTALL,
)
_HERE = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_INNER = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_KEYWORDS = {
    "if",
    "elif",
    "fi",
    "case",
    "esac",
    "!",
    "time",
    "sudo",
    "exec",
    "command",
    "nohup",
    "then",
    "do",
    "else",
    "env",
    "eval",
    "RUN",
}
# `-v` is what remains of `command -v`.
_TESTS = ("[", "[[", "test", "which", "type", "hash", "-v")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


@dataclass(frozen=True)
class Command:
    """One simple command. words: its words without quotes; the first is the program. assigned: the assignments
    (`NAME=value`) before the program, without a program, or after `export` and similar commands. guarded: whether the
    command runs only after a test of the platform. tolerated: whether `|| …` follows and handles its failure, unlike
    `|| exit`.
    """

    line: int
    words: tuple[str, ...]
    assigned: tuple[str, ...] = ()
    guarded: bool = False
    tolerated: bool = False

    @property
    def program(self) -> str:
        """The name of the program, without its directory."""
        return self.words[0].rpartition("/")[2] if self.words else ""


def commands(text: str, *, line: int = 1, depth: int = 0) -> Iterator[Command]:
    """Yield all simple commands in a shell text, in order. line: the number of the text's first line."""
    blocks = _Blocks()
    parts = list(_simple(_without_documents(text), line))
    for (start, words, separator), (_, following, _) in zip(parts, [*parts[1:], (0, [], "")], strict=False):
        inner = [part for word in words if depth < DEPTH for part in _substituted(word)]
        expected = separator == "||" and following[:1] not in (["exit"], ["return"], ["die"], ["false"])
        command = blocks.read(start, [_unquoted(word) for word in words], separator, tolerated=expected)
        for part in inner:
            for nested in commands(part, line=start, depth=depth + 1):
                guarded = nested.guarded or (command is not None and command.guarded)
                yield Command(nested.line, nested.words, nested.assigned, guarded, nested.tolerated)
        if command is None:
            continue
        yield command
        if depth < DEPTH and command.program in ("bash", "sh") and len(command.words) > 2 and "-c" in command.words[1]:
            yield from commands(command.words[2], line=start, depth=depth + 1)


class _Blocks:
    """The `if`s and `case`s around a command, and the tests before it in an `&&` list."""

    def __init__(self) -> None:
        # whether each enclosing block tests the platform, outermost first; a guard covers nested blocks
        self._guards = [False]
        # Whether the parser is between `if` and `then`.
        self._testing = False
        # Whether a test of the platform precedes the command in an `&&` list.
        self._listed = False

    def read(self, line: int, words: list[str], separator: str, *, tolerated: bool) -> Command | None:
        """Return the command in these words, or None if they contain no command (for example, only a keyword)."""
        assigned = []
        while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
            keyword = words.pop(0)
            if keyword not in _KEYWORDS:
                assigned.append(keyword)
            self._keyword(keyword)
            if keyword == "case":
                self._guards[-1] = self._guards[-1] or bool(PLATFORM.search(" ".join(words)))
                return None
        if words and words[0] in ("export", "declare", "local", "readonly"):
            assigned += [word for word in words[1:] if _ASSIGNMENT.match(word)]
            words = []
        test = (self._testing or separator == "&&") and bool(PLATFORM.search(" ".join(words)))
        if test and self._testing:
            self._guards[-1] = True
        guarded = self._listed or self._guards[-1]
        self._listed = separator == "&&" and (self._listed or (test and words[0] in _TESTS))
        if not words and not assigned:
            return None
        return Command(line, tuple(words), tuple(assigned), guarded, tolerated=tolerated)

    def _keyword(self, word: str) -> None:
        if word in ("if", "case"):
            self._guards.append(self._guards[-1])
            self._testing = word == "if"
        elif word == "elif":
            self._testing = len(self._guards) > 1
        elif word == "then":
            self._testing = False
        elif word in ("fi", "esac") and len(self._guards) > 1:
            self._guards.pop()
            self._testing = False


def _simple(text: str, line: int) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, words with their quotes, the separator that follows) for each simple command."""
    words: list[str] = []
    # Whether the next piece continues the last word; the command's first line.
    joined, start = False, line
    # Whether the parser is in a comment.
    skipping = False
    for match in _PIECE.finditer(text):
        piece = match[0]
        if skipping and piece != "\n":
            line += piece.count("\n")
            skipping = "\n" not in piece
            continue
        skipping = False
        if piece in ("||", "&&", ";;", ";", "&", "|", "(", ")", "{", "}", "\n", "$(", "`"):
            if words:
                yield start, words, piece
            words, joined = [], False
        elif piece == "#" and not joined:
            skipping = True
        elif piece == "\\\n" or piece.isspace():
            joined = False
        else:
            if not words:
                start = line
            if joined:
                words[-1] += piece
            else:
                words.append(piece)
            joined = True
        line += piece.count("\n")
    if words:
        yield start, words, "\n"


def _without_documents(text: str) -> str:
    """Return the text with empty lines in place of here-documents, which are data."""
    if "<<" not in text:
        return text
    kept, end = [], ""
    for line in text.split("\n"):
        if end:
            kept.append("")
            end = "" if line.strip() == end else end
            continue
        kept.append(line)
        match = _HERE.search(line)
        if match and "<<<" not in line:
            end = match[2]
    return "\n".join(kept)


def _substituted(word: str) -> Iterator[str]:
    if '"' in word:
        yield from (match[1] or match[2] or "" for match in _INNER.finditer(word))


def _unquoted(word: str) -> str:
    return re.sub(
        r"""'([^']*)'?|"((?:\\.|[^"\\])*)"?|\\(.)""", lambda match: match[1] or match[2] or match[3] or "", word
    )
