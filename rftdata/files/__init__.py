"""Files that survive a power loss, and files inside a folder that names from the database cannot leave."""
