"""Passes: small functions from Graph to Graph; their order stands in pipelines.py."""
