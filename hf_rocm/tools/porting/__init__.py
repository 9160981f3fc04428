"""port-check: find code that breaks or is slow on ROCm, by reading it; nothing is run or imported."""

from hf_rocm.tools.porting.check import Report, check
from hf_rocm.tools.porting.findings import Finding, Severity

__all__ = ["Finding", "Report", "Severity", "check"]
