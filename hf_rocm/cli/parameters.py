"""Parameters that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_rocm.arguments import require_folder
from hf_rocm.cli.output import print_notice
from hf_rocm.tools.bench.known_shapes import SHAPES


def _known_models() -> list[str]:
    """Return the names of model folders for shell completion."""
    from hf_rocm.overlay.catalog import load

    return load().models()


def _folder(context: typer.Context, model: str | None) -> str | None:
    """Check the path of a model before torch is imported, because the import takes seconds."""
    if model is not None and not context.resilient_parsing:
        require_folder(model)
        if not Path(model).exists():
            print_notice(f"{model!r} is not a folder here, so it is looked up on the Hugging Face Hub")
    return model


Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Model folders of transformers, such as llama.", autocompletion=_known_models),
]
TransformersPath = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="The folder of another transformers installation, or its parent."),
]
ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the Hub.", callback=_folder)
]
OptionalModelPath = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the Hub.", callback=_folder)
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="NAME",
        help=f"Use random weights in one of these shapes: {', '.join(SHAPES)}.",
        autocompletion=lambda: list(SHAPES),
    ),
]
Layers = Annotated[
    int | None, typer.Option("--layers", metavar="N", help="With --config: the number of layers.", min=1)
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="The device of the model (default: the GPU, else the CPU)."),
]
Force = Annotated[bool, typer.Option("--force", help="Use the ROCm path even without ROCm.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without writing anything.")]
Everything = Annotated[bool, typer.Option("--all", "-v", help="List every model.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="bfloat16, float16 or float32 (default: bfloat16; float32 on a CPU)."
    ),
]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Add the result to this JSON file.")]
SegmentName = Annotated[
    str | None, typer.Option("--segment", metavar="NAME", help="The name of the result in the --save file.")
]
ChartFile = Annotated[
    Path | None,
    typer.Option(
        "--chart",
        metavar="FILE",
        help="Draw a chart: FILE.svg, FILE.png (needs Pillow), or both if FILE has no suffix.",
    ),
]
