"""The float64 reference, operands to try, and how results are compared with it."""
