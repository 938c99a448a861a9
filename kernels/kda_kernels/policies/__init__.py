"""Generated policies, one module per device; see docs/policy.md."""
