"""Names of back ends in `prefill` and `decode`, beside those of execution providers.

Native and Triton kernels run a token through all layers in one call; the other back ends run graphs
of ONNX Runtime with attention between them.
"""

AUTO = "auto"
NATIVE = "native"
TRITON = "triton"
PORTABLE = "portable"
REFERENCE = "reference"
CHUNKED = "chunked"
# Back ends that take packed weights.
STEPS = (NATIVE, TRITON)
# All but `chunked` decode apart from prefill, unless the same back end runs prefill as well.
DECODE_BACKENDS = (AUTO, NATIVE, TRITON, PORTABLE, REFERENCE, CHUNKED)
