"""Without ROCm, an installed overlay has an effect on transformers only if it is forced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.overlay.conftest import MODELS, Site
from tests.parity import models
from tests.releases import at_the_ends


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: models.save_checkpoint(name, tmp_path_factory.mktemp(name), torch.float32) for name in MODELS}


@pytest.fixture(scope="module")
def installed(whole_site, tmp_path_factory) -> Site:
    """A separate transformers with all overlays installed."""
    path = tmp_path_factory.mktemp("installed") / "site"
    shutil.copytree(whole_site.path, path, copy_function=os.link)
    result = run(None, "-m", "hf_rocm", "install-overlays", "--transformers-path", str(path / "transformers"))
    assert result.returncode == 0, result.stderr
    return Site(path)


def run(site: Site | None, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, with the site's transformers first on the path if there is a site."""
    paths = [*([str(site.path)] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_ROCM")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**variables, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **environment},
        cwd=site.path if site else None,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def report(
    site: Site, checkpoints: dict[str, Path], body: str, first: str = "", **environment: str
) -> dict[str, object]:
    """Run a script that fills `facts` for every model. Returns the facts."""
    script = (
        first
        + textwrap.dedent(
            """
        import hashlib, json, sys, torch, transformers
        import transformers.models.bert.modeling_bert, transformers.models.gemma.modeling_gemma
        import transformers.models.llama.modeling_llama, transformers.models.qwen3.modeling_qwen3
        assert transformers.__file__.startswith(sys.argv[1]), transformers.__file__
        torch.set_num_threads(1)
        checkpoints, facts = json.loads(sys.argv[2]), {}
        def load(name):
            auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
            return auto.from_pretrained(checkpoints[name]).eval()
        def digest(model):
            with torch.inference_mode():
                logits = model(input_ids=torch.arange(3, 21).view(2, 9)).logits
            return hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        """
        )
        + textwrap.dedent(body)
        + "\nprint(json.dumps(facts))"
    )
    folders = json.dumps({name: str(folder) for name, folder in checkpoints.items()})
    result = run(site, "-c", script, str(site.path), folders, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


INERT = """
before = set(sys.modules)
for name in checkpoints:
    model = load(name)
    kinds = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models")}
    facts[name] = {
        "outputs": digest(model),
        "forwards": sorted(f"{kind.__qualname__}.{kind.forward.__code__.co_filename}" for kind in kinds),
        "modules": [str(type(module)) for module in model.modules()],
    }
facts["imported"] = sorted(module for module in sys.modules if module.split(".")[0] in ("hf_rocm", "aiter", "triton"))
"""


@pytest.fixture(scope="module")
def stock(whole_site, checkpoints):
    """The results of a transformers without overlays."""
    return report(whole_site, checkpoints, INERT)


def test_without_force_an_installed_overlay_changes_nothing(installed, whole_site, checkpoints, stock):
    inert = report(installed, checkpoints, INERT)
    imported = inert.pop("imported")
    assert not [name for name in imported if name.startswith(("hf_rocm.ops", "hf_rocm.layers", "aiter"))]
    # The block ran.
    assert "hf_rocm.overlay.bind" in imported
    assert [name for name in stock["imported"] if name.startswith("hf_rocm")] == []
    text = json.dumps(inert).replace(str(installed.path), str(whole_site.path))
    assert json.loads(text) == {name: stock[name] for name in checkpoints}


FORCED = """
from hf_rocm import ops
for name in checkpoints:
    model = load(name)
    with torch.inference_mode(), ops.recording() as routes:
        model(input_ids=torch.arange(3, 21).view(2, 9))
    config = model.config
    attended = [route for route in routes if route.operation == "attention"]
    facts[name] = {
        "layers": config.num_hidden_layers,
        "calls": len(attended),
        "heads": sorted({route.shapes[0][1] for route in attended}),
        "kv_heads": sorted({shape[1] for route in attended for shape in route.shapes[1:]}),
        "expected": [config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)],
        "norms": sum(route.operation == "rms_norm" for route in routes),
    }
facts["active"] = [name for name in sys.modules if name.startswith("hf_rocm._active")]
"""


def test_forced_auto_models_run_hf_rocms_attention_with_unexpanded_keys_and_values(installed, checkpoints):
    facts = report(installed, checkpoints, FORCED, HF_ROCM_FORCE="1")
    # The installed block runs, and no overlay is activated in memory.
    assert facts.pop("active") == []
    assert facts.keys() == checkpoints.keys()
    for name, result in facts.items():
        heads, kv_heads = result["expected"]
        assert result["calls"] == result["layers"] == 2
        assert result["heads"] == [heads] and result["kv_heads"] == [kv_heads]
        assert (result["norms"] > 0) == (name != "bert")


def test_without_hf_rocm_an_installed_overlay_is_stock(installed, checkpoints, stock):
    """Simulate an environment in which hf-rocm was uninstalled but its blocks remain."""
    body = INERT.replace('facts["imported"]', "hidden")
    blocked_import = "import sys; sys.modules['hf_rocm'] = None\n"
    result = report(installed, checkpoints, body, blocked_import, HF_ROCM_FORCE="1")
    assert {name: result[name]["outputs"] for name in checkpoints} == {
        name: stock[name]["outputs"] for name in checkpoints
    }


@at_the_ends
def test_with_a_block_of_another_release_the_model_stays_stock_with_one_message(installed, checkpoints):
    script = "import hf_rocm\nhf_rocm.__version__ = '99.0'\n"
    result = run(
        installed,
        "-W",
        "always",
        "-c",
        script + "import transformers.models.llama.modeling_llama as m\nprint(m.LlamaMLP.forward.__code__.co_filename)",
        HF_ROCM_FORCE="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("modeling_llama.py")
    assert result.stderr.count("the model stays stock") == 1 and "hf-rocm install-overlays" in result.stderr


@at_the_ends
def test_an_invalid_variable_does_not_break_the_import(installed):
    result = run(
        installed, "-W", "always", "-c", "import transformers.models.llama.modeling_llama", HF_ROCM_FORCE="maybe"
    )
    assert result.returncode == 0, result.stderr
    assert "HF_ROCM_FORCE=maybe" in result.stderr
