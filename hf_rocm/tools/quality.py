"""The accuracy of a quantised model: the error of its logits, and its perplexity on a text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_rocm.arguments import require_module
from hf_rocm.errors import LoadError, OptionError
from hf_rocm.tools.bench import clock

# The maximum number of tokens per forward pass.
LENGTH = 512
# The number of tokens whose time is measured.
_NEW = 16


@dataclass(frozen=True)
class QuantizationLoss:
    """The logits of a model compared with those of its reference, over all positions of a text.

    tokens: the number of positions. largest, mean: the maximum and mean of the absolute differences. size: the standard
    deviation of the reference's logits. same_choice: the fraction of positions with the same most likely token.
    divergence: the mean Kullback-Leibler divergence D(reference ‖ model) of the probabilities, in nats.
    perplexity: (model, reference), or None if the model doesn't predict the next token or the text has only one token.
    """

    tokens: int
    largest: float
    mean: float
    size: float
    same_choice: float
    divergence: float
    perplexity: tuple[float, float] | None

    @property
    def ratio(self) -> float | None:
        """The model's perplexity divided by the reference's."""
        return None if self.perplexity is None else self.perplexity[0] / self.perplexity[1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        lines = [
            f"over {self.tokens} tokens",
            f"  logits       mean error {self.mean:.3g}, largest error {self.largest:.3g}",
            f"  logits' std  {self.size:.3g}",
            f"  same top-1   {self.same_choice:.1%} of the positions",
            f"  divergence   {self.divergence:.3g} nats (Kullback-Leibler)",
        ]
        if self.perplexity is not None:
            actual, expected = self.perplexity
            lines.append(f"  perplexity   {actual:.4g}, reference {expected:.4g} (× {actual / expected:.4f})")
        return "\n".join(lines)


@dataclass(frozen=True)
class Unquantized:
    """The model before it is quantised. nbytes: the size of its parameters and buffers in bytes. ms_per_token:
    see `decoding_time`."""

    model: str
    dtype: str
    device: str
    nbytes: int
    ms_per_token: float | None


@dataclass(frozen=True)
class Quantized:
    """The quantised model. report: the report of `hf_rocm.quantize`. ms_per_token: see `decoding_time`."""

    report: dict[str, Any]
    loss: QuantizationLoss
    ms_per_token: float | None

    def to_dict(self) -> dict[str, Any]:
        return {**self.report, "loss": self.loss.to_dict(), "ms_per_token": self.ms_per_token}


def measure(
    model: str,
    kinds: Sequence[str],
    ids: Tensor,
    *,
    device: str | None,
    force: bool,
    head: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Unquantized, list[Quantized], nn.Module]:
    """Load a model once for each kind, quantise it, and compare it with the unquantised model.

    ids: [S] or [B, S] tokens. Returns a description of the unquantised model, one result per kind, and the last
    quantised model. Only one model is in memory at a time. Raises the errors of `hf_rocm.quantize` and `load`.
    """
    from hf_rocm.tools.load import load
    from hf_rocm.weights import quantize as quantizing

    pieces = list(chunks(ids))
    reference, expected, loaded, results = None, None, None, []
    for kind in kinds:
        # This frees the previous model.
        loaded = None
        loaded = load(model, device=device, force=force)
        if reference is None or expected is None:
            expected = logits_of(loaded, pieces)
            dtype = str(next(loaded.parameters()).dtype).removeprefix("torch.")
            device_name, size = str(loaded.device), quantizing.nbytes(loaded)
            reference = Unquantized(type(loaded).__name__, dtype, device_name, size, decoding_time(loaded, pieces[0]))
        quantizing.quantize(loaded, kind, force=force or None, head=head, progress=progress)
        loss = compare(logits_of(loaded, pieces), expected, pieces, predicts=predicts(loaded))
        results.append(Quantized(loaded.__dict__[quantizing.REPORT], loss, decoding_time(loaded, pieces[0])))
    assert reference is not None and loaded is not None
    return reference, results, loaded


def decoding_time(model: Any, ids: Tensor) -> float | None:
    """Return the milliseconds per token of greedy decoding, or None if `predicts(model)` is False.

    ids: a prompt, [1, S], of which at most 64 tokens are used. The median time of 3 calls that generate one token is
    subtracted from the median time of 3 calls that generate 17 tokens. The difference is divided by 16.
    """
    if not predicts(model):
        return None
    device = next(model.parameters()).device
    prompt = ids[:, :64].to(device)
    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}

    def seconds(new: int) -> float:
        def call() -> None:
            model.generate(prompt, max_new_tokens=new, min_new_tokens=new, **settings)

        call()
        return statistics.median(clock.timed(call, device) for _ in range(3))

    return 1000 * max(0.0, seconds(_NEW + 1) - seconds(1)) / _NEW


def quantization_loss(
    model: nn.Module,
    reference: nn.Module | str | PathLike[str],
    *,
    text: str | None = None,
    ids: Tensor | None = None,
    tokenizer: Any = None,
) -> QuantizationLoss:
    """Run a model and its reference on the same tokens, and compare their logits.

    reference: the unquantised model, or a folder or name to load it from. Both models must fit in memory. text: the
    text to read, tokenised with `tokenizer` or with the reference's tokenizer; at most its first 2048 tokens are used.
    ids: [S] or [B, S] tokens to use instead of a text. If neither is given, Python's own documentation is read. Returns
    a `QuantizationLoss`. Raises `OptionError` if one of the models is not a module or has no logits, if there are no
    tokens, or if `ids` is not a tensor of integers, and `LoadError` without a tokenizer.
    """
    require_module(model, "quantization_loss")
    if isinstance(reference, (str, PathLike)):
        parameter = next(model.parameters())
        tokenizer = tokenizer or (tokenizer_of(reference) if ids is None else None)
        reference = type(model).from_pretrained(reference).to(parameter.device, parameter.dtype)  # type: ignore[attr-defined]
    if not isinstance(reference, nn.Module):
        raise OptionError(
            "reference must be a model, or the folder or name to load it from",
            facts={"found": type(reference).__qualname__},
        )
    if ids is None:
        tokenizer = tokenizer or tokenizer_of(getattr(reference.config, "_name_or_path", ""))
        ids = read(tokenizer, text)
    pieces = list(chunks(ids))
    return compare(logits_of(model, pieces), logits_of(reference, pieces), pieces, predicts=predicts(model))


def compare(
    logits: Sequence[Tensor], expected: Sequence[Tensor], pieces: Sequence[Tensor], *, predicts: bool
) -> QuantizationLoss:
    """Compare logits with the expected ones, for pieces of tokens.

    logits, expected: one [1, S_i, V] tensor per piece. pieces: [1, S_i] tokens. predicts: whether to compute the
    perplexity.
    """
    largest, total, square, mean, divergence, same, count, positions = 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0
    losses = [0.0, 0.0]
    predicted = 0
    for actual, reference, ids in zip(logits, expected, pieces, strict=True):
        actual, reference = actual.float(), reference.float()
        error = (actual - reference).abs()
        largest = max(largest, error.max().item()) if not error.isnan().any() else math.nan
        total += error.double().sum().item()
        square += reference.double().square().sum().item()
        mean += reference.double().sum().item()
        count += error.numel()
        same += int((actual.argmax(-1) == reference.argmax(-1)).sum())
        divergence += _divergence(actual, reference)
        positions += ids.numel()
        if predicts and ids.shape[1] > 1:
            predicted += ids.numel() - 1
            for index, scores in enumerate((actual, reference)):
                losses[index] += F.cross_entropy(scores[0, :-1], ids[0, 1:].to(scores.device), reduction="sum").item()
    return QuantizationLoss(
        tokens=positions,
        largest=largest,
        mean=total / count,
        size=math.sqrt(max(0.0, square / count - (mean / count) ** 2)),
        same_choice=same / positions,
        divergence=divergence / positions,
        perplexity=(math.exp(losses[0] / predicted), math.exp(losses[1] / predicted)) if predicted else None,
    )


def _divergence(logits: Tensor, expected: Tensor) -> float:
    """Return Σ p (log p - log q) over all positions, with p from the expected logits and q from the other logits."""
    log_p = expected.log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p == 0, 0, p * (log_p - logits.log_softmax(-1)))
    return terms.double().sum().item()


@torch.no_grad()
def logits_of(model: nn.Module, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of all pieces, in host memory."""
    device = next(model.parameters()).device
    options = {"use_cache": False} if predicts(model) else {}
    logits = []
    for ids in pieces:
        output = model(input_ids=ids.to(device), **options)
        if getattr(output, "logits", None) is None:
            raise OptionError(
                f"{type(model).__name__} has no logits to compare",
                hint="load the model with its head, such as AutoModelForCausalLM",
            )
        logits.append(output.logits.cpu())
    return logits


def predicts(model: nn.Module) -> bool:
    """Return whether the model predicts the next token, so that a perplexity can be computed."""
    can_generate = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    return can_generate is not None and bool(can_generate()) and not getattr(config, "is_encoder_decoder", False)


def chunks(ids: Tensor) -> Iterator[Tensor]:
    """Split [S] or [B, S] tokens into pieces, [1, ≤ 512]."""
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        kind = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__qualname__
        raise OptionError("ids must be a tensor of integer tokens", facts={"found": kind})
    if ids.numel() == 0:
        raise OptionError("there are no tokens to read", hint="pass a longer text")
    for row in ids.reshape(-1, ids.shape[-1]):
        for piece in row.split(LENGTH):
            yield piece[None]


def read(tokenizer: Any, text: str | None, *, tokens: int = 4 * LENGTH) -> Tensor:
    """Return the first tokens of a text, [S]; by default, of Python's own documentation."""
    content = python_text() if text is None else text
    ids: list[int] = tokenizer(content[: 20 * tokens])["input_ids"]
    return torch.tensor(ids[:tokens], dtype=torch.long)


def python_text() -> str:
    """Return text that most Python installations contain: the 12 longest topics of `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise OptionError(
            "this Python has no documentation to read", hint="pass your own text (--text FILE)"
        ) from error
    longest = sorted(topics.values(), key=len)[-12:]
    return "\n\n".join(sorted(longest))


def tokenizer_of(model: str | PathLike[str], *, hint: str = "pass tokens to quantization_loss instead: ids=") -> Any:
    """Return the tokenizer of a folder, or of a name on the Hub. Raises `LoadError` with this hint if there is none."""
    import transformers

    try:
        # transformers 4.x may pass None as a file name, which does not raise OSError
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        raise LoadError(
            f"there is no tokenizer in {str(model)!r}",
            facts={"transformers error": " ".join(str(error).split())},
            hint=hint,
        ) from error
    # an empty tokenizer of T5 has one token besides the special ones
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)) + 1:
        raise LoadError(
            f"there is no tokenizer in {str(model)!r}",
            facts={
                "found": f"a {type(tokenizer).__name__} without a vocabulary, which transformers creates if there "
                "are no files"
            },
            hint=hint,
        )
    return tokenizer
