"""The tuning tables of aiter: their columns, where they lie, and which rows are in force."""
