"""The quantiser and the quantisation config that replace transformers' own while one checkpoint is loaded.

transformers' quantisers would dequantise these checkpoints, convert their tensors or require other packages. This one
only replaces the layers: transformers then copies the checkpoint's tensors like any others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from transformers import __version__
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_rocm.errors import LoadError
from hf_rocm.loading import safetensors_headers, stored_layers
from hf_rocm.loading.safetensors_headers import Entry
from hf_rocm.weights.quantize import dequantize
from hf_rocm.weights.stored import StoredFormat, Unsupported
from hf_rocm.weights.stored_linear import StoredLayer


class StoredConfig(QuantizationConfigMixin):
    """A `quantization_config` that is saved as it was read."""

    def __init__(self, given: dict[str, Any], format: StoredFormat) -> None:
        self.given, self.format = copy.deepcopy(given), format
        self.quant_method = given["quant_method"]

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.given)

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def get_loading_attributes(self) -> dict[str, Any]:
        return {}


class StoredQuantizer(HfQuantizer):
    """Replaces the layers of one checkpoint."""

    requires_calibration = True

    def __init__(self, quantization_config: StoredConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self._entries: dict[str, Entry] | None = None

    def read_headers(self, files: Sequence[str] | None) -> None:
        """Read the headers of the checkpoint's files, before the model is created."""
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise Unsupported("its weights are not in safetensors files")
        self._entries = safetensors_headers.read(files)

    def _process_model_before_weight_loading(self, model: Any, **arguments: Any) -> Any:
        if self._entries is None:
            raise Unsupported("the files of its weights are not known")
        devices = arguments.get("device_map")
        if isinstance(devices, dict) and "disk" in devices.values() and Version(__version__) < Version("5"):
            raise Unsupported(
                "parts of it are offloaded to disk, which transformers before 5 does with parameters only"
            )
        stored_layers.replace_layers(model, self.quantization_config.format, self._entries)
        self._entries = None
        return model

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        """Raise `LoadError` if a tensor was converted on the way. Tested releases never do this."""
        for path, layer in model.named_modules():
            for name, tensor in layer.tensors().items() if isinstance(layer, StoredLayer) else ():
                if (tensor.dtype, tuple(tensor.shape)) != tuple(layer.infos[name]):
                    raise LoadError(
                        "transformers changed a tensor of the quantised checkpoint while loading it",
                        facts={"tensor": f"{path}.{name}", "expected": layer.infos[name], "found": tensor.dtype},
                    )
        return model

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        return dtype

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """What `model.dequantize()` calls."""
        dequantize(model)
        return model if dtype is None else model.to(dtype)
