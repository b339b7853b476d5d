"""What exists, what happened, and where the time went; imports no torch."""
