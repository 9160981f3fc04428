"""hf-rocm bench: stock against hf_rocm on one machine, with wrong results refused, and every time next to its floor."""
