"""Sandboxes: processes in which code that a model wrote runs, without access to the host, the network or other processes.

A `Sandbox` (`sandbox`) runs programs with limits, at the strongest tier that this machine offers (`tiers`). A tier is offered if a program that tries to
leave it fails (`probe`). A small process with one thread, the host (`host`), forks a supervisor for each program (`supervisor`), which confines it
(`confinement`), keeps its limits and reports its end. `grading` runs unit tests, `session` is a shell with files.

The modules of the host import the standard library alone, so that it starts at once and holds nothing of the run.
"""
