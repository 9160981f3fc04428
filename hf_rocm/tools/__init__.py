"""Tools that explain, verify, measure and tune."""
