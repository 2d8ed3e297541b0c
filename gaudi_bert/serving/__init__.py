"""The HTTP server of `gaudi-bert serve`, which packs the waiting texts of all requests into a few static batch shapes."""
