"""Hand-written kernels against the plain torch reference."""
