"""`hf-rocm quantize`: measure what a model loses and gains in 8 or 4 bits, and write the quantised model on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_rocm.cli.output import check_output, print_facts, print_json, print_next, print_table, print_wrapped
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath
from hf_rocm.cli.progress import Progress
from hf_rocm.errors import OptionError

if TYPE_CHECKING:
    from hf_rocm.tools.quality import Quantized, Unquantized

Kind = Annotated[
    str,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="fp8, int8, int4, int4-g64, int4-g32 or mxfp4; several separated by commas, or all.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="The text to measure on (default: Python's documentation)."),
]
Head = Annotated[bool, typer.Option("--head", help="Also quantise the layer that computes the logits.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FOLDER", help="Write the quantised model here, in the format of compressed-tensors."
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=2, metavar="N", help="The number of tokens of the text to use.")]

_NO_TOKENIZER = "save the tokenizer in the model's folder; `hf-rocm verify MODEL` also works with random tokens"


def quantize(
    model: ModelPath,
    kind: Kind = "fp8",
    text: Text = None,
    tokens: Tokens = 2048,
    head: Head = False,
    out: Out = None,
    device: DeviceName = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure what MODEL loses and gains in 8 or 4 bits: logits, perplexity, memory and speed.

    Nothing is written without --out. In Python, `hf_rocm.from_pretrained(..., quantize=KIND)` loads such a model.
    """
    from hf_rocm.tools import quality
    from hf_rocm.weights import quantize as quantizing

    kinds = quantizing.kinds() if kind == "all" else list(dict.fromkeys(kind.split(",")))
    for name in kinds:
        quantizing.check_options(name, force=force or None, enabled_by="--force")
    if out is not None:
        _check_folder(out, kinds)
    words = None if text is None else _read(text)
    tokenizer = quality.tokenizer_of(model, hint=_NO_TOKENIZER)
    ids = quality.read(tokenizer, words, tokens=tokens)
    with Progress("groups of layers") as progress:
        reference, results, last = quality.measure(
            model, kinds, ids, device=device, force=force, head=head, progress=progress.count
        )
    if out is not None:
        from hf_rocm.loading.save_quantized import save_quantized

        save_quantized(last, out)
        tokenizer.save_pretrained(out)
    if len(kinds) > 1:
        _print_several(reference, results, json=json)
    elif json:
        print_json({"model": reference.model, **results[0].to_dict()})
    else:
        _print_one(reference, results[0])
    if out is not None and not json:
        print_next(f"hf_rocm.from_pretrained({str(out)!r})")


def _print_one(reference: Unquantized, result: Quantized) -> None:
    report, loss = result.report, result.loss
    before, after = map(_mib, report["bytes"])
    error = report["error"]
    stored = "" if report["format"] == report["kind"] else f" ({report['format']})"
    print(f"{reference.model} in {report['kind']}{stored}\n")
    facts = {
        "layers": f"{report['layers']} quantised, {len(report['left'])} unchanged",
        "memory": f"{before} before, {after} after",
        "layer outputs": f"mean error {error['mean']:.2%}, largest error {error['max']:.2%} ({error['worst']})",
        "logits": f"mean error {loss.mean:.3g}, largest error {loss.largest:.3g}; standard deviation {loss.size:.3g}",
        "same top-1": f"{loss.same_choice:.2%} of {loss.tokens} tokens",
        "divergence": f"{loss.divergence:.3g} nats (Kullback-Leibler) on average",
    }
    if loss.perplexity is not None:
        actual, expected = loss.perplexity
        facts["perplexity"] = f"{expected:.4f} before, {actual:.4f} after, a factor of {actual / expected:.4f}"
    if reference.ms_per_token is not None and result.ms_per_token is not None:
        facts["decoding"] = (
            f"{reference.ms_per_token:.3g} ms per token before, {result.ms_per_token:.3g} after, on {reference.device}"
        )
    print_facts(facts)
    for reason, count in Counter(report["left"].values()).most_common():
        print(f"not quantised × {count}: {reason}")


def _print_several(reference: Unquantized, results: Sequence[Quantized], *, json: bool) -> None:
    first = {"kind": reference.dtype, "bytes": reference.nbytes, "ms_per_token": reference.ms_per_token}
    if json:
        schemes: list[dict[str, Any]] = [first, *(result.to_dict() for result in results)]
        print_json({"model": reference.model, "device": reference.device, "schemes": schemes})
        return
    loss = results[0].loss
    print(f"{reference.model} on {reference.device}, {loss.tokens} tokens of text\n")
    before = None if loss.perplexity is None else loss.perplexity[1]
    rows = [
        (reference.dtype, "", _mib(reference.nbytes), _number(reference.ms_per_token), "", "", _number(before, ".4f"))
    ]
    for result in results:
        report, loss = result.report, result.loss
        after = None if loss.perplexity is None else loss.perplexity[0]
        rows.append(
            (
                report["kind"],
                str(report["layers"]),
                _mib(report["bytes"][1]),
                _number(result.ms_per_token),
                f"{loss.same_choice:.2%}",
                f"{loss.divergence:.3g}",
                _number(after, ".4f"),
            )
        )
    print_table(("kind", "layers", "memory", "ms per token", "same top-1", "divergence", "perplexity"), rows)
    print()
    print_wrapped(
        "layers: the number of quantised layers. same top-1: positions with the same most likely token. divergence: "
        "Kullback-Leibler, in nats, on average. ms per token: batch 1, median of 3 calls."
    )


def _check_folder(folder: Path, kinds: Sequence[str]) -> None:
    """Raise `OptionError` before any work if several kinds are selected, or the folder is not empty or not writable."""
    if len(kinds) > 1:
        raise OptionError(
            "--out requires a single kind", facts={"kinds": ", ".join(kinds)}, hint="select one with --kind"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists and is not an empty folder", hint="specify a new folder with --out")
    check_output(folder / "config.json", parents=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} can't be read as text", facts={"because": error}) from error
