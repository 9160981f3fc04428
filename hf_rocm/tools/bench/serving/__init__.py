"""hf-rocm bench serve: send HTTP requests to `transformers serve` on this machine, without and with hf_rocm."""
