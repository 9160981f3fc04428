"""verify: stock beside hf_rocm, on the user's own machine and weights.

Everything is held to stock in a wider dtype; how far ours may be off is what stock's own run in the model's dtype
makes of it, never a chosen number.
"""

from hf_rocm.diagnostics.verify.run import record, verify

__all__ = ["record", "verify"]
