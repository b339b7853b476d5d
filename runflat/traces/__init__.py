"""Where failures come from: generators and readers of recorded traces; imports no torch."""
