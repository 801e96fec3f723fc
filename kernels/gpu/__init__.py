"""The parts that Triton kernels share: the device, and the KV cache in its memory."""
