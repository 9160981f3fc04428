"""Quantised checkpoints of a shape with random packed numbers, to measure the speed of each format.

All layers have the same numbers, because the speed does not depend on them. Scales are chosen so that weights preserve
the magnitude of their input, as in `shapes.build`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.four_bit import CODES, E2M1, PER_FACTOR
from hf_rocm.tools.bench.shapes import architecture, default_dtype, deviation

Tensors = dict[str, Tensor]

INDEX = "model.safetensors.index.json"
BLOCK, MXFP4_BLOCK = 128, 32
# The standard deviations of the random numbers.
_FP8_SPREAD, _INT8_SPREAD = 64.0, 73.0
_INT4_SPREAD = math.sqrt((16**2 - 1) / 12)
# Eight zero points of 8, which GPTQ stores as 7.
_EIGHTS = 0x77777777


@dataclass(frozen=True)
class Packed:
    """A format. layer: draws the tensors of a weight [N, K]. config: returns the `quantization_config`.

    The last argument of both is the number of columns per group. experts: whether the format is for stacked experts
    [E, K, N]; then `layer` is called with E, N and K, and its names are appended to the parameter's name.
    """

    layer: Callable[..., Tensors]
    config: Callable[[int], dict[str, Any]]
    experts: bool = False

    def packs(self, path: str, parameter: Tensor) -> bool:
        """Whether this parameter of a model is stored in the format."""
        if self.experts:
            return parameter.dim() == 3
        return ".layers." in path and parameter.dim() == 2 and path.endswith("_proj.weight")


def write(
    folder: Path,
    name: str,
    shape: str,
    *,
    group: int = 128,
    layers: int | None = None,
    device: torch.device | None = None,
    **settings: Any,
) -> int:
    """Write a checkpoint of a shape in a format of `FORMATS`. Returns the number of bytes of its packed tensors.

    group: columns per group, for formats that support any group size. device: where the random numbers are generated.
    settings: values of the config that override those of the shape. Tensors that are not packed are bf16.
    """
    packed, dtype = FORMATS[name], torch.bfloat16
    cls, config = architecture(shape, layers=layers, **settings)
    with default_dtype(dtype), torch.device("meta"):
        model = cls(config)
        model.tie_weights()
    torch.manual_seed(0)
    files: dict[str, Tensors] = defaultdict(dict)
    drawn: dict[str, Tensors] = {}
    nbytes = 0
    with torch.device(device or "cpu"):
        for path, parameter in model.named_parameters():
            outer, _, inner = path.partition(".layers.")
            number, _, inner = inner.partition(".")
            key = inner or outer
            is_packed = packed.packs(path, parameter)
            if key not in drawn:
                tensors = _packed(packed, path, parameter, group) if is_packed else {"": _plain(path, parameter, dtype)}
                drawn[key] = {part: tensor.cpu().contiguous() for part, tensor in tensors.items()}
            prefix = path.removesuffix("weight") if is_packed and not packed.experts else path
            files[number or "other"] |= {prefix + part: tensor for part, tensor in drawn[key].items()}
            nbytes += sum(tensor.nbytes for tensor in drawn[key].values()) if is_packed else 0
    facts = {"architectures": [cls.__name__], "quantization_config": packed.config(group)}
    # transformers before 4.56 reads the second name.
    facts |= dict.fromkeys(("dtype", "torch_dtype"), "bfloat16")
    _save(folder, files, {**config.to_dict(), **facts})
    return nbytes


def _save(folder: Path, files: dict[str, Tensors], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in files.items():
        file = f"model-{number}.safetensors"
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")


def _packed(packed: Packed, path: str, parameter: Tensor, group: int) -> Tensors:
    if not packed.experts:
        return packed.layer(*parameter.shape, group)
    experts, k, n = parameter.shape
    return packed.layer(experts, n, k, group)


def _plain(path: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    shape = parameter.shape
    if len(shape) > 1:
        return torch.randn(shape, dtype=dtype) * deviation(shape[-1])
    return torch.full(shape, float("norm" in path), dtype=dtype)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def _words(*shape: int) -> Tensor:
    """Random 4-bit numbers, eight per word. shape: the dims of the result, in words."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _scales(size: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random scales between 0.5 and 1.5 times this size."""
    return (size * (0.5 + torch.rand(shape))).to(dtype)


def awq(n: int, k: int, group: int) -> Tensors:
    # The standard deviation of a number minus its zero point.
    spread = math.sqrt(2) * _INT4_SPREAD
    return {
        "qweight": _words(k, n // 8),
        "qzeros": _words(-(-k // group), n // 8),
        "scales": _scales(deviation(k) / spread, -(-k // group), n, dtype=torch.float16),
    }


def gptq(n: int, k: int, group: int, *, by_activation: bool = False) -> Tensors:
    """by_activation: the columns of a group are not contiguous. Their order is the same in all layers with this K."""
    groups = torch.arange(k, dtype=torch.int32) // group
    if by_activation:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k), device="cpu").to(groups.device)]
    return {
        "qweight": _words(k // 8, n),
        "qzeros": torch.full((-(-k // group), n // 8), _EIGHTS, dtype=torch.int32),
        "scales": _scales(deviation(k) / _INT4_SPREAD, -(-k // group), n, dtype=torch.float16),
        "g_idx": groups,
    }


def gptq_by_activation(n: int, k: int, group: int) -> Tensors:
    return gptq(n, k, group, by_activation=True)


def bitsandbytes(code: str, *, double: bool = False) -> Callable[[int, int, int], Tensors]:
    """4-bit weights in blocks of 64. double: with double quantisation, which rounds the blocks' scales to 8 bits."""

    def layer(n: int, k: int, group: int) -> Tensors:
        count, numbers = n * k // 64, torch.tensor(CODES[code])
        size = deviation(k) / numbers.square().mean().sqrt().item()
        state = {"quant_type": code, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
        scales: Tensors = {"weight.absmax": _scales(size, count)}
        if double:
            state |= {"nested_blocksize": PER_FACTOR, "nested_dtype": "float32", "nested_offset": size}
            scales = {
                "weight.absmax": _bytes(count),
                "weight.nested_absmax": torch.full((-(-count // PER_FACTOR),), size / 2),
                "weight.nested_quant_map": torch.linspace(-1, 1, 256),
            }
        return {
            "weight": _bytes(n * k // 2, 1),
            **scales,
            "weight.quant_map": numbers,
            f"weight.quant_state.bitsandbytes__{code}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }

    return layer


def fp8_blocks(n: int, k: int, group: int) -> Tensors:
    return {
        "weight": (_FP8_SPREAD * torch.randn(n, k)).clamp(-448, 448).to(torch.float8_e4m3fn),
        "weight_scale_inv": _scales(deviation(k) / _FP8_SPREAD, -(-n // BLOCK), -(-k // BLOCK)),
    }


def fp8_rows(n: int, k: int, group: int) -> Tensors:
    scale = _scales(deviation(k) / _FP8_SPREAD, n, 1, dtype=torch.bfloat16)
    return {"weight": fp8_blocks(n, k, group)["weight"], "weight_scale": scale}


def int8_rows(n: int, k: int, group: int) -> Tensors:
    scale = _scales(deviation(k) / _INT8_SPREAD, n, 1, dtype=torch.bfloat16)
    return {"weight": torch.randint(-127, 128, (n, k), dtype=torch.int8), "weight_scale": scale}


def int4_groups(n: int, k: int, group: int) -> Tensors:
    return {
        "weight_packed": _words(n, k // 8),
        "weight_scale": _scales(deviation(k) / _INT4_SPREAD, n, -(-k // group), dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }


def mxfp4(n: int, k: int, group: int) -> Tensors:
    return {"weight_packed": _bytes(n, k // 2), "weight_scale": _powers(k, n, k // MXFP4_BLOCK)}


def mxfp4_experts(experts: int, n: int, k: int, group: int) -> Tensors:
    shape = experts, n, k // MXFP4_BLOCK
    return {"_blocks": _bytes(*shape, MXFP4_BLOCK // 2), "_scales": _powers(k, *shape)}


def _powers(k: int, *shape: int) -> Tensor:
    """Random scales of MXFP4, as biased exponents."""
    spread = torch.tensor(CODES[E2M1]).square().mean().sqrt().item()
    exponent = 127 + round(math.log2(deviation(k) / spread))
    return torch.randint(exponent - 1, exponent + 1, shape, dtype=torch.uint8)


def _compressed(format: str, *, per_token: str | None = None, **weights: Any) -> Callable[[int], dict[str, Any]]:
    """The config of compressed-tensors. per_token: the type of the activations, if they are quantised."""

    def config(group: int) -> dict[str, Any]:
        sized = {"group_size": group} if weights["strategy"] == "group" else {}
        inputs = {"num_bits": 8, "type": per_token, "strategy": "token", "dynamic": True, "symmetric": True}
        scheme = {
            "targets": ["Linear"],
            "weights": {"symmetric": True, "dynamic": False, **sized, **weights},
            "input_activations": None if per_token is None else inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
        }

    return config


def _awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


def _gptq_config(by_activation: bool) -> Callable[[int], dict[str, Any]]:
    def config(group: int) -> dict[str, Any]:
        sizes = {"bits": 4, "group_size": group, "sym": True, "desc_act": by_activation}
        return {"quant_method": "gptq", "checkpoint_format": "gptq", **sizes}

    return config


def _bitsandbytes_config(code: str, *, double: bool = False) -> Callable[[int], dict[str, Any]]:
    def config(group: int) -> dict[str, Any]:
        further = {"bnb_4bit_quant_type": code, "bnb_4bit_use_double_quant": double}
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, **further}

    return config


def _finegrained_config(group: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def _mxfp4_config(group: int) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


_ROWS = {"num_bits": 8, "strategy": "channel"}
FORMATS = {
    "awq": Packed(awq, _awq_config),
    "gptq": Packed(gptq, _gptq_config(False)),
    "gptq-desc_act": Packed(gptq_by_activation, _gptq_config(True)),
    "ct-int4": Packed(int4_groups, _compressed("pack-quantized", num_bits=4, type="int", strategy="group")),
    "nf4": Packed(bitsandbytes("nf4"), _bitsandbytes_config("nf4")),
    "nf4-double": Packed(bitsandbytes("nf4", double=True), _bitsandbytes_config("nf4", double=True)),
    "fp4": Packed(bitsandbytes("fp4"), _bitsandbytes_config("fp4")),
    "ct-mxfp4": Packed(
        mxfp4, lambda _: _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group")(MXFP4_BLOCK)
    ),
    "fp8-blocks": Packed(fp8_blocks, _finegrained_config),
    "ct-fp8": Packed(fp8_rows, _compressed("float-quantized", per_token="float", type="float", **_ROWS)),
    "ct-int8": Packed(int8_rows, _compressed("int-quantized", per_token="int", type="int", **_ROWS)),
    "gpt-oss": Packed(mxfp4_experts, _mxfp4_config, experts=True),
}
