"""Transfers of weights from the ranks of a trainer straight into live engines: offers, the group, the plan, the messages and their hashes."""
