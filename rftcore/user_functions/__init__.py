"""Plain functions of the user, such as rewards and tools, in processes of their own.

A plain (not async) function may compute, wait or hang. In a separate process it delays neither an event loop nor the engine, and a call
that never returns, even inside C code, is ended at its time limit and reported with its stack.
"""
