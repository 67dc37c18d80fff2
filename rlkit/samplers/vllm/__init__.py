"""Rollouts by a vLLM server: the server, its guard, its worker, and how it gets new weights."""
