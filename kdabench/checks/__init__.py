"""What a checkout and a machine must hold: variants verified, binaries certified, what is
installed."""
