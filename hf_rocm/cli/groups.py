"""Command groups and their help pages: the start page of `hf-rocm`, and `bench` and `tune`, which also take a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from hf_rocm.cli.help_text import Group
from hf_rocm.errors import OptionError

# The commands grouped by purpose, in the order of the start page.
SECTIONS = {
    "Set up": ("doctor", "install-overlays", "status", "uninstall-overlays"),
    "Models": ("explain", "verify", "bench", "tune", "warmup", "quantize"),
    "Code and reports": ("port-check", "env", "help"),
}


class StartPage(Group):
    """The top level. Without arguments it prints its help, with commands grouped by purpose, and exits with code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        column = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            _write_commands(formatter, title, ((f"{name:<{column}}", self.commands[name]) for name in names))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write('In Python: model = hf_rocm.from_pretrained("model-id")')
        formatter.write("next: hf-rocm doctor; hf-rocm help COMMAND")


class ModelOrCommand(Group):
    """A group that accepts `bench MODEL` and `bench ops`: a first word other than a command is a model or an option.

    Its help page has the options of the command `model`, and the other commands below them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            self._refuse_misspelt(ctx, args)
            args = ["--help"] if set(args) & set(ctx.help_option_names) else ["model", *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: Any, args: list[str]) -> None:
        """Raise a usage error if the first word is almost the name of a command, but is not an existing path.

        The error is raised only if a second word that is not an option follows, because a model is a single word.
        """
        word, others = args[0], [name for name in self.commands if name != "model"]
        matches = difflib.get_close_matches(word, others, 1, 0.7)
        if matches and len(args) > 1 and not args[1].startswith("-") and not Path(word).exists():
            ctx.fail(f"No such command {word!r}. Did you mean {matches[0]!r}?")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        model = self.commands["model"]
        options = model.shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        others = super().shell_complete(ctx, incomplete)
        return [*options, *(item for item in others if item.value not in ctx.help_option_names)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.subcommand_metavar]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        model = self.commands["model"]
        page = ModelOrCommand(
            name=self.name,
            commands=dict(self.commands),
            params=model.params,
            help=model.help,
            subcommand_metavar=self.subcommand_metavar,
            rich_markup_mode=None,
        )
        super(ModelOrCommand, page).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        others = {name: command for name, command in self.commands.items() if name != "model"}
        _write_commands(formatter, "Commands", others.items())


def _write_commands(formatter: Any, title: str, commands: Iterable[tuple[str, Any]]) -> None:
    """Write every command with the full first sentence of its help, wrapped but never truncated."""
    with formatter.section(title):
        formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])


def numbers(text: str, option: str) -> list[int]:
    """Parse positive integers up to 10⁷, such as `1,8,32`. Returns them sorted, without duplicates.

    Raises `OptionError` for any other text.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) <= 10**7 for word in words):
        raise OptionError(f"{option} {text} is not valid", hint=f"pass integers: {option} 1,8,32")
    return sorted({int(word) for word in words})
