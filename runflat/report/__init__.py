"""Figures and pages from result files; imports no torch."""
