"""Explorations, which hold a frontier's points and can be chosen from, saved and shown."""
