"""One run of `hf-rocm bench serve`: compare both servers' responses to the same requests, and measure every load.

Only one server runs at a time, since a server fills the GPU's memory with its cache.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_rocm.errors import LoadError, OptionError
from hf_rocm.tools.bench.machine import commit, machine
from hf_rocm.tools.bench.measure import Mismatch, Progress
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.run import Subject
from hf_rocm.tools.bench.serving import checkpoint
from hf_rocm.tools.bench.serving.agreement import Agreement, agreement
from hf_rocm.tools.bench.serving.client import CHAT, LOST, Request, send_request
from hf_rocm.tools.bench.serving.figures import figures
from hf_rocm.tools.bench.serving.server import ServeError, Server, serving
from hf_rocm.tools.bench.serving.traffic import Load, Traffic, drive, plan
from hf_rocm.tools.bench.shapes import architecture
from hf_rocm.tools.bench.variants import PREPARED, STOCK

PARITY_REQUESTS, PARITY_NEW = 8, 16
# Seconds between two checks of the server's process.
_WATCH = 0.2
# Seconds to wait for the end of the server's process after a connection was refused or lost.
_GRACE = 2.0
_DURING = "while it was answering requests"

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How servers are started and queried. arguments: additional arguments of `transformers serve`. timeout: the
    time limit for one response, in seconds. start_timeout: the time limit for loading the model, in seconds. sides: the
    measured sides; hf_rocm's is always measured, and the responses of both are always compared.
    """

    batching: bool = True
    arguments: tuple[str, ...] = ()
    timeout: float = 120.0
    start_timeout: float = 600.0
    sides: tuple[str, ...] = (STOCK, PREPARED)


def bench_serving(
    subject: Subject, loads: Sequence[Load], settings: Settings, *, segment: str, progress: Progress
) -> Segment:
    """Compare the responses of both servers, and measure every load on the servers of `settings.sides`.

    Raises `LoadError` if there is no such model, `OptionError` if the model or its tokenizer does not support the
    requests (for example, because they are too long), `ServeError` if a server fails, and `Mismatch` if hf_rocm's
    responses differ from stock's by more than the tolerance.
    """
    with tempfile.TemporaryDirectory(prefix="hf_rocm_bench_") as name:
        return _measured(subject, loads, settings, Path(name), segment=segment, progress=progress)


def _measured(
    subject: Subject, loads: Sequence[Load], settings: Settings, folder: Path, *, segment: str, progress: Progress
) -> Segment:
    """Measure in `folder`, which is deleted afterwards."""
    dtype = subject.dtype or (torch.bfloat16 if subject.device.type == "cuda" else torch.float32)
    if subject.shape is not None:
        # Check the lengths before gigabytes are written.
        _check_lengths(architecture(subject.shape)[1], loads)
    model = subject.model or _written(subject, dtype, folder / "model", progress)
    tokenizer, config = _files(model)
    _check_lengths(config, loads)
    if any(load.endpoint == CHAT for load in loads) and not getattr(tokenizer, "chat_template", None):
        raise OptionError("the tokenizer has no chat template", hint="use --endpoint completions")
    run = _Run(model, subject.device, settings, str(dtype).removeprefix("torch."), progress)
    parity = replace(loads[0], clients=1, rate=None, requests=PARITY_REQUESTS, new=min(PARITY_NEW, loads[0].new),
                     answers="both", seconds=float("inf"), leaving=0.0)  # fmt: skip
    parity_requests = plan(parity, tokenizer)
    requests = [plan(load, tokenizer) for load in loads]
    with run.server(STOCK, folder / "parity") as server:
        expected = run.texts(server, parity, parity_requests)
        batched = run.texts(server, replace(parity, clients=len(parity_requests)), parity_requests)
    with run.server(PREPARED, folder / PREPARED) as server:
        actual = run.texts(server, parity, parity_requests)
        comparison = agreement(expected, actual, batched=batched, tokens=parity.new, dtype=run.dtype)
        if comparison.wrong:
            raise _mismatch(comparison, parity_requests, expected, actual)
        prepared = run.cases(server, loads, requests)
        explained = server.explained()
    measured = [prepared]
    if STOCK in settings.sides:
        with run.server(STOCK, folder / STOCK) as server:
            measured.insert(0, run.cases(server, loads, requests))
    return Segment(
        segment,
        machine(subject.device),
        commit(),
        {
            "name": subject.name,
            "class": (config.architectures or [type(config).__name__])[0],
            "weights": "its own" if subject.shape is None else "random",
            "dtype": run.dtype,
        },
        None,
        1,
        serving={
            "command": ["transformers", "serve", *run.command],
            "parity": comparison.to_dict(),
            "explained": explained,
            "cases": [case for group in zip(*measured, strict=True) for case in group],
        },
    )


class _Run:
    def __init__(self, model: str, device: torch.device, settings: Settings, dtype: str, progress: Progress) -> None:
        self.model, self.settings, self.dtype, self.progress = model, settings, dtype, progress
        self.gpu = device.type != "cpu"
        batching = ["--continuous-batching"] if settings.batching else []
        self.command = [self.model, *batching, "--device", str(device), "--dtype", dtype, *settings.arguments]

    def server(self, side: str, folder: Path) -> Any:
        return serving(
            side, self.command, folder, gpu=self.gpu, timeout=self.settings.start_timeout, progress=self.progress
        )

    def texts(self, server: Server, load: Load, requests: Sequence[Request]) -> list[str]:
        """Return the texts of the responses to these requests. Raises `ServeError` if a request fails."""
        traffic = self.drive(server, load, requests, "checking responses")
        for response in traffic.responses:
            if response.error is not None:
                raise ServeError(
                    f"the {server.side} server failed on one of the first requests: {response.error}",
                    facts={"answer": response.detail or "none", "last lines": server.last_lines()},
                    hint="allow more time with --timeout" if response.error == "timeout" else None,
                )
        return [response.text for response in traffic.responses]

    def cases(self, server: Server, loads: Sequence[Load], requests: Sequence[list[Request]]) -> list[dict[str, Any]]:
        """Return the figures of every load on this server, each measured after an untimed warm-up."""
        rows = []
        for load, batch in zip(loads, requests, strict=True):
            concurrent = load.clients or max(1, round(load.rate or 1))
            warm = replace(load, clients=concurrent, rate=None, requests=min(2 * concurrent, len(batch)))
            self.drive(server, warm, batch[: warm.requests], "warm-up")
            rows.append(figures(load, server.side, self.drive(server, load, batch, load.title)))
        return rows

    def drive(self, server: Server, load: Load, requests: Sequence[Request], stage: str) -> Traffic:
        """Send the requests. Raises `ServeError` as soon as the server has ended."""

        def report_progress(done: int, total: int) -> None:
            self.progress(f"{server.side}: {stage}, {done} of {total} responses")

        send = partial(send_request, server.port, self.model, timeout=self.settings.timeout)
        traffic = asyncio.run(_watched(server, drive(load, list(requests), send, progress=report_progress)))
        if any(response.error in LOST for response in traffic.responses):
            server.check(_DURING, grace=_GRACE)
        return traffic


async def _watched(server: Server, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises `ServeError` if the server ends first."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_WATCH))[0]:
            server.check(_DURING)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _written(subject: Subject, dtype: torch.dtype, folder: Path, progress: Progress) -> str:
    """Write a checkpoint with random weights, and return its folder."""
    assert subject.shape is not None
    progress(f"{subject.name}: writing random weights")
    checkpoint.write(folder, subject.shape, device=subject.device, dtype=dtype, layers=subject.layers)
    if subject.device.type == "cuda":
        # The servers need the memory.
        torch.cuda.empty_cache()
    return str(folder)


def _files(model: str) -> tuple[Any, Any]:
    """Return the tokenizer and the config of a model. Raises `LoadError` if they can't be loaded."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"no model could be loaded from {model!r}",
            facts={"transformers error": " ".join(str(error).split())[:300]},
            hint="the folder must contain config.json, the weights (model.safetensors) and the tokenizer",
        ) from error


def _check_lengths(config: Any, loads: Sequence[Load]) -> None:
    """Raise `OptionError` if a prompt and its new tokens together are longer than the model's context."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(load.longest + load.new for load in loads)
    if most is not None and longest > most:
        raise OptionError(
            f"requests of up to {longest} tokens are longer than the model's context",
            facts={"max_position_embeddings": most},
            hint="use smaller values of --prompt and --new",
        )


def _mismatch(
    comparison: Agreement, requests: Sequence[Request], expected: Sequence[str], actual: Sequence[str]
) -> Mismatch:
    index = next(index for index, text in enumerate(expected) if text != actual[index])
    return Mismatch(
        "hf_rocm's responses differ from stock's, so nothing is timed",
        facts={
            "answers": f"{comparison.equal} of {comparison.total} are equal",
            "tokens that differ": f"{100 * comparison.rate:.0f} %",
            "tolerance": comparison.tolerance,
            "prompt": repr(requests[index].prompt[:100]),
            "stock": repr(expected[index][:100]),
            "hf_rocm": repr(actual[index][:100]),
        },
        hint="`hf-rocm verify MODEL` compares every layer; please report this with its output",
    )
