"""Install an extra's requirements in addition to the package itself: with uv if available, else with pip.

`installer` and `imports` use only the standard library, because set-up of a checkout runs them before anything else is installed.
Importing one module of this package imports none of the others. `overrides.txt` and `constraints.txt` are part of the wheel.
"""
