"""Token arrays in append-only Arrow files."""
