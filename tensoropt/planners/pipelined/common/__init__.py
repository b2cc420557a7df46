"""What methods that cut a model into stages share."""
