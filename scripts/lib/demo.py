"""scripts/demo: train a model, install the overlays, compare with stock, remove the overlays, and check every step."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib import tree
from lib.console import duration, echo, heading, paragraph, quoted, styled, table, wrapped
from lib.demo_environment import DEMO, MINILM, demo_environment, install_project, minilm, remove, size
from lib.demo_runs import WAYS, Runs, background, show
from lib.environments import NEWEST, ROOT, lock

NOTICE = """\
Everything below runs on this machine's CPU, where the ROCm path runs only if it is forced on. The demo shows that
results agree with stock transformers and that the overlays can be removed without a trace. The times do not predict
those under ROCm: the forced path is written for AMD GPUs, and no part of hf_rocm has run on one yet."""

NEXT = """\
next, here
  .demo/bin/hf-rocm explain .demo/checkpoint --force
  .demo/bin/hf-rocm verify .demo/checkpoint --force --quick
  scripts/demo --clean     (removes .demo)
next, on a machine with an AMD GPU
  pip install . there, then hf-rocm doctor (docs/index.md)"""

# If times of the same code differ by this factor or more, other load on the machine is reported.
DISTURBED = 1.25


@dataclass
class Checks:
    """The demo's checks. All of them run, and one failure makes the demo fail."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def expect(self, condition: bool, text: str) -> None:
        if condition:
            self.passed += 1
            echo("\n".join(wrapped(text, "  ✓ ", "    ")).replace("✓", styled("✓", "green"), 1))
        else:
            self.failed.append(text)
            for part in wrapped(text, "  ✗ ", "    "):
                echo(styled(part, "red"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=NOTICE)
    parser.add_argument(
        "--steps", type=int, default=400, help="training steps (default: 400, half a minute to a few minutes)"
    )
    parser.add_argument("--without-minilm", action="store_true", help="skip the real model, a download of 84 MB")
    parser.add_argument("--clean", action="store_true", help="only remove the files of the demo in .demo")
    options = parser.parse_args(arguments)
    if options.clean:
        with lock():
            removed = remove()
        echo(f"removed .demo: {gigabytes(removed)}" if removed else "nothing to remove: there is no .demo")
        return 0
    began = time.monotonic()
    echo(styled("hf_rocm demo", "bold"))
    paragraph(NOTICE)
    paragraph("The demo takes a few minutes on two cores and uses about 1.1 GB in .demo, which --clean removes.")
    with lock():
        checks = Demo(options.steps, with_minilm=not options.without_minilm).run()
    heading("result")
    for text in checks.failed:
        echo("\n".join(wrapped(text, "  failed  ", " " * 10)).replace("failed", styled("failed", "red"), 1))
    count, elapsed = checks.passed + len(checks.failed), duration(time.monotonic() - began)
    echo(f"  {checks.passed} of {count} checks passed in {elapsed}")
    echo(f"  .demo contains the environment and the model: {gigabytes(size())}")
    echo(f"\n{NEXT}")
    return 1 if checks.failed else 0


def gigabytes(size: int) -> str:
    """`1.1 GB`, or megabytes below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


class Demo:
    """The demo's steps. The project and MiniLM are installed while the model is trained."""

    def __init__(self, steps: int, *, with_minilm: bool) -> None:
        self.checks = Checks()
        heading("1  a virtual environment with the project in it")
        self.environment = demo_environment()
        self.runs = Runs(self.environment, {"generate": DEMO / "checkpoint"})
        training = (ROOT / "scripts" / "train_tiny.py", DEMO / "checkpoint", "--steps", str(steps))
        with background(self.environment, *training) as process:
            install_project(self.environment)
            checkpoint = minilm(self.environment) if with_minilm else None
            if checkpoint is not None:
                self.runs.workloads["embed"] = checkpoint
            self._describe_machine()
            heading("2  a small Llama-type model, trained here on Python's language reference")
            show(process, name="train_tiny.py")

    def run(self) -> Checks:
        heading("3  stock transformers, before anything is installed into it")
        package = self.environment.site_packages / "transformers"
        before = tree.read(package)
        self._as_released()
        self.runs.run("stock")
        heading("4  the overlays are installed into transformers' files")
        try:
            self.runs.shown("hf-rocm", "install-overlays")
            self.runs.shown("python", "-m", "hf_rocm.check_version")
            for way in ("inert", "forced", "loader"):
                self.runs.run(way)
            self.runs.judge()
            self._compare_text()
            self._explain()
            heading(f"7  a real model: all-MiniLM-L6-v2, from the PyPI package {MINILM}")
            if "embed" in self.runs.workloads:
                self._compare_embeddings()
            else:
                echo("  left out: the package is not installed")
        finally:
            heading("8  the overlays are removed")
            self.runs.shown("hf-rocm", "uninstall-overlays")
        after = tree.read(package)
        changed = after.differing(before)
        echo(f"  before  {before.digest[:40]}\n  after   {after.digest[:40]}")
        detail = f"; different: {', '.join(changed[:5])}" if changed else ""
        self.checks.expect(not changed, f"{len(after.files)} files, all with their original content and mode{detail}")
        self._as_released()
        return self.checks

    def _describe_machine(self) -> None:
        code = "import torch, hf_rocm; print(torch.__version__, torch.version.hip, hf_rocm.__version__)"
        torch, hip, version = self.runs.output([self.environment.python, "-I", "-c", code]).split()
        rocm = "no ROCm" if hip == "None" else f"ROCm {hip}"
        facts = {
            "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
            "torch": f"{torch}, {rocm}; every model below is on the CPU",
            "python": f"{platform.python_version()}, transformers {NEWEST}, hf-rocm {version} installed as a wheel",
        }
        for name, fact in facts.items():
            paragraph(fact, f"  {name:<7}  ", " " * 11)

    def _as_released(self) -> None:
        listed, wrong = tree.differing_from_record(self.environment.site_packages, "transformers")
        self.checks.expect(not wrong, f"{listed} files of transformers {NEWEST} are as listed in its wheel")

    def _compare_text(self) -> None:
        heading("5  the same prompt, greedy, in four processes")
        results = self.runs.results("generate")
        stock = results["stock"]
        for way in ("stock", "loader"):
            echo(styled(f"  {WAYS[way].title}", "cyan"))
            quoted(results[way]["fp32"]["text"], break_words=True)
        echo()
        count = len(stock["fp32"]["tokens"])
        self._table(results, {"first token": "first", f"{count} tokens": "all"})
        verdict = self.runs.verdict("generate")
        self._inert_is_stock(results, verdict, "logits")
        for way in ("inert", "forced", "loader"):
            for dtype in ("fp32", "bf16") if way == "inert" else ("fp32",):
                equal = results[way][dtype]["tokens"] == stock[dtype]["tokens"]
                self.checks.expect(equal, f"{WAYS[way].title}, {dtype}: its {count} greedy tokens are those of stock")
        self._within_tolerance(verdict, "logit")
        self._attention_ran(results)

    def _explain(self) -> None:
        heading("6  print(hf_rocm.explain(model))")
        result = self.runs.result("generate", "loader")
        quoted(result["explain"])
        groups = [part for part in result["explanation"]["parts"] if part["group"]]
        fused, total = sum(part["fused"] for part in groups), sum(part["instances"] for part in groups)
        self.checks.expect(0 < fused == total, f"{fused} of {total} groups of linear layers are fused")

    def _compare_embeddings(self) -> None:
        results = self.runs.results("embed")
        stock, loader = results["stock"]["similarity"][0], results["loader"]["similarity"][0]
        first, *others = results["stock"]["sentences"]
        rows = [(sentence, f"{stock[i]:.6f}", f"{loader[i]:.6f}") for i, sentence in enumerate(others, start=1)]
        table((f"similarity to “{first}”", "stock", "hf_rocm"), rows)
        echo()
        self._table(results, {f"{len(others) + 1} sentences": "all"})
        verdict = self.runs.verdict("embed")
        self._inert_is_stock(results, verdict, "embeddings")
        self._within_tolerance(verdict, "embedding")
        self._attention_ran(results)
        self._explain_forwards()

    def _explain_forwards(self) -> None:
        """On a CPU no forward is recorded, and `explain` must report that."""
        echo(f"  {styled('hf_rocm.explain(model).forwards', 'cyan')}")
        sentences = self.runs.result("embed", "loader")["explanation"]["forwards"]
        quoted("\n".join(sentences))
        explained = any("on the CPU" in sentence for sentence in sentences)
        self.checks.expect(explained, "explain gives the reason why the model's forwards are not recorded here")

    def _table(self, results: dict[str, dict[str, Any]], timed: dict[str, str]) -> None:
        """Print a table of times and memory, and how they were measured. timed: column title → key of its times."""
        rows = []
        for way, result in results.items():
            times = (spread(result["fp32"][key]) for key in timed.values())
            memory = f"{result['peak_memory'] / 2**20:.0f} MiB"
            rows.append((WAYS[way].title, f"{result['fp32']['load']:.2f} s", *times, memory))
        table((f"fp32, CPU, {results['stock']['threads']} thread", "loading", *timed, "memory"), rows)
        at_once = "two processes at once" if len(self.runs.workloads) > 1 else "one process at a time"
        paragraph(
            f"times: median of 3 rounds (slowest − fastest), one row after the other; {at_once}, one thread each; "
            "loading includes the imports of hf_rocm and of the model's files; memory: the peak of the process"
        )
        if disturbance := disturbed(results, timed.values()):
            paragraph(disturbance)

    def _inert_is_stock(self, results: dict[str, dict[str, Any]], verdict: dict[str, Any], outputs: str) -> None:
        column = list(WAYS).index("inert")
        equal = all(result["equal"][column] for result in verdict.values())
        self.checks.expect(equal, f"installed, inert: {outputs} bit-equal to stock ({', '.join(verdict)})")
        self.checks.expect(not results["inert"]["ops_imported"], "installed, inert: hf_rocm.ops was not imported")

    def _within_tolerance(self, verdict: dict[str, Any], output: str) -> None:
        for dtype, result in verdict.items():
            self.checks.expect(all(result["finite"]), f"{dtype}: every {output} is finite")
            derived = f"2 × {result['eager_error']:.2g}, eager's own error, + {result['step']:.2g}, a rounding step"
            paragraph(f"allowed in {dtype}: {result['allowed']:.2g} = {derived}", "    ", "      ")
            for way, difference in zip(WAYS, result["difference"], strict=True):
                if way in ("forced", "loader"):
                    text = f"{WAYS[way].title}, {dtype}: max |{output} difference| from stock {difference:.2g}"
                    self.checks.expect(difference <= result["allowed"], text)

    def _attention_ran(self, results: dict[str, dict[str, Any]]) -> None:
        for way in ("forced", "loader"):
            result = results[way]
            calls, heads = result["attention_calls"], result["key_value_heads"]
            shapes = result["attention_shapes"]
            unexpanded = all(key[1] == value[1] == heads for _, (_, key, value) in shapes)
            tiers = "/".join(sorted({tier for tier, _ in shapes}))
            text = f"hf_rocm's attention ran {calls} times ({tiers} tier), on {heads} key/value heads, unexpanded"
            self.checks.expect(calls > 0 and unexpanded, f"{WAYS[way].title}: {text}")


def processor() -> str:
    """The name of the CPU, as the system reports it."""
    try:
        with open("/proc/cpuinfo") as information:  # noqa: PTH123 (not a regular file)
            names = [text.split(":", 1)[1].strip() for text in information if text.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def disturbed(results: dict[str, dict[str, Any]], keys: Iterable[str]) -> str | None:
    """A sentence about the differences between times of the same code, or None if they are small."""
    factors: dict[str, list[float]] = {"rounds": [], "rows": []}
    for key in keys:
        times = {way: result["fp32"][key] for way, result in results.items()}
        factors["rounds"] += [seconds["slowest"] / seconds["fastest"] for seconds in times.values()]
        same = [times[way]["median"] for way in ("stock", "inert")]
        factors["rows"].append(max(same) / min(same))
    rounds, rows = (max(values) for values in factors.values())
    if max(rounds, rows) < DISTURBED:
        return None
    return (
        "Other load on the machine affects these times: the rounds of a row differ by a factor of up to "
        f"{rounds:.1f}, and stock and “installed, inert”, which run the same code, by a factor of up to {rows:.1f}."
    )


def spread(seconds: dict[str, float]) -> str:
    """`132 ms (4)`: median, and slowest − fastest."""
    median, width = (1000 * value for value in (seconds["median"], seconds["slowest"] - seconds["fastest"]))
    return f"{median:.0f} ms ({width:.0f})" if median >= 100 else f"{median:.1f} ms ({width:.1f})"
