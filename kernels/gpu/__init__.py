"""Common parts of Triton kernels, such as the device, and the KV cache in its memory."""
