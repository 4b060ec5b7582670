"""Weights sent from the ranks of a trainer straight into live engines: offers, the group, the plan, the bytes and their hashes."""
