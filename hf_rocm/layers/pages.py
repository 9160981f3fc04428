"""Attention with transformers' paged cache (continuous batching), for layers of overlays.

The layer computes projections, norms and rotary embeddings. transformers' own function for the selected implementation
then writes to the pages and computes attention, with the arguments that the stock layer would pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# The argument with which continuous batching passes its cache to attention layers.
CACHE = "cache"


def is_flash(implementation: object) -> bool:
    """Return whether the selected implementation is a kind of flash attention."""
    return isinstance(implementation, str) and "flash" in implementation


@dataclass(frozen=True, eq=False)
class Pages:
    """The paged attention of one layer call, for the packed tokens of a batch of requests.

    module: the attention layer. arguments: the keyword arguments of its call. window: its sliding window.
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    window: int | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write key and value into the pages, and return the attention of each request's queries.

        query: [1, H, T, D]; key: [1, Hkv, T, D]; value: [1, Hkv, T, D_v]. Returns [1, T, H, D_v].
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config: Any = self.module.config
        terms = {"sliding_window": self.window, "softcap": softcap, "s_aux": sinks}
        output: Tensor = ALL_ATTENTION_FUNCTIONS[config._attn_implementation](
            self.module,
            query,
            key,
            value,
            None,
            dropout=0.0,
            scaling=scale,
            **{name: term for name, term in terms.items() if term is not None},
            **self.arguments,
        )[0]
        return output if output.ndim == 4 else output.unsqueeze(0)  # [T, H, D_v] before transformers 5.19
