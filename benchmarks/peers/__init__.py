"""Other stores and operators, each measured in an environment of its own."""
