"""Roles as processes of this machine: the launcher, its fork server, and the processes that it forks."""
