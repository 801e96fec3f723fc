"""The HTTP API of llama.cpp's server."""
