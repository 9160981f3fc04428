"""port-check: what in somebody's own model code breaks or slows it on ROCm, found by reading, never by running it."""

from hf_rocm.porting.check import Report, check
from hf_rocm.porting.findings import Finding, Severity

__all__ = ["Finding", "Report", "Severity", "check"]
