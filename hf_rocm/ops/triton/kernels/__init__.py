"""The kernels themselves: each module imports triton and lists in `BUILDS` how to compile its kernels ahead of time."""
