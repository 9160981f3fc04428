"""The tuning tables of aiter: their columns, their location, and the active rows."""
