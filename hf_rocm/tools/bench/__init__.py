"""hf-rocm bench: compare stock and hf_rocm on one machine. Results are checked, and times are compared with a floor."""
