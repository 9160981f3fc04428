"""`hf-rocm verify`: compare hf_rocm with stock on this machine; exit with 1 if a check fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_rocm import files
from hf_rocm.cli.output import check_output, print_json, print_notice
from hf_rocm.cli.parameters import DeviceName, Force, Json, OptionalModelPath
from hf_rocm.cli.progress import Progress
from hf_rocm.errors import LoadError, OptionError

Quick = Annotated[bool, typer.Option("--quick", help="Use fewer tokens, and skip the check of saved files.")]
Train = Annotated[
    bool, typer.Option("--train", help="Also compare loss and gradients with those of a copy on the CPU.")
]
_TINY = ("tiny-bert", "tiny-gemma2", "tiny-gpt-oss", "tiny-llama", "tiny-mistral", "tiny-qwen3")
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help=f"Use random weights instead of MODEL. CONFIG: a config.json, or one of {', '.join(_TINY)}.",
        autocompletion=lambda: list(_TINY),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="With --config: the dtype of the weights (default: bfloat16)."),
]
Golden = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Compare with a reference that another machine recorded.")
]
SaveGolden = Annotated[Path | None, typer.Option(metavar="FILE", help="Record stock's results for another machine.")]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the error by layer (SVG).")]


def verify(
    model: OptionalModelPath = None,
    quick: Quick = False,
    train: Train = False,
    config: Config = None,
    dtype: Dtype = None,
    golden: Golden = None,
    save_golden: SaveGolden = None,
    picture: Picture = None,
    device: DeviceName = None,
    force: Force = False,
    everything: Annotated[
        bool, typer.Option("--all", "-v", help="Also show every layer, the end results, and the kernels that ran.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare MODEL with stock on this machine: every layer, the logits, and generated text.

    Errors are measured against stock in a wider dtype. hf_rocm may have at most twice the error of stock in the model's
    own dtype. Exits with 1 if an error is larger, and names the first layer and operation. Without ROCm it needs
    --force, except with --save-golden alone, which then records stock's results and compares nothing.
    """
    from hf_rocm.tools.verify import record
    from hf_rocm.tools.verify import verify as compare
    from hf_rocm.tools.verify.run import check_enabled, enabled

    if (model is None) == (config is None):
        raise typer.BadParameter("pass either MODEL or --config")
    if dtype is not None and config is None:
        raise typer.BadParameter("--dtype needs --config; MODEL is verified in the dtype of its checkpoint")
    for output in (save_golden, picture):
        if output is not None:
            check_output(output)
    only_record = None if enabled(force=force) or golden is not None else save_golden
    if only_record is None:
        # Raise this error before the model is loaded.
        check_enabled(force=force, enabled_by="--force")
        print_notice(f"comparing {model or config} with stock, which may take minutes")
    loaded, ids = _loaded(model, config, dtype=dtype or "bfloat16", device=device)
    if only_record is not None:
        header = record(loaded, only_record, ids=ids, quick=quick)
        facts = {name: header[name] for name in ("model", "dtype", "weights", "recorded with")}
        if json:
            print_json({"file": str(only_record), **facts})
        else:
            print(f"{only_record}: stock {facts['model']} in {facts['dtype']}, weights {facts['weights']}")
            print("recorded, nothing compared: this PyTorch is not a ROCm build (--force also compares)")
        return
    with Progress(every=15) as progress:
        result = compare(
            loaded,
            ids=ids,
            quick=quick,
            train=train,
            force=force or None,
            golden=golden,
            save_golden=save_golden,
            progress=progress.step,
        )
    if save_golden is not None:
        print_notice(f"stock's results are in {save_golden}")
    if picture is not None:
        _write(picture, result.picture())
    if json:
        print_json(result.to_dict())
    else:
        print(result.details() if everything else result)
    if not result.passed:
        raise typer.Exit(1)


def _loaded(model: str | None, config: str | None, *, dtype: str, device: str | None) -> tuple[Any, Any]:
    """Return (stock model, tokens of a text). The tokens are None with --config, or if no text can be tokenised."""
    from hf_rocm.tools.bench.known_shapes import SHAPES as BENCH_SHAPES
    from hf_rocm.tools.load import device_named, load
    from hf_rocm.tools.quality import read, tokenizer_of
    from hf_rocm.tools.verify.shapes import SHAPES, random_model

    if config is not None:
        if config in BENCH_SHAPES and config not in SHAPES and not Path(config).exists():
            raise OptionError(
                f"--config {config} is a shape that only `hf-rocm bench` accepts",
                facts={"allowed": f"a config.json, or one of {', '.join(sorted(SHAPES))}"},
            )
        return random_model(config, dtype=dtype, device=device_named(device)), None
    assert model is not None
    loaded = load(model, device=device, stock=True)
    try:
        return loaded, read(tokenizer_of(model), None, tokens=512)
    except (LoadError, OptionError) as error:
        print_notice(f"random tokens are used: {error.message}")
        return loaded, None


def _write(file: Path, text: str) -> None:
    try:
        files.write_output(file, text)
    except OSError as error:
        raise OptionError(f"{file} can't be written", facts={"because": error.strerror or error}) from error
