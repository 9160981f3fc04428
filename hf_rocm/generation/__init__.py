"""Decoding with less work on the host for every token: recorded steps, static caches, inputs updated in place."""
