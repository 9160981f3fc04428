"""port-check finds every planted pattern, reports no near misses, and names files that it can't read."""

from __future__ import annotations

import json
import textwrap
import time

import pytest

from hf_rocm.errors import HfRocmError
from hf_rocm.tools.porting import Severity, check
from hf_rocm.tools.porting.findings import excerpt
from hf_rocm.tools.porting.libraries import LIBRARIES, by_header, by_package
from hf_rocm.tools.porting.module import Module
from hf_rocm.tools.porting.rules import RULES
from hf_rocm.tools.porting.shell import commands
from hf_rocm.tools.porting.sources import LARGEST
from tests.tools.porting.patterns import NEAR_MISSES, PLANTED


def checked(folder, name, text):
    (folder / name).write_text(text)
    return check(folder / name)


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_pattern_is_found_once(tmp_path, rule, name, text):
    report = checked(tmp_path, name, text)
    others = [finding for finding in report.findings if finding.rule != rule]
    assert [finding.rule for finding in report.findings if finding.rule == rule] == [rule]
    assert not others
    finding = report.findings[0]
    assert finding.path == name and 1 <= finding.line <= text.count("\n")
    assert finding.why and finding.instead and finding.what


@pytest.mark.parametrize(("rule", "name", "text"), NEAR_MISSES)
def test_a_near_miss_is_not_reported(tmp_path, rule, name, text):
    assert any(rule == planted for planted, *_ in PLANTED)
    assert checked(tmp_path, name, text).findings == ()


def test_every_rule_has_a_finding_and_a_near_miss():
    names = {rule.name for rule in RULES}
    assert {rule for rule, *_ in PLANTED} == names
    assert names - {rule for rule, *_ in NEAR_MISSES} == set()


# Rules for code that is wrong on every platform, so a platform check around it makes no difference.
ALL_PLATFORMS = {"expanded-key-value", "unknown-aiter-name", "unknown-aiter-variable", "aiter-positional-arguments"}
SCRIPTS = (".py", ".sh", ".txt", ".yml", ".yaml", ".cfg", ".cmake")


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_comments_and_strings_are_ignored(tmp_path, rule, name, text):
    if name.endswith((".cu", ".cuh", ".cpp")):
        assert checked(tmp_path, name, f"/*\n{text}*/\nint x;\n").findings == ()
    elif name.endswith(SCRIPTS) or "." not in name:
        assert checked(tmp_path, name, textwrap.indent(text, "# ", lambda line: True)).findings == ()
    if name.endswith(".py") and "'''" not in text:
        assert checked(tmp_path, name, f"x = 1\n'''{text}'''\ndef f():\n    '''{text}'''\n").findings == ()


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_branch_for_the_other_platform_is_not_reported(tmp_path, rule, name, text):
    guards = {
        "a.py": ("import torch\nif torch.version.hip is None:\n", ""),
        "a.sh": ("if ! command -v rocminfo; then\n", "fi\n"),
        "a.cu": ("#if !defined(USE_ROCM)\n", "#endif\n"),
        "CMakeLists.txt": ("if(NOT USE_HIP)\n", "endif()\n"),
        "Makefile": ("ifndef USE_HIP\n", "endif\n"),
    }
    if name in guards and "'''" not in text:
        before, after = guards[name]
        inside = textwrap.indent(text, "    ") if name == "a.py" else text
        report = checked(tmp_path, name, before + inside + after)
        assert {finding.rule for finding in report.findings} == ({rule} & ALL_PLATFORMS)


FAR = "int the_sum_of_everything = the_first_of_many_arguments + the_second_of_many_arguments + "


@pytest.mark.parametrize(
    ("name", "text", "token"),
    [
        ("a.cu", f"__global__ {FAR}__shfl_sync(0xffffffff, x, 0);\n", "_sync(0xffffffff"),
        ("a.cu", f"__global__ {FAR}threadIdx.x % 32 + {FAR};\n", "threadIdx.x % 32"),
        ("a.cu", f"{FAR}f((__nv_fp8_e4m3)x);\n", "__nv_fp8_e4m3"),
        ("a.cu", f'{FAR}1; asm volatile("mov.u32 %0, %laneid;" : "=r"(x)); {FAR}1;\n', '"mov.u32 '),
        ("a.cu", f"#if defined({'A' * 100}) && __CUDA_ARCH__ >= 800\n#endif\n", "__CUDA_ARCH__"),
        ("a.py", f"from numba import {', '.join(f'name_{i}' for i in range(20))}, cuda\n", ", cuda"),
        ("CMakeLists.txt", f"project(a {'LANGUAGE ' * 12}CUDA)\n", "CUDA)"),
    ],
)
def test_a_quoted_line_is_cut_around_the_match(tmp_path, name, text, token):
    """The quotation contains the part that the rule matched, and `…` marks every cut."""
    (finding,) = checked(tmp_path, name, text).findings
    line = " ".join(text.splitlines()[0].split())
    assert token in finding.what and len(finding.what) <= 80
    assert finding.what.strip("…").strip() in line
    assert finding.what.startswith("…") and finding.what.endswith("…") != line.endswith(finding.what[-8:])


def test_a_long_line_is_cut_at_the_end_if_the_match_is_at_the_start(tmp_path):
    (finding,) = checked(tmp_path, "a.cu", f"__nv_fp8_e4m3 x; {FAR}1;\n").findings
    assert finding.what == f"__nv_fp8_e4m3 x; {FAR}"[:79].rstrip() + "…"


def test_a_match_longer_than_a_quote_is_shown_from_its_start():
    assert excerpt("a" * 50 + "b" * 100, 50, 150) == "…" + "b" * 78 + "…"
    assert excerpt("b" * 100, 0, 100) == "b" * 79 + "…"
    assert excerpt("  " + "a" * 60 + "b" * 100, 62, 90) == excerpt("a" * 60 + "b" * 100, 60, 88)


def test_a_translated_include_needs_no_change(tmp_path):
    (finding,) = checked(tmp_path, "a.cu", "#include <cuda_runtime.h>\n").findings
    assert finding.instead == "no change needed: hipify translates this include"


def test_several_rules_can_report_the_same_line(tmp_path):
    line = 'asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"(__shfl_down_sync(0xffffffff, y, threadIdx.x & 31)));\n'
    report = checked(tmp_path, "a.cu", line)
    assert sorted(finding.rule for finding in report.findings) == ["inline-ptx", "lane-mask-32", "warp-size-32"]
    report = checked(tmp_path, "a.sh", "nvidia-smi; pip install pynvml torch==2.6.0; docker run --gpus all x\n")
    assert [finding.rule for finding in report.findings] == [
        "nvidia-tool", "nvidia-only-requirement", "torch-pin", "nvidia-container",
    ]  # fmt: skip


def test_a_notebook_is_read_by_cell(tmp_path):
    cells = [
        {"cell_type": "code", "source": ["from numba import cuda\n", "x = 1\n"]},
        {"cell_type": "markdown", "source": ["import pynvml"]},
        {"cell_type": "code", "source": ["this is no Python"]},
        {"cell_type": "code", "source": "%%bash\necho 1\nnvidia-smi"},
        {"cell_type": "code", "source": ["if x:\n", "    !pip install numpy \\\n", "      pynvml\n", "y = 'ä'"]},
        {"cell_type": "code", "source": ["%%time\n", "import cupy"]},
    ]
    report = checked(tmp_path, "a.ipynb", json.dumps({"cells": cells}, indent=1))
    assert [(finding.rule, finding.what) for finding in report.findings] == [
        ("numba-cuda", "cell 1: from numba import cuda"),
        ("nvidia-tool", "cell 4: nvidia-smi"),
        ("nvidia-only-requirement", "cell 5: pynvml"),
        ("cupy", "cell 6: import cupy"),
    ]
    lines = (tmp_path / "a.ipynb").read_text().splitlines()
    assert "from numba import cuda" in lines[report.findings[0].line - 1]
    assert "import cupy" in lines[report.findings[3].line - 1]
    assert report.left_out == {"a.ipynb": "cells that are not Python: 3 (invalid syntax, line 1)"}
    assert checked(tmp_path, "b.ipynb", "[]").unread == {"b.ipynb": "not a notebook: it has no cells"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 'b c' \"d e\" f\\ g # h", [(1, ("a", "b c", "d e", "f g"))]),
        ("a \\\n  b\nc", [(1, ("a", "b")), (3, ("c",))]),
        ("A=1 B='2 3' sudo a && b || c; d & e | f", [(1, (name,)) for name in "abcdef"]),
        ("a $(b `c`) ${D#e}", [(1, ("a",)), (1, ("b",)), (1, ("c",)), (1, ("${D#e}",))]),
        ('x="$(b "$c")"', [(1, ("b", "$c")), (1, ())]),
        ("cat <<'EOF' > f\na b\nEOF\ng", [(1, ("cat", "<<EOF", ">", "f")), (4, ("g",))]),
        ("bash -c 'a; b'", [(1, ("bash", "-c", "a; b")), (1, ("a",)), (1, ("b",))]),
        ("", []),
        ("#!/bin/sh\n# nothing", []),
        ("if fi; rocm-smi", [(1, ("rocm-smi",))]),
        ("'unclosed", [(1, ("unclosed",))]),
    ],
)
def test_shell_text_is_split_into_commands(text, expected):
    assert [(command.line, command.words) for command in commands(text)] == expected


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("if [ -e /opt/rocm ]; then a; else b; fi; c", "ab"),
        ("if x; then a; elif is_rocm; then b; fi; c", "b"),
        ("if x; then if amd-smi; then a; fi; b; fi", "a"),
        ("command -v nvidia-smi && a\nb", "a"),
        ("case $(uname) in *) a ;; esac", ""),
    ],
)
def test_guarded_commands_are_recognised(text, guarded):
    assert (
        "".join(command.program for command in commands(text) if command.guarded and command.program.isalpha())
        == guarded
    )


def test_a_finding_has_its_line_number_and_severity(tmp_path):
    report = checked(tmp_path, "a.py", "\n\nimport os\n\nimport pynvml\n")
    assert [(finding.line, finding.severity) for finding in report.findings] == [(5, Severity.PROBLEM)]


def test_a_comment_silences_only_its_line_and_its_rule(tmp_path):
    silent = checked(
        tmp_path, "a.py", "import pynvml  # hf-rocm: ignore\nimport tensorrt  # hf-rocm: ignore[cuda-pin]\n"
    )
    assert [finding.line for finding in silent.findings] == [2] and silent.silenced == 1


def test_environments_and_links_to_folders_are_skipped(tmp_path):
    for place in ("own", "env", "own/.git", "own/node_modules"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.py").write_text("import pynvml\n")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "own" / "again").symlink_to(tmp_path)
    done = []
    report = check(tmp_path, progress=lambda *value: done.append(value))
    assert [finding.path for finding in report.findings] == ["own/a.py"] and done == [(1, 1)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.py", b"def f(:\n", "can't parse it: invalid syntax, line 1"),
        ("a.py", b"\xff\xfe\x00binary", "not UTF-8 text"),
        ("a.py", b"x = 1\x00", "null bytes"),
        ("a.cu", b" " * (LARGEST + 1), "larger than 2 MiB"),
        ("a.py", b"(" * 3000, "too many nested"),
        ("pyproject.toml", b"[project\n", "Expected ']'"),
    ],
)
def test_an_unreadable_file_is_named_and_the_check_continues(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.py").write_text("import pynvml\n")
    report = check(tmp_path)
    assert reason in report.unread[name]
    assert [finding.path for finding in report.findings] == ["b.py"] and report.files == 1


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "a.py").symlink_to(tmp_path / "nowhere.py")
    assert "No such file" in check(tmp_path).unread["a.py"]


def test_a_path_without_readable_files_is_an_error(tmp_path):
    with pytest.raises(HfRocmError, match="this path does not exist"):
        check(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(HfRocmError, match="no file here that port-check reads"):
        check(tmp_path)


def test_a_projects_own_macros_for_warp_functions_are_recognised(tmp_path):
    (tmp_path / "a.cu").write_text("x += __shfl_xor_sync(0xffffffff, x, 16);\n")
    (tmp_path / "compat.cuh").write_text("#define __shfl_xor_sync(m, v, l) __shfl_xor(v, l)\n")
    assert check(tmp_path).findings == ()


def test_the_index_of_an_extra_is_not_reported(tmp_path):
    text = """
[tool.uv.sources]
torch = [{ index = "cuda", SCOPE }]
[[tool.uv.index]]
name = "cuda"
url = "https://download.pytorch.org/whl/cu128"
explicit = true
"""
    assert checked(tmp_path, "pyproject.toml", text.replace("SCOPE", 'extra = "gpu"')).findings == ()
    report = checked(tmp_path, "pyproject.toml", text.replace("SCOPE", "marker = \"sys_platform == 'linux'\""))
    assert [(finding.rule, finding.line) for finding in report.findings] == [("cuda-pin", 6)]


def test_cuda_libraries_have_their_rocm_counterparts():
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


def test_the_counts_of_a_report_are_correct(tmp_path):
    data = checked(tmp_path, "a.py", "import pynvml\nimport torch\ntorch.backends.cudnn.benchmark = True\n").to_dict()
    assert data["counts"] == {"problem": 1, "warning": 1, "note": 0}
    assert [finding["severity"] for finding in data["findings"]] == ["problem", "warning"]


INDEX = "[[tool.uv.index]]\nname = 'i{0}'\nurl = 'https://pypi.nvidia.com/{0}'\nexplicit = true\n"


def words(number):
    """Returns a unique word for a number: its digits as letters."""
    return str(number).translate(str.maketrans("0123456789", "abcdefghij")) + "x"


# Functions that return the text of a file with n parts. A check that rereads something for every part would take
# quadratic time.
HOSTILE = {
    "guards.py": lambda n: "def f():\n" + "".join(f"    if {words(number)}: return\n" for number in range(n)),
    "findings.py": lambda n: "import pynvml\n" * n,
    "one_line.py": lambda n: "import pynvml;" * n + "\n",
    "assigned.py": lambda n: "def f():\n" + "    k = repeat_kv(k, 2)\n    scaled_dot_product_attention(k)\n" * n,
    "name.py": lambda n: f"from {'a' * n} import c\n" + "c.x\n" * n,
    "includes.cu": lambda n: "#include <cudnn.h>\n" * n,
    "asm.cu": lambda n: 'asm("' * n,
    "asm_lines.cu": lambda n: 'asm("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")\n' * n,
    "asm_spaces.cu": lambda n: "asm" + " " * n,
    "mnemonic.cu": lambda n: 'asm("' + "a" * n,
    "mnemonic_spaces.cu": lambda n: 'asm("' + " " * n,
    "mnemonic_dots.cu": lambda n: 'asm("' + "a.b" * n + "!",
    "comments.cu": lambda n: "/*" + "/" * n + "/*" * n,
    "quotes.cu": lambda n: '"' + '\\"' * n + "\n",
    "blank.cu": lambda n: "\n" * n,
    "conditions.cu": lambda n: "#if 0\n" * n + "int a;\n" * n,
    "masks.cu": lambda n: "_sync " * n + "int " * n,
    "commands.sh": lambda n: "nvidia-smi; " * n + "if rocm; then\n" * n,
    "substituted.sh": lambda n: "$(" * n + "a" + ")" * n,
    "quoted.sh": lambda n: '"$(' * n,
    "documents.sh": lambda n: "cat <<A\n" * n,
    "continued.sh": lambda n: "a \\\n" * n,
    "Dockerfile": lambda n: "RUN a \\\n# b\n" * n,
    "CMakeLists.txt": lambda n: "if(A)\nproject(a CUDA)\n" * n + "set((" * n,
    "Makefile": lambda n: "ifdef A\na: b\n\tnvcc a\n" * n,
    "a.ipynb": lambda n: json.dumps({"cells": [{"cell_type": "code", "source": ["x\n"] * n}]}, indent=1),
    "escaped.ipynb": lambda n: '{"cells": [{"cell_type": "code", "source": ["x", ' + '"\\u0023a",' * n + '""]}]}',
    "names.py": lambda n: "x = {" + "'attn': 'flash_attention_2'," * n + "}\n",
    "logged.py": lambda n: "import torch\nprint(" + "torch.version.cuda, " * n + ")\n",
    "try.py": lambda n: "import os\ntry:\n" + "    os.system('nvidia-smi')\n" * n + "except ValueError:\n    pass\n",
    "setup.cfg": lambda n: "[options]\ninstall_requires =\n" + "    pynvml\n" * n,
    "requirements.txt": lambda n: "pynvml\n" * n,
    "pyproject.toml": lambda n: "[project]\ndependencies = [" + "".join(f"'p{index}',\n" for index in range(n)) + "]\n",
    "indexes/pyproject.toml": lambda n: "".join(INDEX.format(number) for number in range(n)),
}  # fmt: skip
CHEAP = {
    "asm_spaces.cu",
    "mnemonic.cu",
    "mnemonic_spaces.cu",
    "mnemonic_dots.cu",
    "comments.cu",
    "quotes.cu",
    "blank.cu",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_is_linear_in_the_size_of_the_file(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)

    def seconds(parts):
        file.write_text(HOSTILE[name](parts))
        times = []
        for _ in range(3):
            began = time.process_time()
            report = check(file)
            times.append(time.process_time() - began)
        assert not report.unread
        return min(times)

    parts = 20_000 if name in CHEAP else 1_500
    once, four = seconds(parts), seconds(4 * parts)
    assert four < 9 * max(once, 0.01), f"4 times the parts took {four / once:.1f} times as long"


def test_a_context_keeps_only_the_words_that_rules_match():
    module = Module(HOSTILE["guards.py"](2000) + "    if flash_attn and is_hip: return\n    x\n")
    kept = {id(context): context for context in module.contexts.values()}
    assert len(kept) < 10 and max(len(entry.words) for entry in kept.values()) <= 4


def test_a_link_to_a_file_outside_the_tree_is_not_read(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret.py").write_text("import pynvml\n")
    (tmp_path / "tree" / "own.py").write_text("import tensorrt\n")
    (tmp_path / "tree" / "inner.py").symlink_to("own.py")
    (tmp_path / "tree" / "outer.py").symlink_to("../secret.py")
    report = check(tmp_path / "tree")
    assert report.unread == {"outer.py": "a link to a file outside the folder"}
    assert [finding.path for finding in report.findings] == ["inner.py", "own.py"]
    assert check(tmp_path / "tree" / "outer.py").findings, "a link that the user names is read"
