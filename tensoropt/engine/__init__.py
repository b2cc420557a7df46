"""The execution of a strategy on one rank: lowering to an fx graph, parameters, gradients, evaluation."""
