"""The output of `hf-rocm env` can be published: planted secrets don't appear in it."""

from __future__ import annotations

import json
import platform
import string

import pytest
from hypothesis import given, strategies

from hf_rocm.cli import main
from hf_rocm.tools import redact
from hf_rocm.tools.doctor import machine
from tests.tools.recorded import Recorded

SECRETS = {
    "HF_TOKEN": "hf_QdZrUvXwYbAcEfGhIjKlMnOpQrStUvWx",
    "HUGGING_FACE_HUB_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCd",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "OPENAI_API_KEY": "sk-proj-abcdefghijklmnopqrstuvwx",
    "TORCH_HOME_PASSWORD": "swordfish-1",
    "AITER_LICENSE_KEY": "swordfish-2",
    "HF_ROCM_AUTH": "swordfish-3",
    "SSH_AUTH_SOCK": "/tmp/ssh-swordfish-4/agent.1",
    "http_proxy": "http://mallory:swordfish-5@proxy.example:3128",
    # variables that are printed, although a part of their value is private
    "HIP_LAUNCH_NOTE": "hf_ZyXwVuTsRqPoNmLkJiHgFeDcBa987654",
    "TORCH_INDEX": "https://alice:swordfish-6@wheels.example/simple",
    "HF_ROCM_CACHE": "/home/alice/projects/orion-acquisition/cache",
    "AITER_JIT_DIR": "/mnt/nfs/customers/globex/jit",
    "LD_LIBRARY_PATH": "/opt/rocm/lib:/home/alice/hidden-lab/lib",
    "TRITON_CACHE_DIR": "/scratch/alice/triton",
}
PRIVATE = (
    *("swordfish", "wJalr", "hf_Q", "hf_A", "hf_Z", "sk-proj", "HF_TOKEN", "mallory", "AUTH", "KEY", "PASSWORD"),
    *("alice", "/home/", "orion", "globex", "customers", "hidden-lab", "scratch"),
)


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, name: str = "mi300x", variables: dict[str, str] | None = None) -> str:
        recorded = Recorded(name)
        recorded.data["environment"] = {**recorded.environment, **(variables or {})}
        monkeypatch.setattr(machine, "ThisMachine", lambda: recorded)
        assert main(["env", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_no_planted_secret_and_no_private_path_is_printed(block) -> None:
    for text in (block(variables=SECRETS), block("--json", variables=SECRETS)):
        for private in PRIVATE:
            assert private not in text, (private, text)


def test_facts_that_an_issue_needs_are_printed(block) -> None:
    printed = block(variables={**SECRETS, "HSA_OVERRIDE_GFX_VERSION": "9.4.2", "HF_ROCM_TIER": "torch"})
    text = " ".join(printed.split())
    for words in (
        "AMD Instinct MI300X (gfx942, 304 CUs)",
        "2.11.0+rocm7.1",
        " ROCm 7.1.1 ",
        "amd-aiter 0.1.20.post1",
        "75 yes/verified",
        "HSA_OVERRIDE_GFX_VERSION=9.4.2",
        "HF_ROCM_TIER=torch",
        "HF_ROCM_CACHE=~/…/cache",
        "AITER_JIT_DIR=…/jit",
        "LD_LIBRARY_PATH=/opt/rocm/lib:~/…/lib",
        "https://***@wheels.example/simple",
    ):
        assert words in text, (words, text)
    assert printed.startswith("```text\n") and printed.endswith("```\n")


def test_the_report_contains_the_findings_of_doctor(block) -> None:
    text = block(name="mi300x-cuda-torch")
    assert "problem: torch: 2.11.0+cu128, built for CUDA 12.8, on a machine with an AMD GPU" in text
    assert json.loads(block("--json"))["environment"].endswith("doctor: all ok")


def test_user_and_host_names_are_removed() -> None:
    text = "failed for bobby on node17.cluster: /dev/kfd, module bobbysoxer, root@localhost"
    cleaned = redact.clean(text, home="/home/bobby", user="bobby", host="node17.cluster")
    assert cleaned == "failed for <user> on <host>: /dev/kfd, module bobbysoxer, root@localhost"
    assert "root" in redact.clean("root", user="root")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("file=/home/eve/a/b/model.bin.", "file=~/…/model.bin."),
        ("/home/eve", "~"),
        ("/home/mallory/x/y", "…/y"),
        ("/opt/rocm-7.2.0/lib and /optional/secret", "/opt/rocm-7.2.0/lib and …/secret"),
        ("https://download.pytorch.org/whl/rocm7.2", "https://download.pytorch.org/whl/rocm7.2"),
        ("yes/verified, and/or", "yes/verified, and/or"),
        ("Bearer abc.def", "***"),
        ("token ghp_abcdefghijklmnopqrstuv", "token ***"),
        ("-isystem/srv/globex/include -L/srv/globex/lib", "-isystem…/include -L…/lib"),
        ("file:///srv/globex/torch.whl", "file://…/torch.whl"),
        ("at /srv/Project Orion/x/cache now", "at …/cache now"),
        ("it says '/srv/Project Orion'", "it says '…/Project Orion'"),
        ("https://index.example/simple?token=abc&x=1", "https://index.example/simple?***"),
        ("https://eve:a/b@c@index.example/simple", "https://***@index.example/simple"),
        ("eve:a/b@proxy:3128", "***@proxy:3128"),
        ('{"api-key": "a b", "n": 1}', '{"api-key": ***, "n": 1}'),
        ("max_split_size_mb:128, keys: 5", "max_split_size_mb:128, keys: 5"),
        ("AMD Instinct MI300X (gfx942, 304 CUs)", "AMD Instinct MI300X (gfx942, 304 CUs)"),
    ],
)
def test_private_parts_of_paths_and_keys_are_removed(text: str, cleaned: str) -> None:
    assert redact.clean(text, home="/home/eve") == cleaned


PREFIXES = ("hf_", "ghp_", "npm_", "AIza", "glpat-", "sk-proj-", "xoxb-", "nvapi-", "gsk_", "pypi-", "AKIA", "sk_live_")
ALPHANUMERIC = string.ascii_letters + string.digits
NAMES = (
    "token",
    "password",
    "PASSWD",
    "api-key",
    "api_key",
    "apikey",
    "client_secret",
    "X-Amz-Signature",
    "authorization",
)
FORMS = (
    "{name}={secret}", "{name}: {secret}", '"{name}": "{secret}"', "'{name}' : '{secret}'", "--{name} {secret}",
    "--{name}={secret}", "?a=1&{name}={secret}", "https://h.example/x?{name}={secret}", "x; {name}={secret}; y",
)  # fmt: skip
secrets = strategies.text(ALPHANUMERIC, min_size=12, max_size=40).filter(lambda text: not text.isdigit())
# characters that a password in a URL may contain unquoted
passwords = strategies.text(ALPHANUMERIC + "@/!$&*+=.~-", min_size=6, max_size=30).map(lambda text: f"Zq{text}Zq")
# names that don't occur in the report itself
folders = strategies.text(ALPHANUMERIC + "_ .-", min_size=1, max_size=12).map(lambda text: f"Qx{text.strip()}Qx")


@given(
    strategies.sampled_from(PREFIXES), strategies.text(string.ascii_uppercase + string.digits, min_size=20, max_size=40)
)
def test_a_key_is_removed_anywhere(prefix: str, rest: str) -> None:
    for text in ("{}", "x {} y", "NAME={}", '"{}"', "a,{};b", "https://h.example/{}"):
        assert rest not in redact.clean(text.format(prefix + rest))


@given(strategies.sampled_from(FORMS), strategies.sampled_from(NAMES), secrets)
def test_a_named_secret_is_removed(form: str, name: str, secret: str) -> None:
    assert secret not in redact.clean(form.format(name=name, secret=secret))


@given(passwords, strategies.sampled_from(("https", "http", "socks5h", "postgresql+psycopg")))
def test_a_password_in_a_url_is_removed_completely(password: str, scheme: str) -> None:
    for text in (
        f"{scheme}://eve:{password}@h.example:80/x",
        f"P={scheme}://{password}@h.example",
        f"eve:{password}@h:1",
    ):
        cleaned = redact.clean(text)
        assert "Zq" not in cleaned and "***@h" in cleaned


@given(
    strategies.lists(folders, min_size=2, max_size=5),
    strategies.sampled_from(("/srv/", "~/", "/home/eve/", "", "./", "../")),
)
def test_only_the_last_part_of_a_path_in_a_variable_is_kept(parts: list[str], start: str) -> None:
    path = start + "/".join(parts)
    for text in ("{}", "/opt/rocm/lib:{}", "-I{}", "-L {}", "a={},b"):
        shown = redact.variables({"HIP_X": text.format(path), "HOME": "/home/eve"})["HIP_X"]
        cleaned = redact.clean(f"HIP_X={shown}", home="/home/eve")
        for part in set(parts) - {parts[-1]}:
            assert part not in cleaned.replace(parts[-1], ""), cleaned


@given(strategies.lists(folders, min_size=2, max_size=5))
def test_only_the_last_part_of_a_known_path_in_a_finding_is_kept(parts: list[str]) -> None:
    path = "/srv/" + "/".join(parts)
    cleaned = redact.clean(f"problem: {path} is not there", paths=[path])
    assert cleaned == f"problem: …/{parts[-1]} is not there"


def test_paths_with_spaces_are_shortened_in_variables_and_findings(block) -> None:
    text = block(
        variables={"HF_ROCM_CACHE": "/srv/Globex Orion/the cache/x", "TRITON_CACHE_DIR": "customers/globex/triton"}
    )
    assert "Orion" not in text and "customers" not in text
    assert "HF_ROCM_CACHE=…/x\n" in text and "TRITON_CACHE_DIR=…/triton\n" in text


def test_the_output_of_this_machine_does_not_contain_the_host_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "hf-rocm" in text and "Python" in text
    if len(platform.node()) >= redact.SHORT and platform.node() != "localhost":
        assert f" {platform.node()} " not in text
