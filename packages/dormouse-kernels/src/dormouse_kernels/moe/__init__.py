"""Mixtures of experts: routing made once, and the expert pass with its backward."""
