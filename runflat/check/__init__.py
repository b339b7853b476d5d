"""Proofs and comparisons, as commands."""
