"""Placeholder docstring; the folder's owner replaces it."""
