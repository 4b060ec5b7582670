"""Installs what an extra needs beside the package itself: with uv where it can be had, else with pip.

Modules that set-up of a checkout uses (`installer`, `imports`) need only the standard library, because nothing else is installed at that
moment; importing one of them imports nothing of the others. `overrides.txt` and `constraints.txt` are part of the wheel.
"""
