"""port-check: read code and find what breaks or is slow on ROCm. Nothing is run or imported."""

from hf_rocm.tools.porting.check import Report, check
from hf_rocm.tools.porting.findings import Finding, Severity

__all__ = ["Finding", "Report", "Severity", "check"]
