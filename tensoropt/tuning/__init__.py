"""The tuning of plans by measuring their steps on this machine."""
