"""Every kernel was executed as machine code. This file runs last, and fails for kernels that no test launched."""

from __future__ import annotations

import pytest

from tests.amdgcn import suite
from tests.amdgcn.kernels import built, entries, modules
from tests.amdgcn.unreached import missed, table

pytestmark = pytest.mark.skipif(suite.gpu() is None, reason="kernels are interpreted in this run")


@pytest.mark.parametrize("name", sorted(modules()))
def test_every_kernel_is_among_the_builds(name):
    module = modules()[name]
    # Both are empty for a module of device functions.
    assert entries(module) == built(module)


# Maximum share of unreached instructions in all compiled variants that ran.
LARGEST_SHARE = 0.05


def test_instructions_are_reached(request):
    """Loops and tails must be reached, too, so a compiled variant needs a larger case in addition to a small one."""
    if request.config.getoption("--machine-code-share") in ("few", "sample"):
        pytest.skip("this run omits cases, so some compiled variants run only with small sizes")
    own = set().union(*map(entries, modules().values()))
    shares = [share for share in suite.record().shares() if share.kernel in own]
    assert len(shares) > 1 and missed(shares) <= LARGEST_SHARE, "\n" + table(shares)


def test_every_kernel_was_executed(request):
    executed = suite.record().kernels()
    expected = {name: entries(module) for name, module in modules().items() if module.BUILDS}
    # One kernel per module is enough.
    if request.config.getoption("--machine-code-share") in ("few", "sample"):
        missing = [name for name, kernels in expected.items() if not kernels & executed]
    else:
        missing = [kernel for kernels in expected.values() for kernel in sorted(kernels - executed)]
    assert not missing, f"not launched by any test: {', '.join(missing)}"
