"""Back-up, purge and retention."""
