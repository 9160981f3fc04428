"""Collective operations of the benchmark, and their cost. All ranks must call every method together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import timed
from hf_rocm.tools.bench.roofline import local
from hf_rocm.tools.bench.scaling import Exchange

# Bytes of an all-reduce that is limited by bandwidth on GPUs.
LARGE = 2**26


class Peers:
    """The ranks of the default process group, each with one device of this type."""

    def __init__(self, world: int, device: torch.device) -> None:
        self.world, self.device = world, device

    def slowest(self, value: float) -> float:
        """Return the maximum over all ranks."""
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest.item())

    def differing(self, tokens: Tensor) -> list[int]:
        """Return the ranks whose tokens differ from those of rank 0."""
        gathered = [torch.empty_like(tokens) for _ in range(self.world)]
        dist.all_gather(gathered, tokens.contiguous())
        return [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]

    def sum_seconds(self, message: Tensor, *, calls: int = 10, tries: int = 5) -> float:
        """Return the seconds per all-reduce in a sequence of `calls`: the best of `tries`, on the slowest rank."""

        def repeat() -> None:
            for _ in range(calls):
                dist.all_reduce(message)

        repeat()
        return min(self.slowest(timed(repeat, self.device)) for _ in range(tries)) / calls

    def wire(self) -> float:
        """Return the bytes per second that each rank sends in a large all-reduce."""
        size = LARGE if self.device.type == "cuda" else LARGE // 16
        share = 2 * (self.world - 1) / self.world
        return share * size / self.sum_seconds(torch.zeros(size // 4, device=self.device))

    def facts(self, exchange: Exchange, case: Case) -> dict[str, Any]:
        """Return the computed collectives of a decode step or a prefill, and the measured time of one all-reduce."""
        message = torch.zeros(max(1, exchange.message // 4), dtype=torch.float32, device=self.device)
        return {
            "sums": exchange.sums,
            "message": exchange.message,
            "gathered": exchange.gathered,
            "sent": exchange.sent,
            "sent_per_token": exchange.sent / _tokens(case),
            "sum_microseconds": 1e6 * self.sum_seconds(message),
        }

    def interconnect(self) -> dict[str, Any]:
        """Describe the interconnect. apart: the pairs of GPUs without peer access to each other's memory."""
        if self.device.type != "cuda":
            return {"backend": "gloo"}
        pairs = [(one, other) for other in range(self.world) for one in range(other)]
        unreachable = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return {"backend": f"{'RCCL' if torch.version.hip else 'NCCL'} {version}", "apart": unreachable}


def exchanged(model: Any, case: Case, ranks: int) -> Exchange:
    """Return the collectives of a decode step or a prefill, which depend on what the installed transformers shards."""
    config = model.config.get_text_config()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    divided = [local(parameter).shape[0] < config.vocab_size for parameter in (table, head)]
    item = table.element_size()
    return Exchange(
        ranks,
        2 * config.num_hidden_layers + int(divided[0]),
        _tokens(case) * config.hidden_size * item,
        case.batch * config.vocab_size * item if divided[1] else 0,
    )


def _tokens(case: Case) -> int:
    return case.batch * (1 if case.kind == "decode" else case.prompt)
