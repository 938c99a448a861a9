"""What a reviewer looks at: comparisons, curves, figures, reports."""
