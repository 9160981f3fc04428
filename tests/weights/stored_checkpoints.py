"""Quantised checkpoints of a small Llama, written according to their formats' specifications with numpy and torch.

Every writer returns the tensors of a layer and the weight that they represent, in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from safetensors.torch import load_file, save_file

from hf_rocm.weights.stored import parsers
from tests.weights import mxfp4_rounding
from tests.weights.models import build

Layer = tuple[dict[str, torch.Tensor], torch.Tensor]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}


class Case(NamedTuple):
    """A format, with the function that writes a weight [N, K], and the `quantization_config` of a checkpoint."""

    name: str
    write: Callable[[torch.Tensor], Layer]
    config: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def rounded(
    weight: torch.Tensor, group: int, dtype: torch.dtype, *, symmetric: bool = True
) -> tuple[numpy.ndarray, torch.Tensor, numpy.ndarray, torch.Tensor]:
    """Returns numbers 0 … 15 [N, K], scales and zero points [N, G], and the dequantised weight.

    group: the number of columns per group, or -1 for one group per row. The last group may have fewer columns.
    """
    n, k = weight.shape
    size = k if group == -1 else group
    values = numpy.pad(weight.double().numpy(), ((0, 0), (0, -k % size))).reshape(n, -1, size)
    if symmetric:
        scale, zero = numpy.abs(values).max(-1) / 7.5, numpy.full(values.shape[:2], 8)
    else:
        low, high = numpy.minimum(values.min(-1), 0), numpy.maximum(values.max(-1), 0)
        scale = (high - low) / 15
        zero = numpy.clip(numpy.round(-low / numpy.where(scale == 0, 1, scale)), 0, 15).astype(numpy.int64)
    stored = torch.from_numpy(scale).to(dtype)
    step = stored.double().numpy()[..., None]
    with numpy.errstate(divide="ignore", invalid="ignore"):
        numbers = numpy.nan_to_num(numpy.round(values / step) + zero[..., None], nan=0, posinf=15, neginf=0)
    levels = numpy.clip(numbers, 0, 15).astype(numpy.int64)
    exact = torch.from_numpy(((levels - zero[..., None]) * step).reshape(n, -1)[:, :k].copy())
    return levels.reshape(n, -1)[:, :k], stored, zero, exact


def words(numbers: numpy.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack the last dim, eight numbers per word. Nibble i of a word contains number `order[i]` of the eight."""
    padded = numpy.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 8)))
    eights = padded.reshape(len(padded), -1, 8)
    packed = sum(
        eights[..., source].astype(numpy.uint64) << numpy.uint64(4 * nibble) for nibble, source in enumerate(order)
    )
    return torch.from_numpy(numpy.asarray(packed).astype(numpy.uint32).view(numpy.int32).copy())


def compressed(group: int, dtype: torch.dtype = torch.bfloat16, *, symmetric: bool = True) -> Case:
    def write(weight: torch.Tensor) -> Layer:
        levels, scale, zero, exact = rounded(weight, group, dtype, symmetric=symmetric)
        tensors = {
            "weight_packed": words(levels),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zero.T).t()
        return tensors, exact

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, **strategy}
    return Case(f"pack-quantized {group} {symmetric}", write, config("pack-quantized", weights))


def mxfp4() -> Case:
    def write(weight: torch.Tensor) -> Layer:
        blocks, scales, exact = mxfp4_rounding.rounded(weight)
        return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, exact

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return Case("mxfp4-pack-quantized", write, config("mxfp4-pack-quantized", weights))


def awq(group: int) -> Case:
    def write(weight: torch.Tensor) -> Layer:
        levels, scale, zero, exact = rounded(weight, group, torch.float16, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(levels.T, order), "qzeros": words(zero.T, order), "scales": scale.t()}, exact

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Case(f"awq {group}", write, {**settings, "modules_to_not_convert": None})


def gptq(group: int, *, symmetric: bool = True, by_activation: bool = False, version: str = "gptq") -> Case:
    """by_activation: `desc_act`, with a different column order for every width."""

    def write(weight: torch.Tensor) -> Layer:
        n, k = weight.shape
        order = numpy.random.default_rng(k).permutation(k) if by_activation else numpy.arange(k)
        sorted_levels, scale, zero, sorted_exact = rounded(weight[:, order], group, torch.float16, symmetric=symmetric)
        levels, exact = numpy.empty_like(sorted_levels), torch.empty_like(sorted_exact)
        groups = numpy.empty(k, dtype=numpy.int32)
        levels[:, order], exact[:, order] = sorted_levels, sorted_exact
        groups[order] = numpy.arange(k) // (k if group == -1 else group)
        stored = (zero - 1) % 16 if version == "gptq" else zero
        # A zero point of 0 is stored as 15, which is read as 16.
        if version == "gptq":
            exact -= torch.from_numpy(numpy.where(zero == 0, 16, 0)[:, groups]) * scale.double()[:, groups]
        return {
            "qweight": words(levels.T.reshape(k, n).T).t(),
            "qzeros": words(stored.T),
            "scales": scale.t(),
            "g_idx": torch.from_numpy(groups),
        }, exact

    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": by_activation}
    return Case(f"{version} {group} {symmetric} {by_activation}", write, {**settings, "checkpoint_format": version})


def eight_bits(format: str, number_type: str, strategy: str, *, dynamic: bool | None = None) -> Case:
    """dynamic: whether the activations' scales are dynamic, or None if only weights are quantised."""

    def write(weight: torch.Tensor) -> Layer:
        wide = weight.double()
        top = wide.abs().amax(1, keepdim=True) if strategy == "channel" else wide.abs().max().reshape(1)
        scale = (top / (127 if number_type == "int" else 448)).clamp(min=2.0**-100).bfloat16()
        levels = wide / scale.double()
        data = levels.round().clamp(-128, 127).to(torch.int8) if number_type == "int" else fp8(levels)
        tensors = {"weight": data, "weight_scale": scale}
        if dynamic is False:
            tensors["input_scale"] = torch.tensor([0.125], dtype=torch.bfloat16)
        return tensors, data.double() * scale.double()

    inputs = None
    if dynamic is not None:
        inputs = {"num_bits": 8, "type": number_type, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    weights = {"num_bits": 8, "type": number_type, "strategy": strategy}
    return Case(f"{format} {number_type} {strategy} {dynamic}", write, config(format, weights, inputs))


def finegrained(strategy: str = "block", dtype: torch.dtype = torch.float32, *, static: bool = False) -> Case:
    """fp8 as transformers and DeepSeek write it, with one scale per block of 128 × 128, or per tensor."""

    def write(weight: torch.Tensor) -> Layer:
        wide, size = weight.double(), 128 if strategy == "block" else max(weight.shape)
        data, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(wide)
        scale = torch.empty(-(-weight.shape[0] // size), -(-weight.shape[1] // size), dtype=dtype)
        for i, j in numpy.ndindex(*scale.shape):
            place = slice(size * i, size * (i + 1)), slice(size * j, size * (j + 1))
            scale[i, j] = (wide[place].abs().max() / 448).clamp(min=2.0**-100)
            data[place] = fp8(wide[place] / scale[i, j].double())
            exact[place] = data[place].double() * scale[i, j].double()
        tensors = {"weight": data, "weight_scale_inv": scale if strategy == "block" else scale[0, 0]}
        if static:
            tensors["activation_scale"] = torch.tensor(0.125, dtype=dtype)
        return tensors, exact

    settings = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    more = {"weight_block_size": [128, 128] if strategy == "block" else None, "modules_to_not_convert": ["lm_head"]}
    return Case(f"fp8 {strategy} {dtype} {'None' if strategy == 'block' else static}", write, {**settings, **more})


def bitsandbytes(code: str, size: int = 64, *, double: bool = False) -> Case:
    """nf4 or fp4 in blocks of the flattened weight. The last block may be smaller. double: whether scales are 8-bit."""

    def write(weight: torch.Tensor) -> Layer:
        flat = weight.double().flatten()
        count = -(-len(flat) // size)
        blocks = torch.cat([flat, flat.new_zeros(count * size - len(flat))]).view(count, size)
        absmax = blocks.abs().amax(1).float()
        state: dict[str, Any] = {"quant_type": code, "blocksize": size, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        more, stored = {}, absmax
        if double:
            offset, table = absmax.mean(), torch.linspace(-0.99, 1, 256)
            outer = torch.stack([part.abs().max() for part in (absmax - offset).split(256)]).clamp(min=2.0**-100)
            factors = outer.repeat_interleave(256)[:count]
            stored = ((absmax - offset) / factors)[:, None].sub(table).abs().argmin(1).to(torch.uint8)
            absmax = table[stored.long()] * factors + offset
            more = {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        numbers = torch.tensor(CODES[code]).double()
        wide = absmax.double()[:, None]
        levels = (blocks / torch.where(wide == 0, 1, wide))[..., None].sub(numbers).abs().argmin(-1)
        exact = (numbers[levels] * wide).flatten()[: len(flat)].view(weight.shape)
        pairs = levels.flatten()[: -(-len(flat) // 2) * 2].view(-1, 2).to(torch.uint8)
        return {
            "weight": (pairs[:, :1] << 4) | pairs[:, 1:],
            "weight.absmax": stored,
            "weight.quant_map": torch.tensor(CODES[code]),
            f"weight.quant_state.bitsandbytes__{code}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
            **more,
        }, exact

    settings = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": code,
        "bnb_4bit_use_double_quant": double,
        "llm_int8_threshold": 6.0,
    }
    return Case(f"{code} {size} {double}", write, settings)


def format_of(case: Case, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the format of a layer that has these tensors."""
    method = case.config["quant_method"]
    format = parsers()["bitsandbytes_4bit" if method == "bitsandbytes" else method](case.config)
    return format.completed({name: SimpleNamespace(values=tensor.tolist) for name, tensor in tensors.items()})


# As published in QLoRA (nf4) and in bitsandbytes' functional.get_4bit_type
CODES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * step / 192 for sign in (1, -1) for step in (0, 1, 128, 192, 64, 96, 32, 48)),
}


def fp8(levels: torch.Tensor) -> torch.Tensor:
    return levels.clamp(-448, 448).float().to(torch.float8_e4m3fn)


def config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "actorder": None, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **kwargs,
    }


COMPRESSED = [compressed(group, symmetric=symmetric) for group in (32, 64, 128, -1) for symmetric in (True, False)]
AWQ = [awq(group) for group in (32, 64, 128, -1)]
GPTQ = [
    *(gptq(group) for group in (32, 64, 128, -1)),
    gptq(128, symmetric=False),
    gptq(64, symmetric=False, version="gptq_v2"),
    gptq(128, by_activation=True),
    gptq(32, symmetric=False, by_activation=True),
    gptq(-1, by_activation=True),
]
EIGHT_BITS = [
    eight_bits("int-quantized", "int", "channel", dynamic=True),
    eight_bits("int-quantized", "int", "tensor", dynamic=False),
    eight_bits("naive-quantized", "int", "channel"),
    eight_bits("float-quantized", "float", "channel", dynamic=True),
    eight_bits("float-quantized", "float", "tensor", dynamic=False),
    eight_bits("naive-quantized", "float", "tensor"),
]
FINEGRAINED = [finegrained(), finegrained(dtype=torch.bfloat16), finegrained("tensor", static=True)]
BITSANDBYTES = [
    bitsandbytes("nf4"),
    bitsandbytes("nf4", double=True),
    bitsandbytes("fp4"),
    bitsandbytes("fp4", 128, double=True),
    bitsandbytes("nf4", 128),
]
MXFP4 = mxfp4()
FOUR_BITS = [*COMPRESSED, MXFP4, *AWQ, *GPTQ, *BITSANDBYTES]
CASES = [*FOUR_BITS, *EIGHT_BITS, *FINEGRAINED]
FEW = [COMPRESSED[4], COMPRESSED[3], AWQ[0], GPTQ[4], GPTQ[7], EIGHT_BITS[1], EIGHT_BITS[3], FINEGRAINED[0]]
FEW += [*BITSANDBYTES[1:3], MXFP4]


def write(folder: Path, case: Case, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Write a checkpoint of a Llama. Returns the stock model with the weights that the checkpoint represents."""
    model = build(**{**SIZES, **sizes}).to(dtype)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in list(state):
        if name.endswith("_proj.weight"):
            tensors, exact = case.write(state.pop(name))
            prefix = name.removesuffix("weight")
            state.update({prefix + part: tensor.contiguous() for part, tensor in tensors.items()})
            model.get_parameter(name).data.copy_(exact)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=case.config)
    return model


def edit(folder: Path, **changes: Any) -> None:
    """Change the checkpoint's config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the checkpoint's tensors."""
    path = folder / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, {"format": "pt"})


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Returns everything about a tensor that must not change. Comparing bytes makes NaN equal NaN."""
    data = tensor.detach().cpu().contiguous()
    return data.dtype, tuple(data.shape), data.flatten().view(torch.uint8).numpy().tobytes()
