"""Statistics of attention weights, computed tile by tile."""
