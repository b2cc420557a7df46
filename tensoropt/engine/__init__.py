"""The execution of strategies on a rank: lowering, parameters, gradients, evaluation."""
