"""Images of requests: decoded within limits, laid on a model's canvas, cut into patches. Torch-free."""
