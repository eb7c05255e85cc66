"""Proves artifacts: every stage an artifact must survive, and the signed verdict about it."""
