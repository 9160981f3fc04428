"""The block: one allocation for a group's weights, where every parameter has its own storage over its part.

The parts are created through DLPack, so that code that inspects parameters or storages (state dicts, safetensors,
pickle, optimizers) sees ordinary tensors that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from hf_rocm.layers.grouped_linear import lies_in
from hf_rocm.layers.weight_group import WeightGroup
from hf_rocm.weights.mmap_pages import release_freed, release_pages

# Live blocks by the address of their first weight, because an op in a compiled graph receives weights, not modules.
_blocks: WeakValueDictionary[int, WeightGroup] = WeakValueDictionary()


def enter_block(group: WeightGroup) -> None:
    """Register a group by the address of its first weight for as long as it is alive."""
    _blocks[group.parts[0].weight] = group


def block_of(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Any:
    """Return the live group that consists of exactly these weights and biases now, or None."""
    group: Any = _blocks.get(weights[0].data_ptr())
    if group is None or group.weight.dtype != weights[0].dtype or group.weight.device != weights[0].device:
        return None
    return group if lies_in(group, weights, biases) else None


def capturing() -> bool:
    """Whether a graph is being captured. Weights must not move during a capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_aliased(parameter: Tensor) -> bool:
    """Whether another tensor uses the parameter's storage and would not move with the parameter.

    False if this release of PyTorch does not count the references to a storage.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    # References by the parameter and by the storage object that this call creates.
    own = 2
    return count is not None and bool(count(parameter.untyped_storage()._cdata) > own)


def part_memory(module: nn.Module, names: Sequence[str]) -> None:
    """Move the weights and biases of these children to their own memory. Values and objects do not change.

    Parameters that share memory with other tensors, such as another model's, are not moved, because the other
    tensors would no longer change with them.
    """
    on_gpu, freed = False, 0
    for linear in (module._modules.get(name) for name in names):
        for parameter in () if linear is None else (linear._parameters.get(key) for key in ("weight", "bias")):
            if type(parameter) is nn.Parameter and not parameter.is_meta and not is_aliased(parameter):
                own_memory(parameter)
                on_gpu, freed = on_gpu or parameter.is_cuda, freed + parameter.nbytes
    if on_gpu:
        torch.cuda.empty_cache()
    else:
        release_freed(freed)


def release_joined(weight: Tensor) -> None:
    """Release the former memory of the weights that now form this block.

    Otherwise the allocator would keep this memory, which is too small for the next block. Over all blocks, this would
    amount to a second copy of the model.
    """
    if weight.is_cuda:
        torch.cuda.empty_cache()
    else:
        release_freed(weight.nbytes)


def own_memory(parameter: Tensor) -> None:
    """Copy a parameter's values to its own ordinary memory. The object does not change."""
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
        parameter.data = parameter.data.clone()


def join_parameters(parameters: Sequence[Any], neighbours: Sequence[Any] = ()) -> Tensor:
    """Move these parameters [N_i, …] into one block [N_1 + N_2 + …, …]. Returns the block.

    neighbours: parameters that may lie between them in memory and may be moved too.
    """
    # A parameter that was created under inference_mode accepts only inference tensors; other parameters reject them.
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        others = _make_room(parameters, neighbours)
        block = torch.cat([parameter.data for parameter in parameters])
        row = 0
        for parameter in parameters:
            rows, old = len(parameter), parameter.data
            parameter.data = _with_own_storage(block[row : row + rows])
            release_pages(old)
            row += rows
        for other in others:
            own_memory(other)
    return block


def _with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor over the same memory with its own storage. PyTorch exports only from the current device."""
    with torch.cuda.device_of(part):
        return from_dlpack(part)


# PyTorch's allocator has a separate pool for smaller tensors.
_LARGE = 2**20
# The granularity of PyTorch's allocator.
_STEP = 512


def _make_room(parameters: Sequence[Any], neighbours: Sequence[Any]) -> list[Any]:
    """Free the GPU memory of these parameters and of the neighbours between them, so that the block fits there.

    transformers loads all weights into one allocation, which can't be released in parts. For every block outside this
    allocation, an equally large part of it would stay unused. So the parameters and the neighbours between them are
    moved to a temporary copy. Returns the neighbours that were moved.
    """
    first = parameters[0]
    if not _on_gpu(first) or first.nbytes < _LARGE:
        return []
    low, high = (end(parameter.data_ptr() for parameter in parameters) for end in (min, max))
    others = [other for other in neighbours if _may_move(other, first) and low < other.data_ptr() < high]
    run = sorted([*parameters, *others], key=lambda parameter: int(parameter.data_ptr()))
    for one, following in pairwise(run):
        if one.data_ptr() + -(-one.nbytes // _STEP) * _STEP != following.data_ptr():
            return []
    copy = torch.cat([parameter.data.reshape(-1) for parameter in run])
    for parameter, part in zip(run, copy.split([parameter.numel() for parameter in run]), strict=True):
        parameter.data = _with_own_storage(part).view(parameter.shape)
    torch.cuda.empty_cache()
    return others


def _may_move(parameter: Any, like: Tensor) -> bool:
    """Whether a parameter can be moved without affecting anything else."""
    return (
        type(parameter) is nn.Parameter
        and hasattr(torch._C, "_storage_Use_Count")
        and (parameter.device, parameter.dtype, parameter.is_inference())
        == (like.device, like.dtype, like.is_inference())
        and parameter.is_contiguous()
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and not is_aliased(parameter)
    )


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
