"""The quantiser and the quantisation config that replace transformers' own while one checkpoint is loaded.

transformers' quantisers would dequantise such a checkpoint, convert its tensors or require other packages. The
quantiser here replaces the layers, and transformers then copies the checkpoint's tensors like any others. Only tensors
whose names contain a dot are loaded by the quantiser afterwards.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from transformers import __version__
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_rocm import patches
from hf_rocm.errors import LoadError
from hf_rocm.loading import safetensors_headers, stored_layers
from hf_rocm.loading.safetensors_headers import Entry
from hf_rocm.weights.quantize import dequantize
from hf_rocm.weights.stored import StoredFormat, Unsupported
from hf_rocm.weights.stored_linear import StoredLayer

# the attribute of a model with patterns of unexpected tensor names that transformers does not report
_IGNORED = "_keys_to_ignore_on_load_unexpected"


class StoredConfig(QuantizationConfigMixin):
    """A `quantization_config` that is saved as it was read."""

    def __init__(self, given: dict[str, Any], format: StoredFormat, method: str) -> None:
        self.given, self.format, self.quant_method = copy.deepcopy(given), format, method

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.given)

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def get_loading_attributes(self) -> dict[str, Any]:
        return {}


class StoredQuantizer(HfQuantizer):
    """Replaces those layers of a model whose weights the checkpoint stores in quantised form."""

    requires_calibration = True

    def __init__(self, quantization_config: StoredConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self._entries: dict[str, Entry] | None = None
        self._later: list[stored_layers.Later] = []

    def read_headers(self, files: Sequence[str] | None) -> None:
        """Read the headers of the checkpoint's files, before the model is created.

        Raises `Unsupported` if there are no files or not all are safetensors files, and `LoadError` for a damaged one.
        """
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise Unsupported("its weights are not in safetensors files")
        self._entries = safetensors_headers.read(files)

    def _process_model_before_weight_loading(self, model: Any, **arguments: Any) -> Any:
        if self._entries is None:
            raise Unsupported("the files of its weights could not be determined")
        devices = arguments.get("device_map")
        if isinstance(devices, dict) and "disk" in devices.values() and Version(__version__) < Version("5"):
            raise Unsupported(
                "parts of it are offloaded to disk, which transformers before 5 supports only for parameters"
            )
        self._later = stored_layers.replace_layers(model, self.quantization_config.format, self._entries)
        self._entries = None
        if self._later:
            if (
                isinstance(devices, dict)
                and {"cpu", "disk"} & {str(device) for device in devices.values()}
                and (len(set(devices.values())) > 1)
            ):
                raise Unsupported("parts of it are offloaded, and hooks can't move its tensors because of their names")
            self._ignore_unexpected(model)
        return model

    def _ignore_unexpected(self, model: Any) -> None:
        """Prevent transformers 4.57 and newer from reporting the tensors that are loaded later."""
        known, names = getattr(model, _IGNORED, None), {rf"\.{re.escape(later.name)}$" for later in self._later}
        both = {*known, *names} if isinstance(known, set) else [*(known or ()), *sorted(names)]
        patches.apply(patches.Entry(model.__dict__, _IGNORED, lambda _: both), user=self)

    def update_unexpected_keys(self, model: Any, unexpected_keys: list[str], *prefix: str) -> list[str]:
        """Before transformers 4.57, remove the tensors that are loaded later, so that they are not reported."""
        if hasattr(model, "_adjust_missing_and_unexpected_keys"):
            return unexpected_keys
        names = {later.full for later in self._later}
        return [key for key in unexpected_keys if key not in names]

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        """Load the remaining tensors.

        Raises `LoadError` if transformers changed the dtype or shape of a tensor; no tested release does.
        """
        patches.release(self)
        for later in self._later:
            later.load()
        self._later = []
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
        """Dequantise the layers; called by `model.dequantize()`."""
        dequantize(model)
        return model if dtype is None else model.to(dtype)
