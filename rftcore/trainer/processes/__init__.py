"""The processes that train one model together: the ranks, their group, and the batch that they share."""
