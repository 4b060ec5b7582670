"""Starting roles and watching them."""
