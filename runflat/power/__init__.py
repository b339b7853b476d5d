"""How much speed power buys, and which devices may have more of it; imports no torch."""
