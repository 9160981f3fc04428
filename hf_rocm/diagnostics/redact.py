"""What must not leave this machine when a report is pasted somewhere: secrets, names, private paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

# variables that matter for a report; everything else stays unsaid, HF_TOKEN and its like first of all
TOLD = (
    "HF_ROCM_",
    "USE_AITER_",
    "USE_OPTIMIZED_OPS",
    "USE_HUB_KERNELS",
    "FORCE_EAGER_ATTENTION",
    "PRESHUFFLE_",
    "AITER_",
    "GPU_ARCHS",
    "CU_NUM",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "FLASH_ATTENTION_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "ROCBLAS_",
    "HIPBLASLT_",
    "MIOPEN_",
    "AMD_",
    "NCCL_",
    "RCCL_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "TRANSFORMERS_SDPA_",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
)
SECRET = re.compile(
    r"TOKEN|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH|COOKIE|SIGNATURE|(^|_)KEY|KEY(_|$)", re.IGNORECASE
)
# what keys look like, whatever the variable is called: the hub's, GitHub's, OpenAI's, AWS's, GitLab's, Slack's, JWTs
KEYS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{12,}|glpat-[\w-]{12,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|(?i:bearer)\s+\S+"
)
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
PATH = re.compile(r"(?<![\w.~/-])~?/(?!/)[^\s:;,'\"()\[\]]+")
# where a path says how the system is set up, and nothing about the user
PUBLIC = ("/opt/rocm", "/usr", "/lib", "/lib64", "/bin", "/dev", "/sys", "/proc", "/etc", "/boot")
SHORT = 3


def clean(text: str, *, home: str = "", user: str = "", host: str = "") -> str:
    """The text without keys, logins in addresses, the names of the user and the host, and private paths.

    Of a private path only its last part is kept: `~/…/model` below the home, `…/model` elsewhere.
    """
    text = LOGIN.sub("***@", KEYS.sub("***", text))
    if len(home) > 1:
        text = text.replace(home.rstrip("/"), "~")
    text = PATH.sub(lambda found: _shortened(found[0]), text)
    for name, instead in ((user, "<user>"), (host, "<host>")):
        if len(name) >= SHORT and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be told, by name and value as they are: `clean` is for the text they end up in."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(TOLD) and environment[name].strip() and not SECRET.search(name)
    }


def _shortened(path: str) -> str:
    if any(path == root or path.startswith((f"{root}/", f"{root}-")) for root in PUBLIC):
        return path
    start = "~/" if path.startswith("~") else ""
    parts = [part for part in PurePosixPath(path).parts if part not in ("~", "/")]
    if not parts:
        return path
    return f"{start}{'…/' if len(parts) > 1 or not start else ''}{parts[-1]}"
