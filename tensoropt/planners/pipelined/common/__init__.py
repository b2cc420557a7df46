"""The shared code of methods that cut a model into pipeline stages."""
