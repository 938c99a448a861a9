"""What a serving engine calls."""
