"""hf-rocm bench serve: HTTP traffic to `transformers serve` on this machine, stock and with hf_rocm."""
