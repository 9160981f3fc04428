"""`hf-rocm verify`: stock beside hf_rocm on this machine and these weights; exit 1 if something is off."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_rocm.cli.output import print_json, print_notice
from hf_rocm.cli.parameters import DeviceName, Force, Json
from hf_rocm.errors import LoadError, OptionError

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the hub.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer tokens, shorter windows, nothing is saved.")]
Train = Annotated[bool, typer.Option("--train", help="Compare loss and gradients, too, with a copy on the CPU.")]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="Random weights of a config.json, or of tiny-llama, tiny-qwen3, tiny-gemma2, …",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="With --config: what the weights are in.")]
Golden = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Compare with a reference that another machine recorded.")
]
SaveGolden = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Record stock's results here for another machine.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the error by layer (SVG).")]


def verify(
    model: Model = None,
    quick: Quick = False,
    train: Train = False,
    config: Config = None,
    dtype: Dtype = "bfloat16",
    golden: Golden = None,
    save_golden: SaveGolden = None,
    picture: Picture = None,
    device: DeviceName = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Run MODEL stock and through hf_rocm on this machine, and compare every layer, the results, and generated text.

    How far hf_rocm may be off is derived: twice what stock's own run in this dtype is, beside stock in a wider one.
    Exits with 1 if anything is further off, and names the first layer and operation. Without ROCm it needs --force.
    With --save-golden alone and no ROCm, stock is recorded and nothing compared.
    """
    from hf_rocm import options
    from hf_rocm.device import is_rocm
    from hf_rocm.diagnostics.verify import record
    from hf_rocm.diagnostics.verify import verify as compare

    if (model is None) == (config is None):
        raise typer.BadParameter("give either MODEL or --config")
    loaded, ids = _loaded(model, config, dtype=dtype, device=device)
    if save_golden is not None and golden is None and not (is_rocm() or force or options.force_requested()):
        header = record(loaded, save_golden, ids=ids, quick=quick)
        facts = {name: header[name] for name in ("model", "dtype", "weights", "recorded with")}
        if json:
            print_json({"file": str(save_golden), **facts})
        else:
            print(f"{save_golden}: stock {facts['model']} in {facts['dtype']}, weights {facts['weights']}")
            print("recorded, nothing compared: this is no ROCm machine (--force compares, too)")
        return
    found = compare(
        loaded,
        ids=ids,
        quick=quick,
        train=train,
        force=force or None,
        golden=golden,
        save_golden=save_golden,
        progress=_progress,
    )
    _progress("")
    if save_golden is not None:
        print_notice(f"stock's results are in {save_golden}")
    if picture is not None:
        _write(picture, found.picture())
    if json:
        print_json(found.to_dict())
    else:
        print(found)
    if not found.passed:
        raise typer.Exit(1)


def _loaded(model: str | None, config: str | None, *, dtype: str, device: str | None) -> tuple[Any, Any]:
    """The stock model, and tokens of a text where there is a tokenizer."""
    from hf_rocm.diagnostics.load import device_named, load
    from hf_rocm.diagnostics.verify.shapes import random_model
    from hf_rocm.weights.quantize_loss import read, tokenizer_of

    if config is not None:
        return random_model(config, dtype=dtype, device=device_named(device)), None
    assert model is not None
    loaded = load(model, device=device, stock=True)
    try:
        return loaded, read(tokenizer_of(model), None, tokens=512)
    except (LoadError, OptionError) as error:
        print_notice(f"random tokens are used: {error.message}")
        return loaded, None


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{file} can't be written", facts={"because": error.strerror or error}) from error
