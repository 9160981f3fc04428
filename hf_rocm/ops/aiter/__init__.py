"""The aiter tier: AMD's kernels, called with keyword arguments that the installed release declares.

aiter is imported only on an AMD GPU, when it is first needed. `detect` determines whether it can be used and, if not,
why.
"""
