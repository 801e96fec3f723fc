"""Back ends that compute a model: C++, Triton, or segments on an execution provider."""
