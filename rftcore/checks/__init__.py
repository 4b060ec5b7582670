"""Checks of a run before a process is started, in one order: packages, plug-ins, algorithm, models, tasks, devices and memory, trial.

What YAML itself shows (syntax, keys, types) `rftcore.config.run` has validated before. Every check adds to one list (`rftcore.findings`), so all mistakes are
reported at once. `run` holds the order; each other module holds the checks of one thing.
"""
