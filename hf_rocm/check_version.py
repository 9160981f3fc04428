"""`python -m hf_rocm.check_version`: check that the installed overlays match the installed transformers.

The check takes less than a second and imports neither torch nor transformers nor typer, so every rank of a job and
every health check can run it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_rocm import __version__
from hf_rocm.cli.output import print_error, print_facts, print_json, print_left_out, print_states, print_wrapped
from hf_rocm.errors import HfRocmError, OptionError
from hf_rocm.options import check_names, force_requested
from hf_rocm.overlay.catalog import load
from hf_rocm.overlay.commands import system_errors
from hf_rocm.overlay.facts import AiterFacts, RocmFacts, TorchFacts, aiter_facts, rocm_facts, torch_facts
from hf_rocm.overlay.locate import locate
from hf_rocm.overlay.newer_release import Outlook, outlook
from hf_rocm.overlay.scan import left_out, survey
from hf_rocm.overlay.state import GOOD, LISTED, FileState, Installed, LeftOut, Match, pip

# The largest number of models that a hint lists.
_NAMED = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every selected overlay is installed and matches, else 1. A usage error exits with 2."""
    options = _parser().parse_args(arguments)
    check_names()
    torch, rocm, aiter = torch_facts(), rocm_facts(), aiter_facts()
    facts = {"torch": torch.to_dict(), "rocm": rocm.to_dict(), "aiter": aiter.to_dict()}
    try:
        with system_errors():
            catalog = load()
            installation = locate(options.transformers_path)
            newer = outlook(installation, catalog, options.models)
            outside = newer is not None and not catalog.for_release(installation.version)
            # in a release that is newer than all supported ranges, only files with a block have a state
            states = survey(installation, catalog, () if outside else options.models)
            skipped = LeftOut() if options.models or outside else left_out(installation, catalog)
    except HfRocmError as error:
        if options.json:
            print_json({"hf_rocm": __version__, "ok": False, **facts, **error.to_dict()})
        print_error(error)
        return 1
    unmet = [state for state in states if not _meets(state, strict=options.strict)]
    ok = bool(states) and not unmet
    if options.json:
        transformers = {"version": installation.version, "path": str(installation.root)}
        files = [state.to_dict() for state in states]
        newer_facts = newer.to_dict() if newer else None
        result = {"hf_rocm": __version__, "ok": ok, "transformers": transformers, **facts, "files": files}
        print_json({**result, "left_out": skipped.to_dict(), "newer_release": newer_facts})
        return 0 if ok else 1
    print_facts(
        {
            "hf-rocm": __version__,
            "transformers": f"{installation.version}  {installation.root}",
            "torch": _torch_sentence(torch),
            "ROCm": _rocm_sentence(torch, rocm),
            "aiter": _aiter_sentence(aiter),
        }
    )
    print()
    if states:
        print_states(states, skipped, named=bool(options.models), everything=options.all)
    else:
        print_left_out(skipped, installation.version)
    if newer is not None:
        _print_outlook(newer, everything=options.all)
    for hint in _hints(states, unmet, installation.version, newer, named=bool(options.models)):
        print(f"hint: {hint}", file=sys.stderr)
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_rocm.check_version",
        description="Check that the installed overlays match the installed transformers. Exits with 0 if every "
        "selected overlay is installed and matches, otherwise with 1.",
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="model folders such as llama (none: all)")
    parser.add_argument("--strict", action="store_true", help="accept only files that were verified as a whole")
    parser.add_argument("--all", action="store_true", help="list every model")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--transformers-path", metavar="PATH", help="the folder of another transformers installation, or its parent"
    )
    return parser


def _meets(state: FileState, *, strict: bool) -> bool:
    accepted = (Match.VERIFIED,) if strict else GOOD
    return state.installed is Installed.YES and state.match in accepted


def _hints(
    states: Sequence[FileState], unmet: Sequence[FileState], release: str, newer: Outlook | None, *, named: bool
) -> list[str]:
    if not states:
        return [f"there is no overlay for transformers {release}; upgrade hf-rocm, or install a release that it covers"]
    differing = [state.model for state in unmet if state.match not in GOOD or state.installed is Installed.EDITED]
    met = [] if named else [state.model for state in states if state not in unmet]
    missing = [state.model for state in unmet if state.installed in (Installed.NO, Installed.OLD, Installed.FOREIGN)]
    hints = []
    if differing and newer is not None:
        hints.append(f"run `{pip(newer.newest)}` for the newest release that hf-rocm was checked with")
    elif differing:
        hints.append(f"run `hf-rocm status --diff {differing[0]}` to see what differs")
    elif missing:
        hints.append("run `hf-rocm install-overlays`")
        if 0 < len(met) <= _NAMED:
            hints.append(f"to check only what is installed, run `python -m hf_rocm.check_version {' '.join(met)}`")
    elif unmet:
        hints.append("every definition was verified, but not every file as a whole: drop --strict, or upgrade hf-rocm")
    return hints


def _print_outlook(newer: Outlook, *, everything: bool) -> None:
    print()
    print_wrapped(
        f"transformers {newer.release} is newer than {newer.newest}, the newest that hf-rocm was checked with:"
    )
    usable: dict[str, list[str]] = {}
    refused = [prospect for prospect in newer.prospects if not prospect.go_on]
    brief = len(refused) > LISTED and not everything
    for prospect in newer.prospects:
        if prospect.go_on:
            usable.setdefault(prospect.why, []).append(prospect.model)
        elif not brief:
            print_wrapped(f"{prospect.model}: do not proceed; {prospect.sentence}", indent="  ")
    if brief:
        print_wrapped(f"{len(refused)} models: do not proceed (--all lists the reasons)", indent="  ")
    for reason, models in usable.items():
        files = "the file" if len(models) == 1 else "each file"
        print_wrapped(f"{', '.join(models)}: proceed; {files} {reason}", indent="  ")
    print_wrapped(newer.verdict)


def _torch_sentence(torch: TorchFacts) -> str:
    if torch.version is None:
        return "not installed"
    build = f"for ROCm {torch.hip}" if torch.hip else f"for CUDA {torch.cuda}" if torch.cuda else "for the CPU"
    return f"{torch.version}  {build}"


def _rocm_sentence(torch: TorchFacts, rocm: RocmFacts) -> str:
    installed = f"{rocm.version or 'not installed'}, {'device present' if rocm.device else 'no device'}"
    if torch.hip:
        return installed
    return f"{installed}; the installed torch does not use it, so models with installed overlays {_without_rocm()}"


def _without_rocm() -> str:
    try:
        forced = force_requested()
    except OptionError as error:
        return f"stay stock ({error.message})"
    return "run the ROCm path only because HF_ROCM_FORCE=1 is set" if forced else "stay stock"


def _aiter_sentence(aiter: AiterFacts) -> str:
    return f"{aiter.sentence}  {aiter.path}" if aiter.path else aiter.sentence


if __name__ == "__main__":
    sys.exit(main())
