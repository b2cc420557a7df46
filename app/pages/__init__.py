"""The pages: layouts, and callbacks that connect controls with views."""
