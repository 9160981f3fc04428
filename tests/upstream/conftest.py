"""Files that are meant to be copied next to transformers' mixins can't be imported here."""

collect_ignore = ["standins", "thin"]
