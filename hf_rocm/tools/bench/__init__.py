"""hf-rocm bench: compare stock and hf_rocm on one machine. Results are checked, and every time has a lower bound."""
