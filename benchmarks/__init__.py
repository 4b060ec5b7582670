"""What the README claims, re-runnable: `rft bench NAME`. Each module prints JSON on stdout and progress on stderr."""
