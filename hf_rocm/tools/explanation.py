"""The result of `explain` for a model, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_rocm.tools.tuning.coverage import Tuning

# A line of `linears` that only the long form shows, because it is the same for most models.
HEAD = "the output head runs in hf_rocm's kernel for few rows if it serves the call, else in PyTorch"


@dataclass(frozen=True)
class Part:
    """One served class of the model: how many instances run hf_rocm's forward, are fused, or stay stock, and why."""

    cls: str
    model: str
    delivery: str  # `installed` or `in memory`
    instances: int
    active: int
    group: tuple[str, ...] = ()  # the linear layers that are fused, if any
    fused: int = 0
    not_fused: dict[str, int] = field(default_factory=dict)  # reason → instances
    joined: tuple[str, ...] = ()  # layers that are already one matrix in the checkpoint
    gradients: bool = False  # whether the layers run one by one, because gradients are enabled and weights require them
    stayed_stock: dict[str, int] = field(default_factory=dict)  # reason at the last call → instances
    stock_because: str | None = None  # the reason why the whole class runs stock, such as a replaced function
    theirs: int = 0  # instances on which another forward was set, which runs instead of hf_rocm's


@dataclass(frozen=True)
class Kernel:
    """The kernel of one operation in one situation, and why no faster kernel is used."""

    operation: str
    situation: str
    tier: str
    kernel: str
    refused: tuple[tuple[str, str], ...]  # (tier/kernel, reason)


@dataclass(frozen=True)
class Stock:
    """One class of modules that stay stock, and why."""

    cls: str
    instances: int
    reason: str


@dataclass(frozen=True, repr=False)
class Facts:
    """The result of `explain` for a model."""

    model: str
    state: str
    machine: dict[str, str]
    parts: tuple[Part, ...]
    without_overlay: dict[str, str]
    kernels: tuple[Kernel, ...]
    prepared: bool = False  # whether `prepare` has run on the model
    tuning: Tuning | None = None
    linears: tuple[str, ...] = ()  # sentences about shuffled weights, routes and patch embeddings
    quantized: str | None = None  # which layers are quantised, and their error
    not_quantized: dict[str, int] = field(default_factory=dict)  # reason → layers that are not quantised
    decoding: tuple[str, ...] = ()  # whether generate's steps are recorded and replayed, and if not, the reasons
    forwards: tuple[str, ...] = ()  # whether other forwards are recorded and replayed, and if not, the reasons
    stock: tuple[Stock, ...] = ()  # all classes that are not in `parts`, except containers
    replaced: tuple[str, ...] = ()  # changes that other code has wrapped or replaced, such as `LlamaMLP.forward`

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
