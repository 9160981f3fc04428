"""port-check: every planted pattern is found where it is, nothing that only looks like one, and no file breaks it."""

from __future__ import annotations

import pytest

from hf_rocm.errors import HfRocmError
from hf_rocm.porting import Severity, check
from hf_rocm.porting.check import LARGEST
from hf_rocm.porting.libraries import LIBRARIES, by_header, by_package
from tests.porting.patterns import NEAR_MISSES, PLANTED


def found(folder, name, text):
    (folder / name).write_text(text)
    return check(folder / name)


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_pattern_is_found_once(tmp_path, rule, name, text):
    report = found(tmp_path, name, text)
    only_import = [each for each in report.findings if each.rule != rule]
    assert [each.rule for each in report.findings if each.rule == rule] == [rule]
    assert not only_import
    finding = report.findings[0]
    assert finding.path == name and 1 <= finding.line <= text.count("\n")
    assert finding.why and finding.instead and finding.what


@pytest.mark.parametrize(("rule", "name", "text"), NEAR_MISSES)
def test_a_near_miss_is_left_alone(tmp_path, rule, name, text):
    assert any(rule == planted for planted, *_ in PLANTED)
    assert found(tmp_path, name, text).findings == ()


def test_there_are_thirty_of_each():
    assert len(PLANTED) >= 30 and len(NEAR_MISSES) >= 30


def test_the_line_is_that_of_the_finding(tmp_path):
    report = found(tmp_path, "a.py", "\n\nimport os\n\nimport pynvml\n")
    assert [(each.line, each.severity) for each in report.findings] == [(5, Severity.PROBLEM)]


def test_a_comment_silences_its_line_and_its_rule_only(tmp_path):
    silent = found(tmp_path, "a.py", "import pynvml  # hf-rocm: ignore\nimport tensorrt  # hf-rocm: ignore[cuda-pin]\n")
    assert [each.line for each in silent.findings] == [2] and silent.silenced == 1


def test_a_tree_is_read_without_environments_and_links(tmp_path):
    for place in ("own", "env", "own/.git", "own/node_modules"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.py").write_text("import pynvml\n")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "own" / "again").symlink_to(tmp_path)
    done = []
    report = check(tmp_path, progress=lambda *each: done.append(each))
    assert [each.path for each in report.findings] == ["own/a.py"] and done == [(1, 1)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.py", b"def f(:\n", "can't parse it: invalid syntax, line 1"),
        ("a.py", b"\xff\xfe\x00binary", "not text in UTF-8"),
        ("a.py", b"x = 1\x00", "null bytes"),
        ("a.cu", b" " * (LARGEST + 1), "larger than 2 MiB"),
        ("a.py", b"(" * 3000, "too many nested"),
        ("pyproject.toml", b"[project\n", "Expected ']'"),
    ],
)
def test_what_cannot_be_read_is_named_and_stops_nothing(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.py").write_text("import pynvml\n")
    report = check(tmp_path)
    assert reason in report.unread[name]
    assert [each.path for each in report.findings] == ["b.py"] and report.files == 1


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "a.py").symlink_to(tmp_path / "nowhere.py")
    assert "No such file" in check(tmp_path).unread["a.py"]


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(HfRocmError, match="nothing to check"):
        check(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(HfRocmError, match="nothing that port-check reads"):
        check(tmp_path)


def test_warp_functions_of_the_project_itself_count(tmp_path):
    (tmp_path / "a.cu").write_text("x += __shfl_xor_sync(0xffffffff, x, 16);\n")
    (tmp_path / "compat.cuh").write_text("#define __shfl_xor_sync(m, v, l) __shfl_xor(v, l)\n")
    assert check(tmp_path).findings == ()


def test_the_index_of_an_extra_is_nobodys_problem(tmp_path):
    text = """
[tool.uv.sources]
torch = [{ index = "cuda", SCOPE }]
[[tool.uv.index]]
name = "cuda"
url = "https://download.pytorch.org/whl/cu128"
explicit = true
"""
    assert found(tmp_path, "pyproject.toml", text.replace("SCOPE", 'extra = "gpu"')).findings == ()
    report = found(tmp_path, "pyproject.toml", text.replace("SCOPE", "marker = \"sys_platform == 'linux'\""))
    assert [(each.rule, each.line) for each in report.findings] == [("cuda-pin", 6)]


def test_the_table_of_libraries_has_every_pair():
    pairs = {library.cuda: library.rocm for library in LIBRARIES}
    for cuda, rocm in {
        "cuBLAS": "rocBLAS", "cuBLASLt": "hipBLASLt", "cuSPARSE": "rocSPARSE", "cuFFT": "rocFFT", "cuRAND": "rocRAND",
        "NCCL": "RCCL", "Thrust": "rocThrust", "cuDNN": "MIOpen", "CUTLASS": "Composable Kernel",
        "TensorRT": "MIGraphX",
    }.items():  # fmt: skip
        assert rocm in pairs[cuda]
    assert any("aiter" in library.rocm for library in LIBRARIES if "flash_attn" in library.packages)
    assert by_header("cublasLt.h").cuda == "cuBLASLt" and by_header("cublas_v2.h").cuda == "cuBLAS"
    assert by_header("vector") is None and by_package("flash_attn_mine") is None


def test_a_report_counts_itself(tmp_path):
    told = found(tmp_path, "a.py", "import pynvml\nimport torch\ntorch.backends.cudnn.benchmark = True\n").to_dict()
    assert told["counts"] == {"problem": 1, "warning": 1, "note": 0}
    assert [each["severity"] for each in told["findings"]] == ["problem", "warning"]
