"""Small helpers that every part may use: checks, files, statistics, progress, loading models."""
