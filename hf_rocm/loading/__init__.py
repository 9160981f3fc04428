"""Load models and prepare them: `from_pretrained`, `prepare` and `auto_prepare`."""
