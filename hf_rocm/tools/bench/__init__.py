"""hf-rocm bench: stock against hf_rocm on one machine, wrong numbers refused, every time beside its floor."""
