"""One rank of `hf-rocm bench --tp N`. It loads its part of each model (stock and prepared), as transformers shards it.

All ranks must make the same decisions; otherwise they would wait for each other until the timeout. So no decision here
depends on the clock or the free memory of a single rank, and a side that fails ends the run.
"""

from __future__ import annotations

import json
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm import files, options
from hf_rocm.errors import HfRocmError
from hf_rocm.loading.prepare import prepare, restore
from hf_rocm.loading.pretrained import from_pretrained
from hf_rocm.tools.bench import inputs
from hf_rocm.tools.bench import rates as machine_rates
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.clock import now, spread, timed
from hf_rocm.tools.bench.dummy_checkpoint import fill
from hf_rocm.tools.bench.generating import Generated, generate
from hf_rocm.tools.bench.machine import commit, machine
from hf_rocm.tools.bench.measure import WARM_ROUNDS, Mismatch, Result, Timing
from hf_rocm.tools.bench.parity import ReferenceInPlace, trial
from hf_rocm.tools.bench.peers import Peers, exchanged
from hf_rocm.tools.bench.record import Segment
from hf_rocm.tools.bench.roofline import floor, local
from hf_rocm.tools.bench.run import Subject, describe
from hf_rocm.tools.bench.variants import PREPARED, STOCK, UNCAPTURED, Side, silence

# The timeout of a collective operation, during which another rank may be compiling.
LIMIT = timedelta(minutes=30)
# The longest prompt of the reference, whose attention scores must fit on every rank.
JUDGED_PROMPT = 1024


class Task(NamedTuple):
    """The task of all ranks. folder: the checkpoint. blank: whether its matrices must be filled with random values."""

    folder: str
    blank: bool
    subject: dict[str, Any]
    cases: list[Case]
    sides: list[str]
    rounds: int
    segment: str
    world: int
    port: int


def main(folder: str, rank: int) -> int:
    """Run one rank, and write the result or the error to files in `folder`. Returns the exit code.

    After a failure the process must end at once (`os._exit`), since an orderly exit would wait for blocked ranks.
    """
    directory = Path(folder)
    try:
        data = json.loads((directory / "task.json").read_text(encoding="utf-8"))
        task = Task(**{**data, "cases": [Case(*case) for case in data["cases"]]})
        result = _Rank(task, rank, directory).run()
        if rank == 0:
            files.write(directory / "result.json", json.dumps(result.to_dict()))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - the command that started this process reports any error
        traceback.print_exc()
        files.write(directory / f"failed-{rank}.json", json.dumps({"at": time.time(), **_words(error)}))
        return 1
    dist.destroy_process_group()
    return 0


def _words(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HfRocmError):
        return error.to_dict()
    lines = str(error).strip().splitlines() or ["no message"]
    return {"message": f"{type(error).__name__}: {lines[0][:300]}", "facts": {}, "hint": None}


class _Rank:
    def __init__(self, task: Task, rank: int, directory: Path) -> None:
        self.task, self.rank, self.directory = task, rank, directory
        gpu = task.subject["device"] == "cuda"
        self.device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", task.port, task.world, is_master=False, timeout=LIMIT
        )
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=rank,
            world_size=task.world,
            timeout=LIMIT,
            device_id=self.device if gpu else None,
        )
        self.peers = Peers(task.world, self.device)
        dtype = getattr(torch, task.subject["dtype"])
        self.subject = Subject(**{**task.subject, "device": self.device, "dtype": dtype})

    def progress(self, text: str) -> None:
        if self.rank == 0:
            files.write(self.directory / "progress", text)

    def run(self) -> Segment:
        requested = self.task
        self.progress(f"{self.subject.name}: loading each rank's part")
        stock = restore(self._load())
        if requested.blank:
            fill(stock, Path(requested.folder), rank=self.rank)
        sides = self._sides(stock)
        self.progress(f"{self.subject.name}: measuring the rates of copies, GEMMs and all-reduces")
        rates = machine_rates.measure(self.device, _dtype(stock))
        wire = self.peers.wire()
        reference = ReferenceInPlace(stock)
        results, exchanges = [], []
        with options.override(graphs_memory="50%"):
            for case in requested.cases:
                exchange = exchanged(stock, case, requested.world)
                least = floor(stock, case, rates, ranks=requested.world, exchange=exchange.sent / wire)
                results.append(Result(case, least, tuple(self._measure(case, sides, reference)), {}))
                exchanges.append({"case": case.title, **self.peers.facts(exchange, case)})
        return Segment(
            requested.segment,
            machine(self.device),
            commit(),
            describe(self.subject, stock),
            rates,
            requested.rounds,
            results=tuple(results),
            parallel={"tp": requested.world, "world": requested.world, **self.peers.interconnect(), "wire": wire}
            | {"exchanges": exchanges},
        )

    def _load(self) -> Any:
        model = from_pretrained(self.task.folder, force=False, dtype=self.subject.dtype, tp_plan="auto").eval()
        silence(model)
        return model

    def _sides(self, stock: Any) -> list[Side]:
        """Return the sides. The prepared model is loaded separately, and then shares the parameters of the stock model.

        It is not a copy of the stock model, because a copy would call the stock model's sharded layers.
        """
        wanted = self.task.sides
        sides = {STOCK: Side(STOCK, stock)}
        if {PREPARED, UNCAPTURED} & set(wanted):
            prepared = self._load()
            for module, other in zip(prepared.modules(), stock.modules(), strict=True):
                assert module._parameters.keys() == other._parameters.keys()
                module._parameters.update(other._parameters)
            prepare(prepared, force=True)
            sides[PREPARED] = Side(PREPARED, prepared)
            sides[UNCAPTURED] = Side(UNCAPTURED, prepared, {"disable_compile": True})
        return [sides[name] for name in wanted]

    def _measure(self, case: Case, sides: list[Side], reference: ReferenceInPlace) -> list[Timing]:
        """Check the parity of every side, and then time all sides in interleaved rounds."""
        samples = {side.name: _Samples() for side in sides}
        for side in sides:
            self.progress(f"{case.title}: checking the results of {side.name}")
            before = self._start_of_peak()
            began = now(self.device)
            attempt = trial(side, case, most=JUDGED_PROMPT)
            samples[side.name].cold = self.peers.slowest(now(self.device) - began)
            samples[side.name].peak = self._peak(before, side.model)
            samples[side.name].tokens = attempt.tokens
            self._same_everywhere(side, case, attempt.tokens)
            parity = reference.judge(attempt)
            samples[side.name].parity = parity
            if parity.refusal is not None:
                raise Mismatch(
                    f"{side.name} returns wrong results on {self.task.world} ranks, so nothing is timed",
                    facts={"case": case.title, "error": f"{parity.error:.4g}", "allowed": f"{parity.allowed:.4g}"},
                    hint="`hf-rocm bench` without --tp shows whether one device fails too; please report this",
                )
        for number in range(WARM_ROUNDS + self.task.rounds):
            for side in sides:
                self.progress(f"{case.title}: round {number + 1} of {WARM_ROUNDS + self.task.rounds}, {side.name}")
                run = self._turn(side, case)
                if number >= WARM_ROUNDS:
                    samples[side.name].runs.append(run)
        first = samples[sides[0].name]
        timings = [
            samples[side.name].timing(
                side, None if side is sides[0] else self._agreement_note(first, samples[side.name], case)
            )
            for side in sides
        ]
        for side in sides:
            side.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return timings

    def _turn(self, side: Side, case: Case) -> Generated:
        """Run one side once. All ranks start together, and every time is that of the slowest rank."""
        self.peers.slowest(0.0)
        with torch.no_grad(), side.turn():
            if case.kind == "decode":
                run = generate(side, inputs.tokens(side.model, case.batch, case.prompt), case)
            else:
                arguments = inputs.forward_inputs(side.model, case)
                seconds = timed(lambda: side(**arguments), self.device)
                run = Generated(None, seconds, seconds)
        first = None if run.first is None else self.peers.slowest(run.first)
        return Generated(first, self.peers.slowest(run.later), self.peers.slowest(run.whole))

    def _same_everywhere(self, side: Side, case: Case, tokens: Tensor) -> None:
        """Raise `Mismatch` on every rank unless all chose the same tokens."""
        differing = self.peers.differing(tokens)
        if differing:
            raise Mismatch(
                f"{side.name}: the ranks chose different tokens, so nothing is timed",
                facts={"case": case.title, "unlike rank 0": ", ".join(map(str, differing))},
                hint="please report this with the output of `hf-rocm env`",
            )

    def _agreement_note(self, first: _Samples, other: _Samples, case: Case) -> str | None:
        """Return a note on the tokens that agree with the first side's; None for cases other than decode.

        Tokens after a difference can't be compared.
        """
        assert first.tokens is not None and other.tokens is not None
        if case.kind != "decode":
            return None
        new = min(case.new, first.tokens.shape[1])
        differ = (first.tokens != other.tokens)[:, -new:].any(dim=0)
        if not bool(differ.any()):
            return f"all {new} new tokens agree with those of {self.task.sides[0]}"
        same = int(differ.nonzero()[0].item())
        agree = f"the first {same} new tokens agree with those of {self.task.sides[0]}"
        return f"{agree}; the next ones differ, which rounding can cause"

    def _start_of_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak(self, before: int, model: Any) -> int | None:
        """Return the peak memory on the rank that uses the most: the side's allocations plus that rank's weights."""
        if self.device.type != "cuda":
            return None
        weights = sum(
            {part.data_ptr(): part.nbytes for parameter in model.parameters() for part in [local(parameter)]}.values()
        )
        return int(self.peers.slowest(torch.cuda.max_memory_allocated(self.device) - before + weights))


class _Samples:
    """The measurements of one side. Times are those of the slowest rank."""

    def __init__(self) -> None:
        self.runs: list[Generated] = []
        self.cold = 0.0
        self.peak: int | None = None
        self.parity: Any = None
        self.tokens: Tensor | None = None

    def timing(self, side: Side, compared: str | None) -> Timing:
        firsts = [run.first for run in self.runs if run.first is not None]
        notes = [note for note in (side.note(), compared) if note is not None]
        return Timing(
            side.name,
            spread([run.later for run in self.runs]),
            spread(firsts) if firsts else None,
            max(0.0, self.cold - spread([run.whole for run in self.runs]).median / 1000),
            self.peak,
            tuple(round(1000 * run.later, 5) for run in self.runs),
            self.parity,
            "; ".join(notes) or None,
        )


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
