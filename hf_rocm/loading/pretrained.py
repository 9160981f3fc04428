"""from_pretrained: transformers loads the model, then hf_rocm prepares it for ROCm.

The result is the ordinary `PreTrainedModel` that transformers created. All arguments except hf_rocm's own are passed to
transformers. `dtype` defaults to the checkpoint's own dtype. If hf_rocm serves a requested `flash_attention_2`, the
request is not passed to transformers, and the implementation is set after `prepare`.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from packaging.version import Version
from safetensors import SafetensorError

from hf_rocm import options
from hf_rocm.arguments import not_loaded, require_name
from hf_rocm.device import is_rocm
from hf_rocm.distributed.loading import together
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.generation import flash_provider
from hf_rocm.loading import auto, heap_copies, stored_checkpoints
from hf_rocm.loading.prepare import check_arguments, prepare
from hf_rocm.ops import probe
from hf_rocm.weights import quantize as quantizing

# Arguments that determine which files are read; the config must come from the same place as the weights.
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

# hf_rocm's own arguments, which are not passed to transformers.
_OWN = ("auto_class", "force", "preshuffle", "budget", "linear_backend", "quantize", "graphs")

# Parts of the messages of torch and safetensors for damaged files, and of transformers for weights of other shapes.
_UNUSABLE_WEIGHTS = ("PytorchStreamReader", "deserializing", "ignore_mismatched_sizes", "size mismatch")


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
    """Load a model with transformers and prepare it: overlays, fused projections, shuffled weights, recorded steps.

    model_id: a model name on the Hub or a folder. auto_class: the class whose `from_pretrained` is called, or its name
    in transformers; default: the first architecture of the config if transformers has it, else the causal-LM class for
    this config, else `AutoModel`. For a local PEFT adapter, the default is `AutoModelForCausalLM`; for remote code, it
    is `AutoModelForCausalLM` if the code has such a class, else `AutoModel`. force: True enables the ROCm path on any
    machine, False keeps the model stock; None enables it on ROCm, or if `HF_ROCM_FORCE` is set. preshuffle, budget,
    linear_backend, quantize and graphs: as in `hf_rocm.prepare`. arguments: any arguments of transformers'
    `from_pretrained`. The default of `dtype` is the checkpoint's own dtype, even on transformers 4.x.

    Ranks that load one model together (`tp_plan`, `tp_size`, `distributed_config` or `device_mesh` under torchrun or
    another launcher) first compare releases, overlays, aiter, GPU, options, arguments and the model's config. All
    ranks raise the same `RankError` if these differ, if one rank fails, if one has not joined after
    `HF_ROCM_RANKS_TIMEOUT` seconds, or if the attention heads can't be divided among them. Messages that all ranks
    would log come only from rank 0. If the model stays stock, only the log is deduplicated.

    Returns the model, or with `output_loading_info=True` the pair (model, loading info), as transformers does.
    Raises `LoadError` (an `OSError`) if the config or the weights can't be found or read, `OptionError` if an argument
    has an invalid value or is one that transformers does not accept, `RankError` as above, and the errors of
    `hf_rocm.prepare`.
    """
    options.refresh()
    check_arguments(preshuffle=preshuffle, budget=budget, linear_backend=linear_backend, force=force, graphs=graphs)
    require_name(model_id, "from_pretrained")
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
        return _load(model_id, arguments, served=served, **own)


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
    served: bool,
) -> Any:
    """Load and prepare; see `from_pretrained`. served: whether the model will be prepared."""
    flash = served and flash_provider.take_request(arguments)
    try:
        loader = _class_for(model_id, auto_class, arguments)
        with auto.suspended(), heap_copies.where_needed() if served else nullcontext():
            call = loader.from_pretrained
            loaded = stored_checkpoints.load(call, model_id, **arguments) if served else call(model_id, **arguments)
    except LoadError:
        raise
    except OSError as error:
        raise not_loaded(model_id, _first_lines(error)) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise OptionError(
            "transformers does not accept one of the arguments",
            facts={"transformers error": _first_lines(error), "given": ", ".join(sorted(arguments))},
            hint=f"remove or rename it; hf_rocm's own arguments are {', '.join(_OWN)}",
        ) from error
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        damaged = isinstance(error, UnpicklingError | EOFError)
        if not damaged and not any(text in str(error) for text in _UNUSABLE_WEIGHTS):
            raise
        raise LoadError(
            f"the weights of {str(model_id)!r} can't be loaded",
            facts={"error": f"{type(error).__name__}: {_first_lines(error)}"},
            hint="a file is incomplete, or not for this config.json: download or save the checkpoint again",
        ) from error
    model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
    model = prepare(
        model,
        force=force,
        preshuffle=preshuffle,
        budget=budget,
        linear_backend=linear_backend,
        quantize=quantize,
        graphs=graphs,
    )
    if flash:
        model.set_attn_implementation(flash_provider.NAME)
    return (model, *info) if info else model


def class_for(model_id: str | PathLike[str]) -> Any:
    """Return the class with which `from_pretrained` loads this model by default. Reads only the config.

    Raises `LoadError` if there is no config, and `ValueError` if transformers does not recognise it.
    """
    try:
        return _class_for(model_id, None, {})
    except OSError as error:
        raise not_loaded(model_id, _first_lines(error)) from error


def _class_for(model_id: str | PathLike[str], auto_class: Any, arguments: dict[str, Any]) -> Any:
    """Return the class that loads this model; see `from_pretrained`."""
    import transformers

    if isinstance(auto_class, str):
        named = getattr(transformers, auto_class, None)
        if named is None:
            raise OptionError(
                f"transformers {transformers.__version__} has no class {auto_class!r}",
                hint="pass a class such as transformers.AutoModelForCausalLM, or its name",
            )
        return named
    if auto_class is not None:
        if not hasattr(auto_class, "from_pretrained"):
            raise OptionError(
                f"auto_class={auto_class!r} is not a class that loads models",
                hint="pass a class such as transformers.AutoModelForCausalLM, or its name",
            )
        return auto_class
    if arguments.get("quantization_config") is None and _is_adapter(model_id):
        # This class resolves the base model of a PEFT adapter.
        return transformers.AutoModelForCausalLM
    config = _config(model_id, arguments)
    remote = getattr(config, "auto_map", None) or {}
    if arguments.get("trust_remote_code") and remote:
        return transformers.AutoModelForCausalLM if "AutoModelForCausalLM" in remote else transformers.AutoModel
    architecture = _architecture(config)
    if architecture is not None:
        return architecture
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _architecture(config: Any) -> type | None:
    """Return the first architecture of the config, if transformers has a class of that name that accepts the config.

    The name comes from the checkpoint and may be anything; the stock `AutoModelForCausalLM` does not read it.
    """
    import transformers

    named = getattr(config, "architectures", None)
    name = named[0] if isinstance(named, (list, tuple)) and named else None
    if not isinstance(name, str):
        return None
    try:
        cls = getattr(transformers, name, None)
    except (ImportError, RuntimeError):
        # The module needs a package that is not installed.
        return None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        return None
    config_class = getattr(cls, "config_class", None)
    parts = getattr(config, "sub_configs", None) or {}
    accepted = isinstance(config_class, type) and (isinstance(config, config_class) or config_class in parts.values())
    return cls if accepted else None


def _config(model_id: str | PathLike[str], arguments: dict[str, Any]) -> Any:
    import transformers

    config = arguments.get("config")
    if config is None or isinstance(config, (str, PathLike)):
        source = {name: arguments[name] for name in _SOURCE if name in arguments}
        config = transformers.AutoConfig.from_pretrained(config or model_id, **source)
    return config


def _config_or_none(model_id: str | PathLike[str], arguments: dict[str, Any]) -> Any:
    """Return the config, or None if it can't be read this way: an adapter, a custom class, a missing file."""
    if _is_adapter(model_id):
        return None
    try:
        return _config(model_id, arguments)
    except (OSError, ValueError, KeyError):
        # Loading the model raises the error.
        return None


def _is_adapter(model_id: str | PathLike[str]) -> bool:
    folder = Path(model_id)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _with_dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    """Request the checkpoint's own dtype unless a dtype is given, under the argument name of this release."""
    import transformers

    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    given = dict(arguments)
    if name == "torch_dtype" and "dtype" in given:
        given["torch_dtype"] = given.pop("dtype")
    if "dtype" not in given and "torch_dtype" not in given:
        given[name] = "auto"
    return given


def _first_lines(error: BaseException) -> str:
    """Return the beginning of transformers' message, which can be a page long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + " …"
