"""`hf-rocm doctor`: check whether this machine is ready, and explain the reasons if it is not.

Facts are collected first (`collect`): doctor reads files, runs the system's tools, and starts child processes for tasks
that may crash. Every check is a function from facts to findings (`checks`). So doctor itself imports nothing that can
fail, and a recorded machine can be examined in the same way as this one.
"""
