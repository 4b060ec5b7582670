"""Maintenance of a buffer: backup, purge, retention, archives, verification, and the roles of its database."""
