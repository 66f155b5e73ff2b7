"""Other libraries' models on attnbackend's ops."""
