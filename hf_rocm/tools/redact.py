"""Remove secrets, names and private paths from a report, to make it publishable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

# Prefixes of the variables in a report. All other variables are left out, in particular HF_TOKEN and similar ones.
REPORTED = (
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
# The formats of known secrets: JWTs, and API keys of model hubs, clouds, Git hosts, registries and chat services.
KEYS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|npm_[A-Za-z0-9]{16,}"
    r"|pypi-[\w-]{16,}|AIza[\w-]{16,}|ya29\.[\w-]{10,}|A[KS]IA[A-Z0-9]{12,}|sk-[\w-]{16,}|[srp]k_(live|test)_\w{10,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|nvapi-[\w-]{16,}|gsk_\w{16,}|r8_\w{16,}|dop_v1_\w{16,}|SG\.[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|(?i:bearer|basic)\s+[\w.~+/=-]{6,}"
)
# Long sequences that mix digits and letters of both cases: unlike words and hexadecimal digests, probably secrets.
RANDOM = re.compile(r"(?<![\w/+-])(?=[\w+-]*[A-Z])(?=[\w+-]*[a-z])(?=(?:[\w+-]*?[0-9]){3})[\w+-]{32,}={0,2}")
# A name that denotes a secret, followed by its value: password=…, "api-key": "…", --token ….
_NAMES = (
    r"(?:token|secret|passw(?:or)?d|passwd|passphrase|pwd|credentials?|cookie|signature|auth(?:orization)?"
    r"|(?<![A-Za-z])(?:[\w-]*[-_ ])?key|apikey)"
)
NAMED = re.compile(
    rf"(?i)(?P<name>(?<![A-Za-z])[\w-]*?{_NAMES}[\"']?(?:\s*[=:]\s*|(?<=\w)\s+(?=[\"'])))"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|(?:(?:basic|bearer|digest|token)\s+)?[^\s,;&]+)"
)
OPTION = re.compile(rf"(?i)(?P<name>(?<!\S)--?[\w-]*{_NAMES}[\w-]*\s+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\S+)")
# The text up to the last @, since a password may contain an @ or a slash.
LOGIN = re.compile(r"(?<=://)[^\s\"'<>]*@")
BARE_LOGIN = re.compile(r"(?<![\w/@:.-])[\w.+-]+:(?!//)[^\s\"'<>]+@(?=[\w.-])")
QUERY = re.compile(r"(?P<address>[A-Za-z][\w+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]+")
FILE = re.compile(r"(?<=file:)//[^\s/\"'<>]*(?P<path>/[^\s\"'<>]*)")
_STEP = r"[^\s:;,'\"()\[\]<>|]"
# Paths, including folder names with up to three spaces.
PATH = re.compile(
    rf"(?<![\w.~/…-])(?P<flag>--?[A-Za-z]+)?"
    rf"(?P<path>~?/(?!/){_STEP}+(?:(?: +(?![/~-]){_STEP}+){{1,3}}?(?<=/){_STEP}+)*)"
)
QUOTED = re.compile(r"(?P<quote>[\"'])(?P<path>~?/(?!/)[^\"'\n]+)(?P=quote)")
# Paths that describe the system and not the user.
PUBLIC = ("/opt/rocm", "/usr", "/lib", "/lib64", "/bin", "/dev", "/sys", "/proc", "/etc", "/boot")
SHORT = 3


def clean(text: str, *, home: str = "", user: str = "", host: str = "", paths: Iterable[str] = ()) -> str:
    """Return the text without secrets, logins in URLs, the names of the user and the host, and private paths.

    Only the last part of a private path is kept: `~/…/model` in the home folder, `…/model` elsewhere. Queries and
    fragments of URLs are removed too. paths: known paths in the text, because no pattern can detect where a path with
    spaces ends.
    """
    text = LOGIN.sub("***@", QUERY.sub(r"\g<address>?***", KEYS.sub("***", text)))
    text = RANDOM.sub("***", BARE_LOGIN.sub("***@", text))
    text = NAMED.sub(r"\g<name>***", OPTION.sub(r"\g<name>***", text))

    def shortened(path: str) -> str:
        in_home = len(home) > 1 and (path == home or path.startswith(f"{home.rstrip('/')}/"))
        return _shortened("~" + path[len(home.rstrip("/")) :] if in_home else path)

    for path in sorted(set(paths), key=len, reverse=True):
        if path.startswith("/") and "/" in path[1:]:
            text = re.sub(rf"{re.escape(path)}(?![\w/])", lambda match: shortened(match[0]), text)
    if len(home) > 1:
        text = text.replace(home.rstrip("/"), "~")
    text = FILE.sub(lambda match: f"//{_shortened(match['path'])}", text)
    text = QUOTED.sub(lambda match: f"{match['quote']}{_shortened(match['path'])}{match['quote']}", text)
    text = PATH.sub(lambda match: f"{match['flag'] or ''}{_shortened(match['path'])}", text)
    for name, substitute in ((user, "<user>"), (host, "<host>")):
        if len(name) >= SHORT and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", substitute, text)
    return text


def value(text: str, *, home: str = "") -> str:
    """Return the value of a variable with private paths shortened, including relative paths and paths with spaces."""
    if "/" not in text or "://" in text:
        # `clean` redacts URLs.
        return text
    pieces = re.split(r"([:;,]|\s+(?=-))", text)
    return "".join(_piece(piece, home) for piece in pieces)


# What may precede a path: a name with `=`, an option, or a compiler option without a space before the path.
_START = re.compile(r"\s*(?:[\w.-]+=)?(?:--?[A-Za-z][\w-]*[ =]|-(?:isystem|idirafter|iquote|include|[A-Za-z]))?")


def _piece(piece: str, home: str) -> str:
    start = _START.match(piece)
    assert start is not None
    path = piece[start.end() :]
    if "/" not in path:
        return piece
    if len(home) > 1 and (path == home or path.startswith(f"{home.rstrip('/')}/")):
        path = "~" + path[len(home.rstrip("/")) :]
    return piece[: start.end()] + _shortened(path)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be reported, with shortened paths. `clean` must be applied to the whole text."""
    return {
        name: value(environment[name], home=environment.get("HOME", ""))
        for name in sorted(environment)
        if name.startswith(REPORTED) and environment[name].strip() and not SECRET.search(name)
    }


def _shortened(path: str) -> str:
    if any(path == root or path.startswith((f"{root}/", f"{root}-")) for root in PUBLIC):
        return path
    if path == "~":
        return path
    start = "~/" if path.startswith("~") else ""
    parts = [part for part in PurePosixPath(path).parts if part not in ("~", "/")]
    if not parts:
        return path
    return f"{start}{'…/' if len(parts) > 1 or not start else ''}{parts[-1]}"
