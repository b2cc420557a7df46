"""The pages: their layouts, and the callbacks that connect controls with view models."""
