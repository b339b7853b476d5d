"""One module per command: its flags as a function's parameters, and what it prints. Only `cli` imports this room."""
