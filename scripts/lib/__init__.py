"""What scripts/test, scripts/check and scripts/demo share. The standard library only: it runs before any set-up."""
