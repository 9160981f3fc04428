"""Per-shape tuning: the products that a model runs, and the tables of the fastest kernel for each."""
