"""Forwards of encoders, recorded by shape and replayed."""
