"""Points and plans: strategies with their figures, and plan files."""
