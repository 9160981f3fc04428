"""Record steps on a CPU: a replay runs the recorded operators again, on the same memory.

A replay runs none of the model's Python code, so it is wrong in the same cases as a graph on a GPU: a length that the
host counts, a weight that moved, an input that is not copied. As on a GPU, recordings share memory: replaying one
overwrites the results of another.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that make the host wait for a value, and therefore break a capture on a GPU.
SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.is_nonzero", "aten.equal", "aten.masked_select")


class EmulatedRecorder:
    """Replaces the recorder for a GPU. Every cache, and every model with recorded forwards, has its own recorder."""

    def __init__(self, device):
        pass

    def record(self, run):
        # Unlike on a GPU, operators run while they are recorded.
        with _one_at_a_time, Operators() as recording:
            result = run()
        return recording, result


# All recordings of the process. Only one at a time is created or replayed.
_recordings = WeakSet()
_one_at_a_time = Lock()


class Operators(TorchDispatchMode):
    """Run operators and record them, except views, whose memory is written by other operators."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.created = []
        self.replays = 0
        # Whether another recording was replayed after this one.
        self.overwritten = False
        _recordings.add(self)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(getattr(cls, "__name__", "") == "DTensor" for cls in types):
            # DTensor dispatches the operators on local tensors again.
            return NotImplemented
        if str(operator).startswith(SYNCS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {operator}")
        result = operator(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if all(map(_has_memory, outputs)) and not (outputs and _is_view(operator, inputs, outputs)):
            self.kept.append((operator, args, kwargs, outputs))
            input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
            self.created += [output for output in outputs if output.untyped_storage()._cdata not in input_storages]
        return result

    def release(self):
        self.kept.clear()
        self.created.clear()

    def replay(self):
        self.replays += 1
        with torch.no_grad(), _one_at_a_time:
            for other in list(_recordings):
                if other is not self and not other.overwritten:
                    other._overwrite()
            self.overwritten = False
            for operator, args, kwargs, outputs in self.kept:
                result = operator(*args, **kwargs)
                _wait(operator, result)
                for old, new in zip(outputs, _tensors(result), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def _overwrite(self):
        self.overwritten = True
        for tensor in self.created:
            with torch.inference_mode(tensor.is_inference()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _has_memory(tensor):
    """Whether a tensor has memory. Fake tensors, which DTensor uses, and pending results of collectives have none."""
    return tensor.device.type == "cpu" and type(tensor).__name__ not in ("FakeTensor", "AsyncCollectiveTensor")


def _wait(operator, result):
    """Wait for a functional collective."""
    if getattr(operator, "namespace", None) == "_c10d_functional":
        for tensor in _tensors(result):
            torch.ops._c10d_functional.wait_tensor(tensor)


def _is_view(operator, inputs, outputs):
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return not operator._schema.is_mutable and all(output.untyped_storage()._cdata in storages for output in outputs)


def _tensors(values):
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
