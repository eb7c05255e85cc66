"""Fusion templates, one file each: match, plan, tiles, estimate."""
