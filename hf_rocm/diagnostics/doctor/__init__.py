"""`hf-rocm doctor`: is this machine ready, and what is in the way?

Facts are collected first (`collect`), by reading files, running the system's own tools and asking child processes that
may crash; then every check is a function from facts to findings (`checks`). So doctor itself imports nothing that can
fail, and a recorded machine can be examined like the one at hand.
"""
