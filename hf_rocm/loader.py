"""from_pretrained: transformers loads the model, then hf_rocm prepares it for ROCm.

What comes back is the ordinary `PreTrainedModel` that transformers made. Our own arguments never reach
transformers, and everything else does, unchanged.
"""

from __future__ import annotations

from functools import cache
from os import PathLike
from typing import Any

from packaging.version import Version

from hf_rocm import auto, options
from hf_rocm.device import is_rocm
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.ops import probe
from hf_rocm.ranks.loading import together
from hf_rocm.weights import quantize as quantizing
from hf_rocm.weights.prepare import check_arguments, prepare

# Arguments that decide which files are read; the config must come from the same place as the weights.
_SOURCE = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)

# What transformers never sees.
_OWN = ("auto_class", "force", "preshuffle", "budget", "linear_backend", "quantize", "graphs")


def from_pretrained(
    model_id: str | PathLike[str],
    *,
    auto_class: Any = None,
    force: bool | None = None,
    preshuffle: str | None = None,
    budget: int | float | str | None = None,
    linear_backend: str | None = None,
    quantize: str | None = None,
    graphs: bool | None = None,
    **arguments: Any,
) -> Any:
    """Load a model as transformers does, and prepare it: overlays, fused projections, shuffled weights.

    model_id: a name on the hub or a folder. auto_class: the class whose `from_pretrained` is called, or the name of
    one in transformers; by default the first architecture of the config, else the causal-LM class for this config,
    else `AutoModel`. force: switch the ROCm path on (True) or leave it to the machine (None, and `HF_ROCM_FORCE`);
    False keeps the model stock. preshuffle, budget, linear_backend and graphs: as in `hf_rocm.prepare`. quantize:
    `fp8` or `int8`, see `hf_rocm.quantize`. arguments: anything transformers takes. Without `dtype` the checkpoint's
    own is used, on 4.x too.

    Several ranks that load one model together (`tp_plan`, `tp_size`, `distributed_config` or `device_mesh` under
    torchrun or another launcher) first compare what they run: releases, overlays, aiter, GPU, options, arguments and
    the model's config. Where they differ, where one fails while it looks, or where one has not come after
    `HF_ROCM_RANKS_TIMEOUT` seconds, all of them raise the same `RankError`, as they do where heads can't be divided
    among them. What a load logs comes from rank 0. Nothing of this happens where the model stays stock, but that what
    is logged is said once.

    Returns the model, or what transformers returns (`output_loading_info=True` gives a pair).
    Raises `LoadError` (an `OSError`) when config or weights can't be found, `OptionError` on an argument that
    transformers doesn't take, `RankError` as above.
    """
    check_arguments(preshuffle=preshuffle, budget=budget, linear_backend=linear_backend)
    if quantize is not None:
        quantizing.check_options(quantize, force=force)
    arguments = _with_dtype(arguments)
    own = {
        "auto_class": auto_class,
        "force": force,
        "preshuffle": preshuffle,
        "budget": budget,
        "linear_backend": linear_backend,
        "quantize": quantize,
        "graphs": graphs,
    }
    served = bool(force) or (force is None and (is_rocm() or options.force_requested()))
    with together({**own, **arguments}, cache(lambda: _config_or_none(model_id, arguments)), served=served):
        if served:
            probe.ahead()
        return _load(model_id, arguments, **own)


def _load(
    model_id: str | PathLike[str],
    arguments: dict[str, Any],
    *,
    auto_class: Any,
    force: bool | None,
    preshuffle: str | None,
    budget: int | float | str | None,
    linear_backend: str | None,
    quantize: str | None,
    graphs: bool | None,
) -> Any:
    """Load and prepare; see `from_pretrained`."""
    try:
        loader = _class_for(model_id, auto_class, arguments)
        with auto.suspended():
            loaded = loader.from_pretrained(model_id, **arguments)
    except OSError as error:
        raise LoadError(
            f"no model could be loaded from {str(model_id)!r}",
            facts={"transformers says": _first_lines(error)},
            hint="check the name or the path; a folder needs config.json and its weights (model.safetensors)",
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise OptionError(
            "transformers does not take one of the arguments",
            facts={"transformers says": _first_lines(error), "given": ", ".join(sorted(arguments))},
            hint=f"remove or rename it; hf_rocm's own arguments are {', '.join(_OWN)}",
        ) from error
    model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
    model = prepare(
        model, force=force, preshuffle=preshuffle, budget=budget, linear_backend=linear_backend, graphs=graphs
    )
    if quantize is not None:
        quantizing.quantize(model, quantize, force=force)
    return (model, *info) if info else model


def _class_for(model_id: str | PathLike[str], auto_class: Any, arguments: dict[str, Any]) -> Any:
    """The class that loads this model; see `from_pretrained`."""
    import transformers

    if isinstance(auto_class, str):
        named = getattr(transformers, auto_class, None)
        if named is None:
            raise OptionError(
                f"transformers {transformers.__version__} has no class {auto_class!r}",
                hint="give a class such as transformers.AutoModelForCausalLM, or its name",
            )
        return named
    if auto_class is not None:
        return auto_class
    if arguments.get("quantization_config") is None and _is_adapter(model_id):
        return transformers.AutoModelForCausalLM  # it finds the base model behind a PEFT adapter
    config = _config(model_id, arguments)
    remote = getattr(config, "auto_map", None) or {}
    if arguments.get("trust_remote_code") and remote:
        return transformers.AutoModelForCausalLM if "AutoModelForCausalLM" in remote else transformers.AutoModel
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is not None:
        return architecture
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _config(model_id: str | PathLike[str], arguments: dict[str, Any]) -> Any:
    import transformers

    config = arguments.get("config")
    if config is None or isinstance(config, (str, PathLike)):
        source = {name: arguments[name] for name in _SOURCE if name in arguments}
        config = transformers.AutoConfig.from_pretrained(config or model_id, **source)
    return config


def _config_or_none(model_id: str | PathLike[str], arguments: dict[str, Any]) -> Any:
    """None where there is none to be had this way: an adapter, a class of the user's own, a file that isn't there."""
    if _is_adapter(model_id):
        return None
    try:
        return _config(model_id, arguments)
    except (OSError, ValueError, KeyError):
        return None  # whoever loads says why


def _is_adapter(model_id: str | PathLike[str]) -> bool:
    from pathlib import Path

    folder = Path(model_id)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _with_dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's own dtype unless one is given, under the name that this release knows."""
    import transformers

    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    given = dict(arguments)
    if name == "torch_dtype" and "dtype" in given:
        given["torch_dtype"] = given.pop("dtype")
    if "dtype" not in given and "torch_dtype" not in given:
        given[name] = "auto"
    return given


def _first_lines(error: BaseException) -> str:
    """Enough of transformers' own words: they can run over a page."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:300] + " …"
