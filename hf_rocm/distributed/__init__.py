"""The facts that ranks compare before they load a model together, and which of them logs."""
