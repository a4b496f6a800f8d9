"""The CPU executor: programs of hand-written kernels, against the plain torch reference and against themselves."""
