"""Tuning: improving plans by measuring their steps on this machine."""
