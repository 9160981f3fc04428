"""`hf-rocm doctor`: is this machine ready, and what is in the way?

Facts are collected first (`collect`): doctor reads files, runs the system's tools, and starts child processes for what
may crash. Every check is a function from facts to findings (`checks`). Doctor itself therefore imports nothing that can
fail, and a recorded machine can be examined in the same way as this one.
"""
