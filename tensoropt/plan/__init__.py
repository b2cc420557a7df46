"""Plans and points: strategies with their figures, and the files that keep them."""
