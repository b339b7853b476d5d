"""runflat: train a causal language model with data-parallel replicas of different tensor-parallel degree."""

__version__ = "0.1.0"
