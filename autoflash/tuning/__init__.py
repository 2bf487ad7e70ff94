"""Finding the best config: candidates, workers, measurements, the loop."""
