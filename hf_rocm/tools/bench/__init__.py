"""hf-rocm bench: compare stock and hf_rocm on one machine, with checked results, and a floor for every time."""
