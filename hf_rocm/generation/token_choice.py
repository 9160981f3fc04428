"""Choose the next token in transformers' sampling loop with recorded work.

The loop converts a step's logits to fp32, calls the logits processors, and takes the largest score or draws from the
softmax. For a replayed step this work is recorded: finding the largest logits is a part of the recorded step, and a
draw has its own recording (`recorded_draw`). The loop then handles stand-ins for the logits, the scores and the
probabilities, and receives the tokens where it takes the largest score or draws. Any other use of a stand-in computes
the tensor.

This applies only to the unchanged loop without `synced_gpus`, if it returns neither scores nor logits. The
processors in `RECORDED` are supported if the loop draws; if it takes the largest score, it must have no processors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import logits_process

from hf_rocm import features
from hf_rocm.generation.loop_rows import Tokens
from hf_rocm.generation.methods import own
from hf_rocm.generation.recorded_draw import draws_like_multinomial, probabilities_of, scores_of
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.residents import Source
from hf_rocm.generation.stand_in import StandIn
from hf_rocm.overlay.dependencies import Reference, of_method
from hf_rocm.overlay.replacements import Watch

FEATURE = "token_choice"
# The method that receives the outputs with the stand-in.
UPDATE = "_update_model_kwargs_for_generation"

# Processors that read nothing but the scores and their own plain attributes, and never wait for the device.
RECORDED = (
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)


class CallRunner(Protocol):
    """The attributes of the call's runner that the stand-ins use."""

    # A `DecodeCache`.
    cache: Any
    can_launch: bool

    def draw(self, step: RecordedStep, choice: Choice) -> Tensor: ...
    def launch(self, position: int | None, tokens: int, source: Source) -> tuple[RecordedStep, Tensor] | None: ...


# Returns the call's runner, or None after the call.
FindRunner = Callable[[], CallRunner | None]


class Choice:
    """How a call of the loop chooses its tokens.

    processors: the call's list of logits processors, whose settings are bool, int or float. key: a key for the
    recordings of the draws; None if the call takes the tokens with the largest logits.
    """

    # Only steps that verify drafts are launched early.
    lookahead = None

    def __init__(self, processors: LogitsProcessorList, *, sampled: bool) -> None:
        self._list = processors
        self.processors = tuple(processors)
        self.key = _key(processors) if sampled else None
        # The `Rows` of the sampling loop, or None.
        self.rows: Any = None
        self._watch = _skipped(tuple(dict.fromkeys(map(type, processors))))
        self._settings = [dict(vars(processor)) for processor in processors]

    def replacement(self) -> LogitsProcessorList:
        """The list that replaces the call's list of processors."""
        return _Processors(self._list)

    def holds(self) -> bool:
        """Whether the functions that the recorded work skips, the processors and their settings are unchanged."""
        if len(self._list) != len(self.processors) or not all(map(is_, self._list, self.processors)):
            return False
        for processor, before in zip(self.processors, self._settings, strict=True):
            settings = vars(processor)
            if len(settings) != len(before) or not all(map(is_, settings.values(), before.values())):
                return False
        return self._watch.holds()

    def chosen(self, tokens: Tensor) -> Any:
        """The next tokens as the loop receives them. tokens: [B]."""
        return tokens if self.rows is None or not self.rows.active else Tokens(self.rows, tokens)

    def stand_in(self, step: RecordedStep, runner: FindRunner) -> Any:
        """The stand-in for the logits of all replays of a step. runner: a weak reference to the call's runner."""
        return _Logits(_Step(step, self, runner))


def of_call(model: Any, arguments: Mapping[str, Any]) -> Choice | None:
    """Return how a call to `_sample` chooses its tokens; None if transformers chooses them from the logits.

    arguments: the keyword arguments of `_sample`.
    """
    if not may_stand_in(model, arguments, feature=FEATURE):
        return None
    processors = arguments["logits_processor"]
    sampled = bool(arguments["generation_config"].do_sample)
    if not all(map(_recordable, processors)) or (processors and not sampled):
        return None
    choice = Choice(processors, sampled=sampled)
    if not choice.holds() or (sampled and not draws_like_multinomial(model.device)):
        return None
    return choice


def may_stand_in(model: Any, arguments: Mapping[str, Any], *, feature: str, methods: Sequence[str] = (UPDATE,)) -> bool:
    """Return whether a loop of `generate` may handle stand-ins.

    It may if no method that receives a stand-in is overridden, and if only the loop reads scores and logits.

    arguments: the keyword arguments of the loop. methods: the methods of the model that receive a stand-in.
    """
    config = arguments["generation_config"]
    returned = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    overridden = any(own(type(model), name, GenerationMixin) or name in model.__dict__ for name in methods)
    if returned or overridden or arguments.get("synced_gpus"):
        return False
    if type(arguments.get("logits_processor")) is not LogitsProcessorList or features.refuses(feature) is not None:
        return False
    return torch.overrides.has_torch_function((StandIn(),))


def _recordable(processor: Any) -> bool:
    name = type(processor).__name__
    return name in RECORDED and getattr(logits_process, name, None) is type(processor) and _plain(processor)


def _plain(processor: Any) -> bool:
    return all(type(value) in (bool, int, float) for value in vars(processor).values())


def _key(processors: Sequence[Any]) -> tuple[Any, ...]:
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*modes, *((type(processor), *sorted(vars(processor).items())) for processor in processors))


@cache
def _skipped(kinds: tuple[type, ...]) -> Watch:
    """Watches the functions that receive a stand-in, those that the recorded work skips, and all that these call.

    kinds: the classes of the logits processors.
    """
    references = [
        Reference(GenerationMixin, UPDATE),
        Reference(vars(torch), "argmax"),
        Reference(vars(torch), "multinomial"),
        Reference(vars(torch.nn.functional), "softmax"),
        Reference(Tensor, "to"),
    ]
    for kind in (LogitsProcessorList, *kinds):
        references += of_method(kind, "__call__", called=Tensor)
    return Watch(references)


class _Processors(LogitsProcessorList):
    """The processors of a call. They are not called for a stand-in, because the recorded work contains them."""

    def __init__(self, stock: LogitsProcessorList) -> None:
        super().__init__(stock)
        self._stock = stock

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return scores.processed if type(scores) is _Scores else self._stock(input_ids, scores, **kwargs)


class _Step(NamedTuple):
    """A recorded step, the choice of tokens in the current call, and the reference to the call's runner."""

    recorded: RecordedStep
    choice: Choice
    runner: FindRunner


class _Logits(StandIn):
    """The logits, [B, 1, V]."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._scores = _Scores(step)

    def tensor(self) -> Tensor:
        return self._step.recorded.logits

    def __getitem__(self, index: Any) -> Any:
        return self._scores if index in _LAST else self.tensor()[index]


_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))


class _Scores(StandIn):
    """The logits of the last token, [B, V], before and after their conversion to fp32."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self.processed = _Processed(step)

    def tensor(self) -> Tensor:
        return self._step.recorded.last_logits

    def to(self, *args: Any, **kwargs: Any) -> Any:
        to_fp32 = not args and kwargs.get("dtype") is torch.float32
        return self if to_fp32 else self.tensor().to(*args, **kwargs)


class _Processed(StandIn):
    """The processed scores, [B, V] fp32."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.probabilities = _Probabilities(step)

    def tensor(self) -> Tensor:
        return scores_of(self.step.recorded.last_logits, self.step.choice.processors)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 1 and type(args[0]) is cls and kwargs is not None and kwargs.get("dim") == -1:
            step, name = args[0].step, function.__name__
            if name == "argmax" and len(kwargs) == 1 and step.choice.key is None:
                assert step.recorded.last_tokens is not None
                return step.choice.chosen(step.recorded.last_tokens)
            if name == "softmax" and kwargs.get("dtype") is None and step.choice.key is not None:
                return args[0].probabilities
        return super().__torch_function__(function, types, args, kwargs)


class _Probabilities(StandIn):
    """The probabilities of the next token, [B, V] fp32."""

    def __init__(self, step: _Step) -> None:
        self.step = step

    def tensor(self) -> Tensor:
        return probabilities_of(self.step.recorded.last_logits, self.step.choice.processors)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "multinomial" and len(args) == 1 and kwargs == {"num_samples": 1}:
            step = args[0].step
            runner = step.runner()
            if runner is not None:
                return _Drawn(step.choice, runner.draw(step.recorded, step.choice))
        return super().__torch_function__(function, types, args, kwargs)


class _Drawn(StandIn):
    """The tokens that were drawn, [B, 1]."""

    def __init__(self, choice: Choice, tokens: Tensor) -> None:
        self._choice, self._tokens = choice, tokens

    def tensor(self) -> Tensor:
        return self._tokens

    def squeeze(self, *args: Any) -> Any:
        result = self._tokens.squeeze(*args)
        return self._choice.chosen(result) if args == (1,) else result
