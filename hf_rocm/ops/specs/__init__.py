"""The types that describe a call: the specification of each operation, and the arguments of its implementations.

Operations and the tiers behind them import these types, so a tier never imports the operation that it serves.
"""
