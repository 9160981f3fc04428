"""One rank of `hf-rocm bench --tp N`: loads its part of the model as transformers shards it, stock and prepared.

What every rank decides must be decided alike on all, or they wait for each other forever: nothing here goes by a clock
or by free memory of one rank alone, and a side that fails ends the run.
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

from hf_rocm import options
from hf_rocm.bench import inputs, record
from hf_rocm.bench import rates as machine_rates
from hf_rocm.bench.blank import fill
from hf_rocm.bench.cases import Case
from hf_rocm.bench.clock import now, spread, timed
from hf_rocm.bench.floor import floor, local
from hf_rocm.bench.generating import Generated, generate
from hf_rocm.bench.machine import commit, machine
from hf_rocm.bench.measure import WARM_ROUNDS, Mismatch, Result, Timing
from hf_rocm.bench.parity import ReferenceInPlace, trial
from hf_rocm.bench.peers import Peers, exchanged
from hf_rocm.bench.record import Segment
from hf_rocm.bench.run import Subject, describe
from hf_rocm.bench.sides import OURS, STOCK, UNCAPTURED, Side, silence
from hf_rocm.errors import HfRocmError
from hf_rocm.loader import from_pretrained
from hf_rocm.weights.prepare import prepare, restore

LIMIT = timedelta(minutes=30)  # for one exchange: the first call of a kernel may build it meanwhile
JUDGED_PROMPT = 1024  # the longest that the reference sees; its scores must fit on every rank


class Question(NamedTuple):
    """What all ranks are asked. folder: the checkpoint; blank: whether its matrices are to be filled."""

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
    """Answer, or say why not, in files of `folder`. Returns the exit code.

    After a failure the process must end at once (`os._exit`): what ends in order would wait for ranks that are stuck.
    """
    place = Path(folder)
    try:
        told = json.loads((place / "question.json").read_text(encoding="utf-8"))
        question = Question(**{**told, "cases": [Case(*each) for each in told["cases"]]})
        answer = _Rank(question, rank, place).run()
        if rank == 0:
            record.write_text(place / "answer.json", json.dumps(answer.to_dict()))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the command that started us has to name it
        traceback.print_exc()
        record.write_text(place / f"failed-{rank}.json", json.dumps({"at": time.time(), **_words(error)}))
        return 1
    dist.destroy_process_group()
    return 0


def _words(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HfRocmError):
        return error.to_dict()
    lines = str(error).strip().splitlines() or ["no message"]
    return {"message": f"{type(error).__name__}: {lines[0][:300]}", "facts": {}, "hint": None}


class _Rank:
    def __init__(self, question: Question, rank: int, place: Path) -> None:
        self.asked, self.rank, self.place = question, rank, place
        gpu = question.subject["device"] == "cuda"
        self.device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", question.port, question.world, is_master=False, timeout=LIMIT
        )
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=rank,
            world_size=question.world,
            timeout=LIMIT,
            device_id=self.device if gpu else None,
        )
        self.peers = Peers(question.world, self.device)
        dtype = getattr(torch, question.subject["dtype"])
        self.subject = Subject(**{**question.subject, "device": self.device, "dtype": dtype})

    def say(self, text: str) -> None:
        if self.rank == 0:
            record.write_text(self.place / "progress", text)

    def run(self) -> Segment:
        asked = self.asked
        self.say(f"{self.subject.name}: each rank loads its part")
        stock = restore(self._load())
        if asked.blank:
            fill(stock, Path(asked.folder), rank=self.rank)
        made = self._sides(stock)
        self.say(f"{self.subject.name}: how fast do these machines copy, multiply and exchange?")
        rates = machine_rates.measure(self.device, _dtype(stock))
        wire = self.peers.wire()
        reference = ReferenceInPlace(stock)
        results, exchanges = [], []
        with options.override(graphs_memory="50%"):
            for case in asked.cases:
                told = exchanged(stock, case, asked.world)
                least = floor(stock, case, rates, ranks=asked.world, exchange=told.sent / wire)
                results.append(Result(case, least, tuple(self._measure(case, made, reference)), {}))
                exchanges.append({"case": case.title, **self.peers.facts(told, case)})
        return Segment(
            asked.segment,
            machine(self.device),
            commit(),
            describe(self.subject, stock),
            rates,
            asked.rounds,
            results=tuple(results),
            parallel={"tp": asked.world, "world": asked.world, **self.peers.interconnect(), "wire": wire}
            | {"exchanges": exchanges},
        )

    def _load(self) -> Any:
        model = from_pretrained(self.asked.folder, force=False, dtype=self.subject.dtype, tp_plan="auto").eval()
        silence(model)
        return model

    def _sides(self, stock: Any) -> list[Side]:
        """Stock and ours over the very same parameters: a copy would still call the original's sharded layers."""
        wanted = self.asked.sides
        made = {STOCK: Side(STOCK, stock)}
        if {OURS, UNCAPTURED} & set(wanted):
            ours = self._load()
            for module, other in zip(ours.modules(), stock.modules(), strict=True):
                assert module._parameters.keys() == other._parameters.keys()
                module._parameters.update(other._parameters)
            prepare(ours, force=True)
            made[OURS] = Side(OURS, ours)
            made[UNCAPTURED] = Side(UNCAPTURED, ours, {"disable_compile": True})
        return [made[name] for name in wanted]

    def _measure(self, case: Case, sides: list[Side], reference: ReferenceInPlace) -> list[Timing]:
        """Parity of every side, then rounds with each in turn."""
        taken = {side.name: _Taken() for side in sides}
        for side in sides:
            self.say(f"{case.title}: are the numbers of {side.name} right?")
            before = self._start_of_peak()
            began = now(self.device)
            tried = trial(side, case, most=JUDGED_PROMPT)
            taken[side.name].cold = self.peers.slowest(now(self.device) - began)
            taken[side.name].peak = self._peak(before, side.model)
            taken[side.name].tokens = tried.tokens
            self._same_everywhere(side, case, tried.tokens)
            parity = reference.judge(tried)
            taken[side.name].parity = parity
            if parity.refusal is not None:
                raise Mismatch(
                    f"{side.name} gives wrong numbers over {self.asked.world} ranks, so nothing is timed",
                    facts={"case": case.title, "error": f"{parity.error:.4g}", "allowed": f"{parity.allowed:.4g}"},
                    hint="`hf-rocm bench` without --tp shows whether one device has the same; please report this",
                )
        for number in range(WARM_ROUNDS + self.asked.rounds):
            for side in sides:
                self.say(f"{case.title}: round {number + 1} of {WARM_ROUNDS + self.asked.rounds}, {side.name}")
                run = self._turn(side, case)
                if number >= WARM_ROUNDS:
                    taken[side.name].runs.append(run)
        first = taken[sides[0].name]
        timings = [
            taken[side.name].timing(side, None if side is sides[0] else self._against(first, taken[side.name], case))
            for side in sides
        ]
        for side in sides:
            side.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return timings

    def _turn(self, side: Side, case: Case) -> Generated:
        """One run that all begin together, and that ends with the last of them."""
        self.peers.slowest(0.0)
        with torch.no_grad(), side.turn():
            if case.kind == "decode":
                run = generate(side, inputs.tokens(side.model, case.batch, case.prompt), case)
            else:
                arguments = inputs.forward_inputs(side.model, case)
                seconds = timed(lambda: side(**arguments), self.device)
                run = Generated(None, seconds, seconds)
        first = None if run.first is None else self.peers.slowest(run.first)
        return Generated(first, self.peers.slowest(run.each), self.peers.slowest(run.whole))

    def _same_everywhere(self, side: Side, case: Case, tokens: Tensor) -> None:
        """Raise `Mismatch` on every rank unless all chose the same tokens."""
        apart = self.peers.unlike(tokens)
        if apart:
            raise Mismatch(
                f"{side.name}: the ranks chose different tokens, so nothing is timed",
                facts={"case": case.title, "unlike rank 0": ", ".join(map(str, apart))},
                hint="please report this with `hf-rocm env`",
            )

    def _against(self, first: _Taken, other: _Taken, case: Case) -> str | None:
        """How far the tokens are those of the first side: beyond the first difference they can't be compared."""
        assert first.tokens is not None and other.tokens is not None
        if case.kind != "decode":
            return None
        new = min(case.new, first.tokens.shape[1])
        differ = (first.tokens != other.tokens)[:, -new:].any(dim=0)
        if not bool(differ.any()):
            return f"all {new} new tokens are those of {self.asked.sides[0]}"
        same = int(differ.nonzero()[0].item())
        return f"the first {same} new tokens are those of {self.asked.sides[0]}; there, two are closer than rounding"

    def _start_of_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak(self, before: int, model: Any) -> int | None:
        """On the fullest rank: what a side added, and its part of the weights."""
        if self.device.type != "cuda":
            return None
        weights = sum({part.data_ptr(): part.nbytes for each in model.parameters() for part in [local(each)]}.values())
        return int(self.peers.slowest(torch.cuda.max_memory_allocated(self.device) - before + weights))


class _Taken:
    """What the turns of one side gave, on the slowest rank."""

    def __init__(self) -> None:
        self.runs: list[Generated] = []
        self.cold = 0.0
        self.peak: int | None = None
        self.parity: Any = None
        self.tokens: Tensor | None = None

    def timing(self, side: Side, compared: str | None) -> Timing:
        firsts = [each.first for each in self.runs if each.first is not None]
        notes = [note for note in (side.note(), compared) if note is not None]
        return Timing(
            side.name,
            spread([each.each for each in self.runs]),
            spread(firsts) if firsts else None,
            max(0.0, self.cold - spread([each.whole for each in self.runs]).median / 1000),
            self.peak,
            tuple(round(1000 * each.each, 5) for each in self.runs),
            self.parity,
            "; ".join(notes) or None,
        )


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
