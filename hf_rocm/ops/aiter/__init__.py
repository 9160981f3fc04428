"""The aiter tier: AMD's kernels, called by keyword according to the declarations of the installed release.

aiter is imported only for a call on an AMD GPU. `detect` determines whether it can be used, and why not.
"""
