"""The dispatcher: a `forward` set on a stock class that chooses, for each instance, ours or the stock one.

No class is replaced, subclassed or rebound, so class tables, `isinstance`, pickles and remote code that
subclasses a stock class keep working, and a model that is already loaded can be switched on and off.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from hf_rocm.errors import OptionError

Forward = Callable[..., Any]

# How far a binding reaches. A module's own mode, if it has one, wins over its class's.
OFF = "off"  # stock
GPU = "gpu"  # ours for inputs on a GPU, stock for inputs on the CPU: what ROCm gets
ON = "on"  # ours wherever the input is: what force gives

# A plain string in the module's __dict__: copies and pickles carry it, state dicts don't see it.
MODE = "_hf_rocm_mode"

# Where overlay text runs: in its stock module, or in memory.
_OVERLAYS = ("transformers.models.", "hf_rocm._active.")

# Whose decorators stock forwards wear.
_DECORATED_BY = ("transformers", "torch", "kernels")

_bindings: dict[type, Binding] = {}


class Binding:
    """One stock class and the forward that serves it.

    No dataclass: every process that imports a block pays for what this file costs.
    """

    mode = OFF
    bound = True
    dispatcher: Forward | None = None

    def __init__(
        self,
        cls: type,
        stock: Forward,
        replacement: Forward,
        fuses: tuple[str, ...],
        first: str,
        experts: tuple[str, ...] = (),
        old_name: bool = False,
    ) -> None:
        """old_name: its forward calls the cache past_key_value, as transformers did before 4.56, and ours doesn't."""
        self.cls, self.stock, self.replacement = cls, stock, replacement
        self.fuses, self.experts, self.first, self.old_name = fuses, experts, first, old_name
        self.attached: dict[str, object] = {}

    @property
    def model(self) -> str:
        """The overlay's name: the folder of the stock file (`llama` for `…models.llama.modeling_llama`)."""
        return self.cls.__module__.split(".")[-2]


def wanted(module_name: str) -> bool:
    """Whether the overlay text that is being imported under `module_name` should bind anything here.

    Yes in an in-memory activation; in an installed block under ROCm or with `HF_ROCM_FORCE=1`, if the block was
    written by this release of hf-rocm. It reads `torch.version.hip` and the environment, touches no device, and
    never raises: an installed block must not make a stock module unimportable.
    """
    from hf_rocm import options

    if module_name.startswith("hf_rocm."):
        return True
    if not module_name.startswith("transformers.models."):
        return False  # a copy of the file under another name: its classes are not the ones we were made for
    try:
        forced, automatic = options.force_requested(), options.auto_requested()
    except OptionError as error:
        warnings.warn(f"hf_rocm: {error.message}; the overlay stays stock", RuntimeWarning, stacklevel=2)
        return False
    torch = sys.modules.get("torch")
    if not forced and getattr(getattr(torch, "version", None), "hip", None) is None:
        return False
    current = _block_is_current(module_name)
    if current and automatic:
        from hf_rocm import auto

        auto.switch_on_from_block()
    return current


def _block_is_current(module_name: str) -> bool:
    from hf_rocm import __version__

    written_by = vars(sys.modules.get(module_name, sys)).get("__hf_rocm_block__", __version__)
    if written_by == __version__:
        return True
    warnings.warn(
        f"hf_rocm: the overlay block in {module_name} was written by hf-rocm {written_by}, but {__version__} is "
        "imported; the model stays stock. Run `hf-rocm install-overlays` to update it",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def replaces(cls: type, *, fuses: tuple[str, ...] = (), experts: tuple[str, ...] = ()) -> Callable[[Forward], Forward]:
    """Bind the decorated `function(self, stock, *args, **kwargs)` to a stock class.

    stock is the class's own forward with all of its decorators: call it as `stock(self, …)` for whatever ours
    doesn't serve. fuses names the linear layers, in order, whose weights the loader may fuse into one. experts, for a
    class with a list of them, names an expert's gate, up and down layers and its activation: the loader may stack them.
    A cache that older releases pass as `past_key_value` reaches a function that takes `past_key_values` under that
    name, so one text serves both; hand it to stock by position.
    """

    def bind(function: Forward) -> Forward:
        if function.__module__.startswith(_OVERLAYS) and not _stock(cls):
            return function  # what another library or the user put there wins
        binding = _bindings.get(cls)
        if binding is None:
            stock = cls.__dict__["forward"]
            names = list(inspect.signature(stock).parameters)
            code = function.__code__
            renamed = "past_key_values" in code.co_varnames[: code.co_argcount]
            first, old_name = names[1] if len(names) > 1 else "", renamed and "past_key_value" in names
            binding = Binding(cls, stock, function, fuses, first, experts, old_name)
            binding.dispatcher = _dispatcher(binding)
            _bindings[cls] = binding
        # An overlay that is activated again revives its dispatcher: instances may still hold it as an attribute.
        binding.replacement, binding.fuses, binding.experts = function, fuses, experts
        if not isinstance(function.__globals__.get("__hf_rocm_activation__"), str):
            binding.mode = installed_mode()
        if cls.__dict__["forward"] is binding.stock:
            cls.forward = binding.dispatcher  # type: ignore[attr-defined]
        binding.bound = True
        return function

    return bind


def _stock(cls: type) -> bool:
    """Whether a class, and the forward that it has now, are transformers' own.

    Another library's class may have taken the name, as apex's norm does in some files, and others set a forward of
    theirs on the stock class. A wrapper is known by where it was written: functools.wraps hides its module.
    """
    forward = cls.__dict__.get("forward")
    written = getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0]
    ours = getattr(forward, "__hf_rocm_binding__", None) is not None
    return cls.__module__.startswith("transformers.") and (ours or written in _DECORATED_BY)


def installed_mode() -> str:
    """How far an installed block reaches on this machine: everywhere if forced, else inputs on a GPU."""
    from hf_rocm import options

    return ON if options.force_requested() else GPU


def _dispatcher(binding: Binding) -> Forward:
    cls, stock, first, old_name = binding.cls, binding.stock, binding.first, binding.old_name

    # wraps keeps the signature: kernels, generate and Trainer read it
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = self.__dict__.get(MODE, binding.mode)
        if mode == OFF or type(self) is not cls or not binding.bound:
            return stock(self, *args, **kwargs)
        if mode == GPU and not getattr(args[0] if args else kwargs.get(first), "is_cuda", False):
            return stock(self, *args, **kwargs)
        if old_name and "past_key_value" in kwargs:
            kwargs["past_key_values"] = kwargs.pop("past_key_value")
        return binding.replacement(self, stock, *args, **kwargs)

    forward.__hf_rocm_binding__ = binding  # type: ignore[attr-defined]
    return _checkpointed(cls, stock, forward)


def _checkpointed(cls: Any, stock: Forward, forward: Forward) -> Forward:
    """The dispatcher, checkpointed as transformers does it where it wraps the forward itself, from 5.21 on.

    Its wrapper checkpoints only as the class's own attribute, so it has to be put around the dispatcher anew.
    """
    if getattr(getattr(stock, "__code__", None), "co_name", "") != "forward_with_checkpointing":
        return forward
    base = next(each for each in cls.__mro__[1:] if "__init_subclass__" in each.__dict__)
    cls.forward = forward
    try:
        base.__init_subclass__.__func__(cls)
        wrapped: Forward = cls.__dict__["forward"]
    finally:
        cls.forward = stock
    return wrapped


def unbind(cls: type) -> str | None:
    """Give a class its stock forward back. Returns why the class attribute was left, or None."""
    binding = _bindings.get(cls)
    if binding is None or not binding.bound:
        return None
    # An instance may hold the dispatcher as an attribute of its own: unbound, it only ever calls stock.
    binding.bound, binding.mode = False, OFF
    for name, function in binding.attached.items():
        if cls.__dict__.get(name) is function:
            delattr(cls, name)
    binding.attached.clear()
    if cls.__dict__["forward"] is not binding.dispatcher:
        return f"{cls.__name__}.forward was replaced by someone else after the overlay; it still calls stock through us"
    cls.forward = binding.stock  # type: ignore[attr-defined]
    return None


def attach(cls: type, name: str, function: Forward) -> None:
    """Set a method that the stock class only inherits, to be taken away again by `unbind`."""
    binding = _bindings[cls]
    if name not in cls.__dict__:
        setattr(cls, name, function)
        binding.attached[name] = function


def bindings() -> Iterator[Binding]:
    """Every binding that is in force."""
    return (binding for binding in _bindings.values() if binding.bound)


def binding_of(module: object) -> Binding | None:
    """The binding that could serve this instance, whatever its mode."""
    binding = _bindings.get(type(module))
    return binding if binding is not None and binding.bound else None


def last_binding_of(module: object) -> Binding | None:
    """The same, also after it was taken out of force."""
    return _bindings.get(type(module))


def set_mode(module: Any, mode: str | None) -> None:
    """Set one instance's mode; None gives it back to its class's."""
    if mode is None:
        module.__dict__.pop(MODE, None)
    else:
        module.__dict__[MODE] = mode


def mode_of(module: Any) -> str:
    """The mode that this instance runs in: its own, else its class's; `off` if nothing is bound."""
    binding = binding_of(module)
    if binding is None:
        return OFF
    mode: str = module.__dict__.get(MODE, binding.mode)
    return mode
