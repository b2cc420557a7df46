"""Plans improved by what their steps take on this machine."""
