"""What is laid out beside transformers' mixins can't be imported here."""

collect_ignore = ["standins", "thin"]
