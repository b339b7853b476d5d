"""What each strategy is worth on a given cluster: an event-driven simulator; imports no torch."""
