"""dormouse-train."""
