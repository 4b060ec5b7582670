"""Backup, purge and retention."""
