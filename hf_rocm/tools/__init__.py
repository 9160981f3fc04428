"""Tools that explain, verify, measure and tune models, examine machines, and check code before it is ported."""
