"""What to do: units, assignments, plans, batch split, sync groups, transfers and costs (pure, no torch)."""
