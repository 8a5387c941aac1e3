"""dormouse-bench."""
