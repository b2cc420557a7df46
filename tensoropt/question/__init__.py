"""What is asked: a model, a cluster, and what may be chosen about the exploration."""
