"""dormouse-model."""
