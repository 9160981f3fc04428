"""ROCm overlay of transformers.models.mistral3.modeling_mistral3, 4.53 and up.

Served: the norm between the vision tower and the language model. The tower and the language model are
served by the overlays for their model types, such as pixtral and mistral.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.mistral3.modeling_mistral3 import Mistral3RMSNorm

    from hf_rocm import layers

    overlay.binds(Mistral3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
