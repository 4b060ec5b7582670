"""The processes that work for a run: their rows, heartbeats, leases, activities and shared devices."""
