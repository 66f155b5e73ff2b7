"""Backends of multi-head latent attention, and the libraries that attend to its prompts."""
