"""Per-shape tuning: the GEMMs that a model runs, and tables with the fastest kernel for each."""
