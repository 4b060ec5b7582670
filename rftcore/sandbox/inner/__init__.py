"""Programs that run inside sandboxes. Each is one file that imports the standard library alone; the package only reads their text."""
