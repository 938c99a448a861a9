"""Turns measurements into a dispatch policy, and says what it costs and how sure that is."""
