"""What runs and why: explanations for people."""
