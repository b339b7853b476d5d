"""Seconds: how long a step takes on given hardware, part by part. No torch."""
