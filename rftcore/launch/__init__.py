"""`rft run`: the supervisor of a run, the processes of its roles, and what it prints.

`ray_cluster` and `local_processes` start the processes; `terminal` holds all that is printed.
"""
