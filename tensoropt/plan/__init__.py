"""Points (strategies with their simulated figures), and plans (strategies in files that can be run)."""
