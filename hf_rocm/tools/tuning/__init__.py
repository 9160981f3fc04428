"""Per-shape tuning: record the GEMMs that a model runs, and write tables with the fastest kernel for every GEMM."""
