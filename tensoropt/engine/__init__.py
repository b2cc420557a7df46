"""Strategies -> what a rank computes."""
