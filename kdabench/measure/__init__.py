"""Makes measurements: sessions, workers, contests, CUDA graphs, journals."""
