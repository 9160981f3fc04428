"""Installed overlays that four workers import at the same time: three use them, and no source file is written."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
import torch

from hf_rocm.overlay.commands import install
from tests.distributed.launch import ROOT, run_ranks, succeeded
from tests.distributed.test_failures import save
from tests.overlay.conftest import Site, hashes, whole_site  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

# there is no bytecode of the model yet: all workers compile and write it
WORKER = """
import json, os, sys, time
from pathlib import Path
meeting, checkpoint = Path(sys.argv[1]), sys.argv[2]
(meeting / f"here-{os.environ['RANK']}").touch()
while len(list(meeting.glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
import torch, transformers
from transformers import LlamaForCausalLM
from hf_rocm import ops
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
with torch.no_grad(), ops.recording() as routes:
    logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits
print(json.dumps([transformers.__file__, sorted({route.operation for route in routes}), logits.flatten().tolist()]))
"""


def test_concurrent_imports_use_the_overlay_and_write_no_source_file(whole_site, tmp_path):  # noqa: F811 - the fixture
    # hard links to the original files suffice, because the installer replaces files and never writes into them
    site = Site(tmp_path / "site")
    shutil.copytree(whole_site.path, site.path, copy_function=os.link)
    shutil.rmtree(site.root / "models" / "llama" / "__pycache__", ignore_errors=True)
    plan, _ = install(["llama"], transformers_path=site.path)
    plan.check()
    before = hashes(site.root)
    checkpoint = save(tmp_path / "checkpoint", heads=4, groups=2)
    paths = [str(site.path), *filter(None, sys.path), str(ROOT)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_ROCM_FORCE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    # The model of the last rank stays stock.
    world = 4

    def environ(rank):
        return {**environment, "HF_ROCM_FORCE": "0"} if rank == world - 1 else environment

    ranks = succeeded(run_ranks(WORKER, tmp_path, checkpoint, world=world, environ=environ))
    *prepared, stock = [json.loads(rank.out) for rank in ranks]
    assert hashes(site.root) == before
    assert stock[1] == []
    for file, operations, logits in prepared:
        assert file == str(site.root / "__init__.py")
        assert {"attention", "rms_norm"} <= set(operations)
        assert logits == prepared[0][2]
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(stock[2]))
