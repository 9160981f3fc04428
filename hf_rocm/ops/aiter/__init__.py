"""The aiter tier: AMD's kernels, called by keyword as the installed release declares them.

Nothing here imports aiter until a call on an AMD GPU asks for it; `detect` says why it isn't used.
"""
