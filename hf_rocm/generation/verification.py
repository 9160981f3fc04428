"""Accept drafts in transformers' assisted decoding without reading logits on the host.

The loop converts the logits of a step to fp32, copies them, and compares the drafts with the tokens that have the
largest logits, in a dozen small kernels; then it waits for the device whenever it uses the number of accepted drafts. A
recorded step also finds the tokens with the largest logits. The loop receives stand-ins for the logits and the tokens:
the tokens are copied to the host once, and are compared with the drafts and the EOS tokens there. Any other use of a
stand-in computes the tensor.

This applies only to greedy decoding in the unchanged loop, without logits processors, `synced_gpus` or
`assistant_ensemble_weight`, if the call returns neither scores nor logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_rocm.generation import lookahead
from hf_rocm.generation.assistant import Rounds
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.inputs import residents_of
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.stand_in import StandIn
from hf_rocm.generation.streams import HostCopies
from hf_rocm.generation.token_choice import UPDATE, FindRunner, may_stand_in
from hf_rocm.layers.release import before
from hf_rocm.overlay.dependencies import Reference
from hf_rocm.overlay.replacements import Watch


class Verification:
    """How a call to `_assisted_decoding` accepts drafts; used instead of a `token_choice.Choice`.

    processors: the call's list of logits processors, which is empty. early, adaptive: those of the call's `Lookahead`.
    tokens: the tokens of the call. rounds: those of its assistant, or None.
    """

    def __init__(self, processors: Sequence[Any], *, early: bool = False, adaptive: bool = False) -> None:
        self._processors = processors
        # Copies of the tokens of steps.
        self._copies = HostCopies()
        self.tokens = HostTokens()
        self.rounds: Rounds | None = None
        self.lookahead = Lookahead(self.tokens, early=early, adaptive=adaptive)

    def holds(self) -> bool:
        """Whether the functions that receive a stand-in are unchanged and there is no logits processor."""
        return not self._processors and _receiving().holds()

    def stand_in(self, step: RecordedStep, runner: FindRunner) -> Any:
        """The stand-in for the logits of all replays of a step. runner: a weak reference to the call's runner."""
        return _Logits(step, self, runner)

    def logits_of(self, step: RecordedStep) -> Tensor:
        """The logits of the last step that the loop has called, [1, N, V]."""
        kept = self.lookahead.logits
        return step.logits if kept is None else kept

    def select(self, step: RecordedStep, runner: FindRunner) -> tuple[Tensor, Tensor]:
        """Return the tokens with the largest logits, [1, N], on the device and on the host.

        Launches the next step if that is possible.
        """
        assert step.tokens is not None
        call = runner() if self.lookahead.expects() else None
        if call is None or not call.can_launch:
            on_host, launched = self.lookahead.on_host(step)
            if self.rounds is not None:
                self.rounds.verified(step.tokens, on_host, runner, launched=launched)
            return step.tokens, on_host
        # copied before the host waits for the step, because the next one may write to the same tensors
        tokens = step.tokens.clone()
        copy = self._copies.send(tokens)
        logits = step.logits.clone()
        residents = residents_of(call.cache)
        if residents is not None and residents.form.tokens == tokens.shape[1]:
            self.lookahead.queue(tokens, residents.input_ids, logits, call)
        on_host = copy.read().clone()
        self.lookahead.launch(on_host, tokens, logits, call)
        return tokens, on_host


def of_call(
    model: Any, arguments: Mapping[str, Any], observer: str | None = None, rounds: Rounds | None = None
) -> Verification | None:
    """Return how a call to `_assisted_decoding` accepts drafts; None if transformers reads the logits.

    arguments: the keyword arguments of `_assisted_decoding`. observer: the name of a user's class whose code runs
    between two steps, or None. rounds: those of the call's assistant, or None.
    """
    config = arguments["generation_config"]
    mixed = getattr(config, "assistant_ensemble_weight", None) is not None
    if config.do_sample or mixed:
        return None
    if not may_stand_in(model, arguments, feature="speculation", methods=(UPDATE, _GENERATOR)):
        return None
    early = lookahead.refuses(arguments, observer) is None
    adaptive = observer is None and not _EXCEEDS_LENGTH
    result = Verification(arguments["logits_processor"], early=early, adaptive=adaptive)
    # `holds` returns False if there are logits processors.
    if not result.holds():
        return None
    if rounds is not None and rounds.follow(result.tokens, result.lookahead):
        result.rounds = rounds
    return result


# Before 5.14, the last step of a call may exceed the maximum length, and the excess depends on the verified drafts.
_EXCEEDS_LENGTH = before("5.14")


@cache
def _receiving() -> Watch:
    """Watches the functions that receive a stand-in."""
    from transformers import GenerationMixin
    from transformers.generation import utils

    kinds = [Reference(vars(utils), name) for name in _GENERATORS]
    return Watch(
        [
            Reference(GenerationMixin, UPDATE),
            Reference(GenerationMixin, _GENERATOR),
            *kinds,
            *(Reference(kind.original(), "update_candidate_strategy") for kind in kinds),
            *(Reference(vars(torch), name) for name in ("cat", "isin")),
            *(Reference(Tensor, name) for name in ("__eq__", "to", "cpu")),
        ]
    )


# The method that creates the candidate generator, which receives the stand-in for the logits.
_GENERATOR = "_get_candidate_generator"
_GENERATORS = (
    "AssistedCandidateGenerator",
    "AssistedCandidateGeneratorDifferentTokenizers",
    "PromptLookupCandidateGenerator",
    "UniversalSpeculativeDecodingGenerator",
)


class _Logits(StandIn):
    """The logits of a step, [1, N, V], in the dtype of the model."""

    def __init__(self, step: RecordedStep, choice: Verification, runner: FindRunner) -> None:
        self._step, self._choice, self._runner = step, choice, runner

    def tensor(self) -> Tensor:
        return self._choice.logits_of(self._step)

    def __getitem__(self, index: Any) -> Any:
        assert self._step.tokens is not None
        tokens = self._step.tokens.shape[1]
        if index != (slice(None), slice(-tokens, None)):
            return self.tensor()[index]
        return _Scores(self._step, self._choice, self._runner)

    def clone(self) -> Any:
        return self


class _Scores(_Logits):
    """The logits of a step in fp32, [1, N, V]. The loop's conversion to fp32 does not change them."""

    def tensor(self) -> Tensor:
        return super().tensor().to(torch.float32)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        same = {"dtype": torch.float32, "device": self._step.logits.device}
        return self if not args and kwargs == same else self.tensor().to(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs != {"dim": -1} or self._choice.lookahead.logits is not None:
            return self.tensor().argmax(*args, **kwargs)
        return _Selected(*self._choice.select(self._step, self._runner), self._choice.tokens)


class _Selected(StandIn):
    """The tokens with the largest logits, [1, N], from which the loop takes those that it compares and appends."""

    def __init__(self, tokens: Tensor, on_host: Tensor, known: HostTokens) -> None:
        self._tokens, self._on_host, self._known = tokens, on_host, known

    def tensor(self) -> Tensor:
        return self._tokens

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (None, None)
        if rows == slice(None) and isinstance(columns, slice) and columns.start is columns.step is None:
            stop = None if columns.stop is None else int(columns.stop)
            kind = _Compared if stop == -1 else _Accepted
            return kind(self._tokens[:, :stop], self._on_host[:, :stop], self._known)
        return self.tensor()[index]


class _Compared(StandIn):
    """Tokens that the loop compares with the drafts."""

    def __init__(self, tokens: Tensor, on_host: Tensor, known: HostTokens) -> None:
        self._tokens, self._on_host, self._known = tokens, on_host, known

    def tensor(self) -> Tensor:
        return self._tokens

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("eq", "__eq__") and len(args) == 2 and type(args[1]) is cls and not kwargs:
            drafts, selected = args
            return selected._known.drafts_of(drafts) == selected._on_host
        return super().__torch_function__(function, types, args, kwargs)


class _Searched(_Compared):
    """Tokens that the loop searches for EOS tokens, [N]."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.isin and len(args) == 2 and type(args[0]) is cls and not kwargs:
            tokens, ends = args
            return torch.isin(tokens._on_host, tokens._known.constant(ends))
        return super().__torch_function__(function, types, args, kwargs)


class _Accepted(_Compared):
    """The tokens that the loop appends, [1, N]. They are searched for EOS tokens on the host."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        if function is torch.cat and kwargs == {"dim": -1} and type(args[0][-1]) is cls and len(args[0]) == 2:
            before, accepted = args[0]
            accepted._known.append(accepted._on_host, before=before, after=result)
        return result

    @property
    def shape(self) -> torch.Size:
        return self._tokens.shape

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def squeeze(self, dim: int) -> Any:
        return _Searched(self._tokens.squeeze(dim), self._on_host.squeeze(dim), self._known)

    def cpu(self) -> Tensor:
        return self._on_host.clone()

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (None, None)
        if rows == slice(None) and isinstance(columns, slice):
            return _Accepted(self._tokens[index], self._on_host[index], self._known)
        return self.tensor()[index]
