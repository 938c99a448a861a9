"""Searches each variant's fastest options."""
