"""What computes a model: C++, Triton, or segments on an execution provider."""
