"""hf-rocm bench: compare stock and hf_rocm on one machine, check the results, and compare times with the roofline."""
