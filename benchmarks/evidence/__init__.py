"""Published results, computed again with our policies: one command each, its table committed beside it."""
