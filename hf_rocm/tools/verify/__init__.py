"""verify: compare hf_rocm with stock transformers on the user's machine and weights.

The reference is stock transformers in a wider dtype. The allowed error of a numerical result is derived from the error
of stock transformers in the model's dtype.
"""

from hf_rocm.tools.verify.run import record, verify

__all__ = ["record", "verify"]
