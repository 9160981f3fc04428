"""The kernels themselves: each module imports triton, and lists in `BUILDS` how it is compiled ahead of time."""
