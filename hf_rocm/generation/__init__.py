"""Decoding as transformers does it, with less work for every token."""
