"""Start and supervision of roles."""
