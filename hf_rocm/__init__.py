"""hf_rocm makes stock Hugging Face transformers fast and correct on AMD GPUs, and can be removed without a trace.

Public names are imported on first use, so `import hf_rocm` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_PUBLIC = {
    "HfRocmError": "hf_rocm.errors",
    "activate": "hf_rocm.overlay.activate",
    "auto_prepare": "hf_rocm.loading.auto",
    "check": "hf_rocm.overlay.check",
    "compile": "hf_rocm.generation.compile",
    "deactivate": "hf_rocm.overlay.activate",
    "dequantize": "hf_rocm.weights.quantize",
    "explain": "hf_rocm.tools.explain",
    "from_pretrained": "hf_rocm.loading.pretrained",
    "gpu_arch": "hf_rocm.device",
    "gpu_available": "hf_rocm.device",
    "is_rocm": "hf_rocm.device",
    "prepare": "hf_rocm.loading.prepare",
    "quantization_loss": "hf_rocm.tools.quality",
    "quantize": "hf_rocm.weights.quantize",
    "random_state_in_capture": "hf_rocm.generation.capture",
    "restore": "hf_rocm.loading.prepare",
    "route_linear": "hf_rocm.weights.linear_routing",
    "routed_linear": "hf_rocm.weights.linear_routing",
    "save_quantized": "hf_rocm.loading.save_quantized",
    "setup_environment": "hf_rocm.environment",
    "verify": "hf_rocm.tools.verify",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from hf_rocm.device import gpu_arch as gpu_arch
    from hf_rocm.device import gpu_available as gpu_available
    from hf_rocm.device import is_rocm as is_rocm
    from hf_rocm.environment import setup_environment as setup_environment
    from hf_rocm.errors import HfRocmError as HfRocmError
    from hf_rocm.generation.capture import random_state_in_capture as random_state_in_capture
    from hf_rocm.generation.compile import compile as compile
    from hf_rocm.loading.auto import auto_prepare as auto_prepare
    from hf_rocm.loading.prepare import prepare as prepare
    from hf_rocm.loading.prepare import restore as restore
    from hf_rocm.loading.pretrained import from_pretrained as from_pretrained
    from hf_rocm.loading.save_quantized import save_quantized as save_quantized
    from hf_rocm.overlay.activate import activate as activate
    from hf_rocm.overlay.activate import deactivate as deactivate
    from hf_rocm.overlay.check import check as check
    from hf_rocm.tools.explain import explain as explain
    from hf_rocm.tools.quality import quantization_loss as quantization_loss
    from hf_rocm.tools.verify import verify as verify
    from hf_rocm.weights.linear_routing import route_linear as route_linear
    from hf_rocm.weights.linear_routing import routed_linear as routed_linear
    from hf_rocm.weights.quantize import dequantize as dequantize
    from hf_rocm.weights.quantize import quantize as quantize


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hf_rocm' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _prepare_from_block() -> None:
    """Switch `auto_prepare` on for `HF_ROCM_AUTO=1`. `overlay.bind` calls this function to avoid an import cycle."""
    from hf_rocm.loading import auto

    auto.switch_on_from_block()
