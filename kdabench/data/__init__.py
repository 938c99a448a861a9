"""What is written down: sweeps, measurements, devices, and where they came from."""
