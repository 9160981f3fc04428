"""`hf-rocm env`: what may be pasted in public, with planted secrets."""

from __future__ import annotations

import json
import platform

import pytest

from hf_rocm.cli import main
from hf_rocm.diagnostics import redact
from hf_rocm.diagnostics.doctor import machine
from tests.diagnostics.recorded import Recorded

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
    # told by name, with something private in the value
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
        recorded.told["environment"] = {**recorded.environment, **(variables or {})}
        monkeypatch.setattr(machine, "ThisMachine", lambda: recorded)
        assert main(["env", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_no_planted_secret_and_no_private_path_comes_out(block) -> None:
    for text in (block(variables=SECRETS), block("--json", variables=SECRETS)):
        for private in PRIVATE:
            assert private not in text, (private, text)


def test_what_an_issue_needs_does(block) -> None:
    printed = block(variables={**SECRETS, "HSA_OVERRIDE_GFX_VERSION": "9.4.2", "HF_ROCM_TIER": "torch"})
    text = " ".join(printed.split())
    for words in (
        "AMD Instinct MI300X (gfx942, 304 CUs)",
        "2.11.0+rocm7.2",
        " ROCm 7.2.0 ",
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


def test_it_has_what_doctor_objects_to(block) -> None:
    text = block(name="mi300x-cuda-torch")
    assert "problem: torch: 2.11.0+cu128, built for CUDA 12.8, on a machine with an AMD GPU" in text
    assert json.loads(block("--json"))["environment"].endswith("doctor: all ok")


def test_names_of_the_user_and_the_host_go_too() -> None:
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
    ],
)
def test_paths_and_keys(text: str, cleaned: str) -> None:
    assert redact.clean(text, home="/home/eve") == cleaned


def test_this_machines_own_block_names_neither_user_nor_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "hf-rocm" in text and "Python" in text
    if len(platform.node()) >= redact.SHORT and platform.node() != "localhost":
        assert f" {platform.node()} " not in text
