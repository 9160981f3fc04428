"""The dispatcher: a `forward` set on a stock class that runs the overlay's forward or the stock one, per instance.

No class is replaced, subclassed or rebound. So class tables, `isinstance`, pickles and remote code that subclasses a
stock class keep working, and overlays can be switched on and off in a model that is already loaded.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hf_rocm
from hf_rocm import patches
from hf_rocm.errors import OptionError
from hf_rocm.patches import Change

Forward = Callable[..., Any]

# The mode of a binding. A module's own mode overrides that of its class. OFF: always stock. GPU: the overlay for inputs
# on a GPU, stock for inputs on the CPU; this is the mode under ROCm. ON: the overlay for inputs on any device; this is
# the mode with force.
OFF = "off"
GPU = "gpu"
ON = "on"

# A plain string in the module's __dict__: it is copied and pickled, but is not part of a state dict.
MODE = "_hf_rocm_mode"

# Prefixes of the names of modules in which overlay text runs: stock modules, and the modules that `activate` creates.
_OVERLAYS = ("transformers.models.", "hf_rocm._active.")

# Packages whose decorators stock forwards may have.
_DECORATED_BY = ("transformers", "torch", "kernels")

# The argument that lets a function fuse the preceding norm and the following residual sum (hf_rocm.layers).
FUSED = "fused"

# All bindings, including those of classes that are no longer bound.
bindings_by_class: dict[type, Binding] = {}
_bindings = bindings_by_class

# Classes that had another library's forward when their overlay ran. `bind_waiting` binds them if they have the stock
# forward again.
waiting: dict[type, tuple[dict[str, Any], Callable[[], None]]] = {}


class Binding:
    """One stock class and the forward that serves it.

    Not a dataclass, to keep the import of this file short: every process that imports an installed overlay imports it.
    """

    mode = OFF

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
        """old_name: whether stock, unlike the replacement, calls the cache `past_key_value` (transformers < 4.56)."""
        self.cls, self.stock, self.replacement = cls, stock, replacement
        self.fuses, self.experts, self.first, self.old_name = fuses, experts, first, old_name
        # The declared layer, if the replacement is its forward.
        self.layer: object = None
        # The namespace of the overlay's text.
        self.home: dict[str, Any] = {}
        # The stock names of arguments that a declared layer takes by position.
        self.places: tuple[str, ...] = ()
        # Whether the replacement has the argument `fused`.
        self.takes_fused = False
        # A block that binds nothing does not need these modules.
        from hf_rocm.overlay.dependencies import of_function
        from hf_rocm.overlay.replacements import Watch

        dependencies = of_function(stock, cls)
        self.registries = dependencies.registries
        # Methods that stock calls and that an instance may override.
        self.methods = dependencies.methods
        self.watch = Watch(dependencies.references) if dependencies.references else None
        self.change = Change(cls, "forward", partial(_dispatcher, self))
        self.dispatcher: Forward = self.change.replacement

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """Return self, because accelerate's wrapper has the binding as an attribute and is copied with its module."""
        return self

    @property
    def bound(self) -> bool:
        """Whether the class is bound. It stays bound until `unbind`, even if another library wraps its forward."""
        return self.change.live

    @property
    def model(self) -> str:
        """The overlay's name: the folder of the stock file (`llama` for `…models.llama.modeling_llama`)."""
        return self.cls.__module__.split(".")[-2]


def wanted(module_name: str) -> bool:
    """Whether the overlay text that is being imported as `module_name` should bind its classes.

    True when activated in memory. An installed block binds under ROCm or with `HF_ROCM_FORCE=1`, if this release of
    hf-rocm wrote it. With `HF_ROCM_AUTO=1`, such a block also switches on `auto_prepare`. Reads
    `torch.version.hip` and the environment, touches no device, and never raises: an installed block must not break the
    import of a stock module.
    """
    from hf_rocm import options

    if module_name.startswith("hf_rocm."):
        return True
    if not module_name.startswith("transformers.models."):
        # The overlay does not apply to a copy of the file under another name.
        return False
    try:
        forced, automatic = options.force_requested(), options.auto_requested()
    except OptionError as error:
        warnings.warn(f"hf_rocm: {error.message}; models with this overlay stay stock", RuntimeWarning, stacklevel=2)
        return False
    torch = sys.modules.get("torch")
    if not forced and getattr(getattr(torch, "version", None), "hip", None) is None:
        return False
    current = _block_is_current(module_name)
    if current and automatic:
        hf_rocm._prepare_from_block()
    return current


def _block_is_current(module_name: str) -> bool:
    from hf_rocm import __version__

    written_by = vars(sys.modules.get(module_name, sys)).get("__hf_rocm_block__", __version__)
    if written_by == __version__:
        return True
    warnings.warn(
        f"hf_rocm: the overlay block in {module_name} was written by hf-rocm {written_by}, but {__version__} is "
        "imported; the model stays stock. Run `hf-rocm install-overlays` to update the block",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def replaces(cls: type, *, fuses: tuple[str, ...] = (), experts: tuple[str, ...] = ()) -> Callable[[Forward], Forward]:
    """Bind the decorated `function(self, stock, *args, **kwargs)` to a stock class.

    stock is the class's own forward with all of its decorators: call `stock(self, …)` for every call that the function
    does not serve. fuses: the linear layers, in order, whose weights the loader may fuse into one. experts, for a class
    with a list of experts: the names of an expert's gate, up and down layers and of its activation, which the loader
    may stack. If the function takes `past_key_values` and stock takes `past_key_value`, as in older releases, the
    cache is passed under the function's name; pass it to stock by position.
    """

    # The overlay's namespace, even if the decorated function is wrapped.
    home = sys._getframe(1).f_globals

    def bind(function: Forward) -> Forward:
        bind_to(cls, function, home=home, fuses=fuses, experts=experts)
        return function

    return bind


def bind_to(
    cls: type,
    function: Forward,
    *,
    home: dict[str, Any],
    fuses: tuple[str, ...] = (),
    experts: tuple[str, ...] = (),
    layer: object = None,
) -> None:
    """Bind a function of the overlay with the namespace `home`; see `replaces`.

    layer: the declared layer, if the function is its forward.
    """
    if home["__name__"].startswith(_OVERLAYS) and not _stock(cls):
        # a forward that another library or the user set takes precedence
        waiting[cls] = home, partial(bind_to, cls, function, home=home, fuses=fuses, experts=experts, layer=layer)
        return
    waiting.pop(cls, None)
    binding = _bindings.get(cls)
    if binding is None:
        stock = cls.__dict__["forward"]
        names = list(inspect.signature(stock).parameters)
        renamed = "past_key_values" in _parameters(function)
        first, old_name = names[1] if len(names) > 1 else "", renamed and "past_key_value" in names
        binding = _bindings[cls] = Binding(cls, stock, function, fuses, first, experts, old_name)
    # An overlay that is activated again reuses its dispatcher, which instances may still have as an attribute.
    binding.replacement, binding.fuses, binding.experts = function, fuses, experts
    binding.layer, binding.home, binding.places = layer, home, ()
    binding.takes_fused = FUSED in _parameters(function)
    if layer is not None:
        # The parameters after self, module and stock.
        taken = [name for name in _parameters(function)[3:] if name != FUSED]
        binding.places = tuple(inspect.signature(binding.stock).parameters)[1 : 1 + len(taken)]
    if not isinstance(home.get("__hf_rocm_activation__"), str):
        binding.mode = installed_mode()
    patches.apply(binding.change, user=binding)


def _parameters(function: Forward) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _stock(cls: type) -> bool:
    """Whether a class is transformers' own, and its current forward is stock or a dispatcher.

    A stock name may refer to another library's class, as with apex's norm in some files, and libraries may set their
    own forward on a stock class. `__globals__` identifies a wrapper, because functools.wraps hides its `__module__`.
    """
    forward = cls.__dict__.get("forward")
    written = getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0]
    bound = getattr(forward, "__hf_rocm_binding__", None) is not None
    return cls.__module__.startswith("transformers.") and (bound or written in _DECORATED_BY)


def installed_mode() -> str:
    """The mode of installed blocks on this machine: `ON` if forced, else `GPU`."""
    from hf_rocm import options

    return ON if options.force_requested() else GPU


def _dispatcher(binding: Binding, change: Change) -> Forward:
    # The stock file has already imported torch.
    tracing = vars(sys.modules["torch._C"])["_get_tracing_state"]
    cls, stock, first, old_name = binding.cls, binding.stock, binding.first, binding.old_name

    # wraps keeps the signature, which kernels, generate and Trainer read
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = self.__dict__.get(MODE, binding.mode)
        if mode == OFF or type(self) is not cls or not change.live:
            return stock(self, *args, **kwargs)
        # torch.jit.trace turns sizes into tensors and branches into constants.
        if tracing() is not None:
            return stock(self, *args, **kwargs)
        if mode == GPU and not getattr(args[0] if args else kwargs.get(first), "is_cuda", False):
            return stock(self, *args, **kwargs)
        watch = binding.watch
        if watch is not None and not watch.unchanged() and not watch.holds():
            return stock(self, *args, **kwargs)
        if binding.methods and not binding.methods.isdisjoint(self.__dict__):
            return stock(self, *args, **kwargs)
        if old_name and "past_key_value" in kwargs:
            kwargs["past_key_values"] = kwargs.pop("past_key_value")
        if len(args) < len(binding.places):
            args += tuple([kwargs.pop(name) for name in binding.places[len(args) :] if name in kwargs])
        return binding.replacement(self, stock, *args, **kwargs)

    forward.__hf_rocm_binding__ = binding  # type: ignore[attr-defined]
    return _checkpointed(cls, stock, forward)


def _checkpointed(cls: Any, stock: Forward, forward: Forward) -> Forward:
    """Wrap the dispatcher for gradient checkpointing, as transformers wraps forwards from 5.21 on.

    transformers' wrapper only works as the class's own attribute, so the dispatcher has to be wrapped again.
    """
    if getattr(getattr(stock, "__code__", None), "co_name", "") != "forward_with_checkpointing":
        return forward
    base = next(parent for parent in cls.__mro__[1:] if "__init_subclass__" in parent.__dict__)
    wrapped: Forward = type(cls.__name__, (base,), {"forward": forward}).__dict__["forward"]
    return wrapped


def bind_waiting() -> None:
    """Bind the classes that had another library's forward when their overlay ran and have the stock forward now.

    Overlays without a bound class are skipped.
    """
    homes = {id(binding.home) for binding in bindings()}
    for cls, (home, bind) in list(waiting.items()):
        if id(home) in homes and _stock(cls):
            bind()


def refused(cls: type) -> str | None:
    """Return the reason if replaced code makes all instances of a class with an overlay run stock, else None."""
    if cls in waiting:
        from hf_rocm.overlay.replacements import origin

        if _stock(cls):
            return f"{cls.__name__}.forward was replaced when the model was prepared; call `hf_rocm.prepare` again"
        return f"{cls.__name__}.forward was replaced by {origin(vars(cls)['forward'])}"
    binding = _bindings.get(cls)
    return None if binding is None or binding.watch is None or not binding.change.live else binding.watch.difference()


def unbind(cls: type) -> str | None:
    """Restore a class's stock forward. Returns the reason if the class attribute was left unchanged, else None."""
    binding = _bindings.get(cls)
    if binding is None or not binding.bound:
        return None
    # An instance may have the dispatcher as an attribute, which then only calls stock.
    binding.mode = OFF
    if binding.change in patches.release(binding):
        return f"{cls.__name__}.forward was replaced by other code later; hf_rocm's wrapper now only calls stock"
    return None


def attach(cls: type, name: str, function: Forward) -> None:
    """Set a method on a bound class; `unbind` removes it. Does nothing if the class itself defines the method."""

    def make(change: Change) -> Forward:
        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs) if change.live else change.call_of(self)(*args, **kwargs)

        return method

    if name not in cls.__dict__:
        patches.apply(Change(cls, name, make, key="attached"), user=_bindings[cls])


def bindings() -> Iterator[Binding]:
    """All current bindings."""
    return (binding for binding in _bindings.values() if binding.change.live)


def binding_of(module: object) -> Binding | None:
    """The current binding of this instance's class, whatever its mode; None if the class is not bound."""
    binding = _bindings.get(type(module))
    return binding if binding is not None and binding.change.live else None


def last_binding_of(module: object) -> Binding | None:
    """The binding of this instance's class, even if the class is no longer bound."""
    return _bindings.get(type(module))


def set_mode(module: Any, mode: str | None) -> None:
    """Set one instance's mode; None removes it, so that the mode of its class applies."""
    if mode is None:
        module.__dict__.pop(MODE, None)
    else:
        module.__dict__[MODE] = mode


def mode_of(module: Any) -> str:
    """The mode of this instance, or else of its class; `off` if the class is not bound."""
    binding = binding_of(module)
    if binding is None:
        return OFF
    mode: str = module.__dict__.get(MODE, binding.mode)
    return mode
