"""The result of `explain` for a model, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_rocm.tools.tuning.coverage import Tuning

# A line of `linears` that only the long form shows, because it is the same for most models.
HEAD = "the output head runs in hf_rocm's kernel for few rows if it serves the call, else in PyTorch"


@dataclass(frozen=True)
class Part:
    """One served class of the model: how many instances run hf_rocm's forward, are fused, or stay stock, and why.

    group: the linear layers that are fused, if any. joined: layers that are already one matrix in the checkpoint.
    gradients: whether the layers run one by one, because gradients are enabled and weights require them. stock_because:
    the reason why the whole class runs stock, such as a replaced function. theirs: the number of instances on which
    another forward was set, which runs instead of hf_rocm's.
    """

    cls: str
    model: str
    # `installed` or `in memory`.
    delivery: str
    instances: int
    active: int
    group: tuple[str, ...] = ()
    fused: int = 0
    # Reason → instances.
    not_fused: dict[str, int] = field(default_factory=dict)
    joined: tuple[str, ...] = ()
    gradients: bool = False
    # Reason at the last call → instances.
    stayed_stock: dict[str, int] = field(default_factory=dict)
    stock_because: str | None = None
    theirs: int = 0


@dataclass(frozen=True)
class Kernel:
    """The kernel of one operation in one situation, and why no faster kernel is used."""

    operation: str
    situation: str
    tier: str
    kernel: str
    # (tier/kernel, reason).
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Stock:
    """One class of modules that stay stock, and why."""

    cls: str
    instances: int
    reason: str


@dataclass(frozen=True, repr=False)
class Facts:
    """The result of `explain` for a model.

    prepared: whether `prepare` has run on the model. linears: sentences about shuffled weights, routes and patch
    embeddings. quantized: which layers are quantised, and their error. decoding, forwards: whether the steps of
    `generate` and other forwards are recorded and replayed, and if not, the reasons. stock: all classes that are not in
    `parts`, except containers. replaced: changes that other code has wrapped or replaced, such as `LlamaMLP.forward`.
    """

    model: str
    state: str
    machine: dict[str, str]
    parts: tuple[Part, ...]
    without_overlay: dict[str, str]
    kernels: tuple[Kernel, ...]
    prepared: bool = False
    tuning: Tuning | None = None
    linears: tuple[str, ...] = ()
    quantized: str | None = None
    # Reason → layers that are not quantised.
    not_quantized: dict[str, int] = field(default_factory=dict)
    decoding: tuple[str, ...] = ()
    forwards: tuple[str, ...] = ()
    stock: tuple[Stock, ...] = ()
    replaced: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
