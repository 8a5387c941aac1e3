"""dormouse-quant."""
