"""The last steps of a load: what `from_pretrained`, `prepare` and `auto_prepare` share."""
