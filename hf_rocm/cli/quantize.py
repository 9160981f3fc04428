"""`hf-rocm quantize`: measure what a model loses and gains in 8 or 4 bits. Nothing is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.cli.output import print_facts, print_json
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath
from hf_rocm.cli.progress import Progress
from hf_rocm.errors import OptionError

Kind = Annotated[str, typer.Option("--kind", metavar="KIND", help="fp8, int8, int4, int4-g64 or int4-g32.")]
Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="The text to measure on (default: Python's documentation)."),
]
Tokens = Annotated[int, typer.Option("--tokens", min=2, metavar="N", help="Tokens of the text to use.")]

_NO_TOKENIZER = "save the tokenizer in the model's folder; `hf-rocm verify MODEL` also works with random tokens"


def quantize(
    model: ModelPath,
    kind: Kind = "fp8",
    text: Text = None,
    tokens: Tokens = 2048,
    device: DeviceName = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure what MODEL loses and gains in 8 or 4 bits: logits, perplexity and memory.

    Nothing is written. In Python, `hf_rocm.from_pretrained(..., quantize=KIND)` loads such a model.
    """
    from hf_rocm.tools import quality as loss
    from hf_rocm.tools.load import load
    from hf_rocm.weights import quantize as quantizing

    quantizing.check_options(kind, force=force or None)
    words = None if text is None else _read(text)
    tokenizer = loss.tokenizer_of(model, hint=_NO_TOKENIZER)
    loaded = load(model, device=device, force=force)
    pieces = list(loss.chunks(loss.read(tokenizer, words, tokens=tokens)))
    before = loss.logits_of(loaded, pieces)
    with Progress("groups of layers") as progress:
        quantizing.quantize(loaded, kind, force=force or None, progress=progress.count)
    after = loss.logits_of(loaded, pieces)
    gap = loss.compare(after, before, pieces, predicts=loss.predicts(loaded))
    report = loaded.__dict__[quantizing.REPORT]
    if json:
        print_json({"model": type(loaded).__name__, **report, "loss": gap.to_dict()})
        return
    was, now = (f"{size / 2**20:.1f} MiB" for size in report["bytes"])
    error = report["error"]
    stored = "" if report["format"] == report["kind"] else f" ({report['format']})"
    print(f"{type(loaded).__name__} in {report['kind']}{stored}\n")
    facts = {
        "layers": f"{report['layers']} quantised, {len(report['left'])} as they were",
        "memory": f"{was} before, {now} after",
        "layer outputs": f"off by {error['mean']:.2%} on average, {error['max']:.2%} at most ({error['worst']})",
        "logits": f"off by {gap.mean:.3g} on average, {gap.largest:.3g} at most; they spread by {gap.size:.3g}",
        "same choice": f"{gap.same_choice:.2%} of {gap.tokens} tokens",
        "divergence": f"{gap.divergence:.3g} nats (Kullback-Leibler) on average",
    }
    if gap.perplexity is not None:
        actual, expected = gap.perplexity
        facts["perplexity"] = f"{expected:.4f} before, {actual:.4f} after, a factor of {actual / expected:.4f}"
    print_facts(facts)
    for reason, count in Counter(report["left"].values()).most_common():
        print(f"left {count}: {reason}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} can't be read as text", facts={"because": error}) from error
