"""Search and its record: what was tried, what was chosen, and how to choose the same again."""
