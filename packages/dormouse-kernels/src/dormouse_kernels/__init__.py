"""dormouse-kernels."""
