"""Parts of a step that several kernels share."""
