"""Spelling of kernel plans: Triton text and C text."""
