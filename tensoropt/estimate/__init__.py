"""Estimate before any search: what a model's training needs of each device, by arithmetic."""
