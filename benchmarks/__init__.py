"""Measurements of attnbackend: `python -m benchmarks.engine` compares the engine with transformers."""
