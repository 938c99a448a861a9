"""What kernels here are made of on the device, and how they become binaries."""
