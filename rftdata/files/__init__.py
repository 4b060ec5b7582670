"""Files that survive a power loss, and files inside a folder, named by the database."""
